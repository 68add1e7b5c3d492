"""The choices of one OpenAI request: text and log-probabilities, whole or in pieces.

    engine ─► listener of a prompt ─► choice: tokens ─► characters ─► text before a stop ─► pieces ─► client

An HTTP request may hold several prompts; each becomes one request to the engine. Choice k of prompt p has the index
``p * n + k``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, Likeliest, StopReason
from stretto.engine.backend import ENDED
from stretto.engine.native.completions import Progress, rest_of
from stretto.engine.native.detokenize import Detokenizer, RunningText
from stretto.engine.native.stops import StopFinder

Finish = Literal["stop", "length"]


class Token(NamedTuple):
    """A sampled token, its log-probability, and the offset of its text in the text of the choice."""

    id: int
    logprob: float
    offset: int
    likeliest: Likeliest  # empty if not requested


@dataclass(frozen=True)
class Piece:
    """New text and tokens of a choice; the last piece has a finish reason."""

    index: int
    text: str
    tokens: list[Token]
    finish: Finish | None


class Choice:
    """One completion. It ends before a stop text; the tokens of the stop text are counted."""

    def __init__(self, index: int, detokenizer: Detokenizer, stops: Sequence[str], *, token_by_token: bool) -> None:
        """
        Args:
            token_by_token: keep the offset of each token's text.
        """
        self.index = index
        self.finish: Finish | None = None
        self.sampled = 0  # tokens
        self._token_by_token = token_by_token
        self._running, self._stop = RunningText(detokenizer), StopFinder(stops)
        self._length = 0  # of the text so far, held-back characters included
        self._text: list[str] = []
        self._tokens: list[Token] = []

    def take(self, progress: Progress) -> None:
        """Add new tokens of the completion."""
        new = progress.segment
        if not self._token_by_token:
            self._push(new.token_ids)
            return
        told = progress.top_logprobs or [()] * len(new.token_ids)
        for token, logprob, likeliest in zip(new.token_ids, new.behavior_logprobs, told, strict=True):
            self._tokens.append(Token(token, logprob, self._length, likeliest))
            self._push((token,))

    def end(self, reason: StopReason) -> None:
        """End the choice: the engine has sent its last token."""
        if self.finish is None:
            self._say(self._running.end())
        if self.finish is None:
            self._text.append(self._stop.end())
            self.finish = "stop" if reason is StopReason.STOP else "length"

    def drain(self) -> Piece | None:
        """The piece since the last call; None if there is no new text and no end."""
        text = "".join(self._text)
        if not text and self.finish is None:
            return None
        piece = Piece(self.index, text, self._tokens, self.finish)
        self._text, self._tokens = [], []
        return piece

    def _push(self, token_ids: Sequence[int]) -> None:
        self.sampled += len(token_ids)
        self._say(self._running.push(token_ids))

    def _say(self, text: str) -> None:
        self._length += len(text)
        self._text.append(self._stop.push(text))
        if self._stop.found:
            self.finish = "stop"


class Choices:
    """All choices of one HTTP request."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self.broken: str | None = None  # why the request broke off: the engine failed, stopped, or aborted it
        self.refused: RefusedRequest | None = None  # the request turns out not to be served
        self.gone = False  # the client has disconnected
        self.first_token: float | None = None  # time of the first token, as time.monotonic
        self._changed: dict[int, Choice] = {}
        self._wake = asyncio.Event()

    @property
    def missing(self) -> int:
        return sum(choice.finish is None for choice in self.choices)

    @property
    def sampled(self) -> int:
        return sum(choice.sampled for choice in self.choices)

    def changed(self, choice: Choice) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self._changed[choice.index] = choice
        self._wake.set()

    def break_off(self, why: str) -> None:
        self.broken = self.broken or why
        self._wake.set()

    def refuse(self, error: RefusedRequest) -> None:
        self.refused = self.refused or error
        self.break_off(str(error))

    def leave(self) -> None:
        self.gone = True
        self._wake.set()

    async def whole(self) -> list[Piece]:
        """Every choice as one piece, after all have ended; empty if the request breaks off before."""
        while self.missing and self.broken is None and not self.gone:
            self._wake.clear()
            await self._wake.wait()  # the client keeps the deadline
        return [] if self.missing else [piece for choice in self.choices if (piece := choice.drain()) is not None]

    async def pieces(self) -> list[Piece]:
        """The pieces since the last call; the client keeps the deadline. Check `broken` and `gone` afterwards."""
        await self._wake.wait()
        self._wake.clear()
        changed, self._changed = self._changed, {}
        return [piece for choice in changed.values() if (piece := choice.drain()) is not None]


class PromptListener:
    """The completions of one prompt (a `generation.CompletionListener`)."""

    def __init__(self, whole: Choices, choices: Sequence[Choice]) -> None:
        self.missing = len(choices)
        self._whole, self._choices = whole, choices
        self._known = [0] * len(choices)  # tokens of each member that its choice has

    def progressed(self, progress: Progress) -> None:
        choice = self._choices[progress.member]
        if choice.finish is None:
            self._known[progress.member] += len(progress.segment.token_ids)
            choice.take(progress)
            self._whole.changed(choice)

    def ended(self, completion: Completion) -> None:
        self.missing -= 1
        choice, known = self._choices[completion.member], self._known[completion.member]
        if choice.finish is None:
            choice.take(rest_of(completion, known))
            choice.end(completion.stop_reason)
            self._whole.changed(choice)

    def refuse(self, error: RefusedRequest) -> None:
        self._whole.refuse(error)

    def break_off(self, why: str = ENDED) -> None:
        self._whole.break_off(why)
