"""``tokens/``: how each training step treated each sampled token, one file per step.

step-000007.safetensors     columns over the sampled tokens of the step's trajectories, one trajectory after the other

Nothing in a run depends on these files; they are for looking at tokens afterwards. A step that is trained again
rewrites its file.

Axes: T trajectory, S sampled token of all of them.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store.config import GIB

_NAME = re.compile(r"step-(\d{6,})\.safetensors")
_IDS, _LENGTHS = "trajectories", "lengths"
_COLUMNS = {"trainer_logprob": np.float32, "ratio": np.float32, "advantage": np.float32, "outcome": np.uint8}


class TokenOutcome(IntFlag):
    """Treatment of a sampled token by the loss, as flags: it is in the loss, which bounded it; the correction changed
    its weight, or set it to 0. No flag: it was too old for the loss."""

    IN_LOSS = 1
    BOUNDED = 2  # the loss clipped or bounded it; counted by `clip_fraction`
    CORRECTED = 4  # the correction changed its weight; counted by `capped_fraction`
    WEIGHTLESS = 8  # the correction set its weight to 0


@dataclass(frozen=True)
class SampledTokens:
    """Columns over the sampled tokens of one or several trajectories, concatenated; NaN where a number is unknown.
    `trainer_logprob`: under the proximal policy, before the step. `ratio`: importance ratio in the loss.

    Example: two tokens, the first too old for the loss::

        SampledTokens(trainer_logprob=[nan, -0.51], ratio=[nan, 1.31], advantage=[nan, 0.5],
            outcome=[0, TokenOutcome.IN_LOSS | TokenOutcome.BOUNDED])
    """

    trainer_logprob: NDArray[np.float32]  # [S] log-probability under the proximal policy, before the step
    ratio: NDArray[np.float32]  # [S] importance ratio u of the loss, of the token or of its completion
    advantage: NDArray[np.float32]  # [S]
    outcome: NDArray[np.uint8]  # [S]


class TokenFiles:
    """Writes the token files of a run into `folder`, and removes the oldest when they exceed `most_gib` GiB. Not
    thread-safe."""

    def __init__(self, folder: Path, most_gib: float) -> None:
        self._folder, self._most = folder, most_gib * GIB
        # Of the files, ascending by step. As numbers alone: a run of days has a hundred thousand of them.
        self._steps, self._sizes = array("q"), array("q")
        self._total = -1  # bytes; -1: the folder was not looked at yet

    def write(self, step: int, lengths: Mapping[str, int], tokens: SampledTokens) -> None:
        """Write the file of a step, completely or not at all, replacing an earlier one; then remove the oldest files,
        this one too, until the rest is small enough. The file is not synced to disk: that would delay the ledger.

        Args:
            lengths: number of sampled tokens of each trajectory, by id.
            tokens: the columns, with the trajectories in the order of `lengths`.

        Raises:
            OSError: the file cannot be written.
        """
        if self._total < 0:
            self._look()
        columns: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(getattr(tokens, name), dtype=kind) for name, kind in _COLUMNS.items()
        }
        columns[_LENGTHS] = np.array(list(lengths.values()), dtype=np.int64)
        data = save(columns, {_IDS: msgspec.json.encode(list(lengths)).decode()})
        path = tokens_file(self._folder, step)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._note(step, len(data))
        while self._total > self._most:
            tokens_file(self._folder, self._steps.pop(0)).unlink(missing_ok=True)
            self._total -= self._sizes.pop(0)

    def _look(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if (name := _NAME.fullmatch(entry.name)) is not None:
                    self._steps.append(int(name[1]))
                    self._sizes.append(entry.stat().st_size)
        order = np.argsort(self._steps)
        self._steps, self._sizes = (array("q", np.asarray(one)[order].tobytes()) for one in (self._steps, self._sizes))
        self._total = sum(self._sizes)

    def _note(self, step: int, size: int) -> None:
        """Note the size of a new file in bytes, or the new one of a step that is done again."""
        place = bisect_left(self._steps, step)
        if place < len(self._steps) and self._steps[place] == step:
            self._total -= self._sizes[place]
            self._sizes[place] = size
        else:
            self._steps.insert(place, step)
            self._sizes.insert(place, size)
        self._total += size


def tokens_file(folder: Path, step: int) -> Path:
    """Path of a step's token file: ``step-000007.safetensors`` for step 7."""
    return folder / f"step-{step:06d}.safetensors"


def read_tokens(folder: Path, step: int, ids: Sequence[str]) -> dict[str, SampledTokens]:
    """Read the columns of the trajectories `ids` from the file of a step, by id. Trajectories that are not in the file
    are left out.

    Raises:
        FileNotFoundError: the step has no file.
        StoreError: the file is damaged.
    """
    path = tokens_file(folder, step)
    try:
        with safe_open(path, framework="numpy") as file:
            names = msgspec.json.decode((file.metadata() or {})[_IDS], type=list[str])
            ends = np.cumsum(file.get_tensor(_LENGTHS))
            starts = dict(zip(names, zip(ends - file.get_tensor(_LENGTHS), ends, strict=True), strict=True))
            return {id: _record(file, id, *starts[id]) for id in ids if id in starts}
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, *UNREADABLE) as error:
        raise StoreError(f"{path.name}: cannot be read: {error}") from error


def _record(file: Any, id: str, start: int, end: int) -> SampledTokens:
    if start == end:  # the library refuses an empty slice
        return SampledTokens(*(np.empty(0, dtype=kind) for kind in _COLUMNS.values()))
    columns = {name: file.get_slice(name)[int(start) : int(end)] for name in _COLUMNS}
    if {column.shape for column in columns.values()} != {(end - start,)}:
        raise ValueError(f"the columns of {id} have not {end - start} numbers")
    return SampledTokens(**columns)
