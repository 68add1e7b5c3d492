"""Streaming of a completion's text in pieces.

engine ─► new tokens ─► characters ─► text before a stop ─► pieces ─► client
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stretto.conversation.messages import SampledToken, SamplingOptions
from stretto.conversation.text import RunningText, StopFinder
from stretto.core.engine import Progress
from stretto.core.records import StopReason
from stretto_gateway.model import ServedModel


class Piece(NamedTuple):
    """New text of a completion. `tokens`: its tokens, if the client wants log-probabilities. `finish`: why the
    completion ended; None except in its last piece."""

    text: str
    tokens: Sequence[SampledToken]
    finish: StopReason | None


class CompletionText:
    """Text of one completion while it is sampled; it ends before the first stop text."""

    def __init__(self, model: ServedModel, options: SamplingOptions) -> None:
        self._model, self._with_tokens = model, options.logprobs is not None
        self._running, self._stop = RunningText(model.template), StopFinder(options.stop)
        self._length = 0  # of the text so far, held-back characters included
        self._text: list[str] = []
        self._tokens: list[SampledToken] = []
        self._finish: StopReason | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the client gets text only (no log-probabilities) and there is no stop text to look for."""
        return not self._with_tokens and not self._stop.looks

    def push(self, token: int) -> str:
        """Add one token of a plain completion (`is_plain`); returns the characters that are complete with it, maybe
        ""."""
        return self._running.push((token,))

    def take(self, progress: Progress) -> Piece | None:
        """Add new tokens; returns the text since the last piece, None if there is nothing to send yet. Characters that
        may begin a stop text are held back."""
        new = progress.segment
        if self._finish is not None:
            return None
        if not self._with_tokens:
            self._add(self._running.push(new.token_ids))
        else:
            for id, token in zip(new.token_ids, self._model.tokens(new, progress.top_logprobs), strict=True):
                self._tokens.append(replace(token, offset=self._length))
                self._add(self._running.push((id,)))
        if new.stop_reason is not None and not self._stop.found:
            self._add(self._running.end())
            self._text.append(self._stop.end())
        self._finish = StopReason.STOP if self._stop.found else new.stop_reason
        text = "".join(self._text)
        if not text and self._finish is None:
            return None
        piece = Piece(text, self._tokens, self._finish)
        self._text, self._tokens = [], []
        return piece

    def _add(self, text: str) -> None:
        self._length += len(text)
        self._text.append(self._stop.push(text))
