"""Writes token files (`store.series.tokens`) in a thread of the trainer's process while training continues."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from stretto.core.errors import described
from stretto.store.series.config import TokensConfig
from stretto.store.series.tokens import TokenFiles
from stretto.trainer.outcomes import TrainedTokens
from stretto.trainer.spec import TokensSpec

_PATIENCE_SECONDS = 10.0


class TokenWriter:
    """Token sink that writes the results of each step in a thread, one step at a time. A failed write is logged, and
    a step is left out, with a log line, while an earlier write hangs. Training continues in both cases."""

    def __init__(self, spec: TokensSpec, rank: int, patience: float = _PATIENCE_SECONDS) -> None:
        """`rank`: number of this rank; only rank 0 writes, since it runs on the run folder's machine. `patience`:
        longest wait for an earlier write, in seconds."""
        self._patience = patience
        self._config = TokensConfig.model_validate_json(spec.config)
        self._files = TokenFiles(Path(spec.folder), self._config.tokens_gib) if rank == 0 else None
        self._writing = threading.Thread()
        self._hangs = False  # disk hangs: do not wait for it again

    def keeps(self, step: int) -> bool:
        return self._config.keeps(step)

    def take(self, tokens: TrainedTokens) -> None:
        if self._files is None:
            return
        if not self.finish():
            self._say(tokens.batch.step, f"those of an earlier step are not written after {self._patience:g} s")
            return
        self._writing = threading.Thread(target=self._write, args=(self._files, tokens), name="tokens")
        self._writing.start()

    def finish(self) -> bool:
        """Wait until the last step is written; False if it is not written within `patience`."""
        if self._writing.ident is not None:
            self._writing.join(0.0 if self._hangs else self._patience)
        self._hangs = self._writing.is_alive()
        return not self._hangs

    def _write(self, files: TokenFiles, tokens: TrainedTokens) -> None:
        step = tokens.batch.step
        try:
            files.write(step, *tokens.sampled())
        except OSError as error:
            self._say(step, described(error))

    def _say(self, step: int, why: str) -> None:
        print(f"the tokens of step {step} are not on record: {why}", file=sys.stderr, flush=True)
