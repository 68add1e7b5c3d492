"""The generator behind an engine's HTTP server: the model of this process (`engine.native`), or a server such as vLLM
(`stretto_servers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from stretto.core.canary import Challenge, Loaded
from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLied, RefusedRequest
from stretto.core.events import Span
from stretto.core.frames import frame
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.engine.wire import Refusal

#: Default reason for completions that break off; follows the engine's name in a message.
ENDED = "ended before the completion did"


class Stream:
    """The completions of requests submitted together, as frames."""

    def __init__(self, completions: int) -> None:
        self.missing = completions
        self.broken = False  # the engine failed, or the client went away
        self._ready = bytearray()
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    def ended(self, completion: Completion) -> None:
        """Send a finished completion."""
        if not self.missing:  # their requests were refused
            return
        self._ready += frame(completion)
        self.missing -= 1
        self._wake.set()

    def refuse(self, error: RefusedRequest | EngineLied) -> None:
        """End the stream because a request turned out to be refused, or its results invalid; finished completions are
        still delivered."""
        if self.missing:
            self._ready += frame([Refusal.of(error)])
            self.missing = 0
            self._wake.set()

    def break_off(self, why: str = ENDED) -> None:
        """End the stream early; finished completions are still delivered."""
        self.broken = self.missing > 0
        self._wake.set()

    async def next(self) -> bytes:
        """All frames since the last call; waits for at least one, unless the stream is broken. No timeout here: the
        client has one."""
        await self._wake.wait()
        self._wake.clear()
        chunk, self._ready = bytes(self._ready), bytearray()
        return chunk


class Backend(Protocol):
    """Generates completions and loads weights; errors raised here reach the client unchanged."""

    async def prepare(self, requests: Sequence[GenerateRequest]) -> None:
        """Do slow preparations for `submit_all`, such as compiling grammars, while generation continues.

        Raises:
            RefusedRequest: as `submit_all`.
        """
        ...

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Submit requests; each completion is streamed when it is whole.

        Raises:
            RefusedRequest: one of them is invalid; none is accepted then.
            EngineLost: the server is stopping, or too many completions wait.
        """
        ...

    def close(self, request: str) -> None:
        """End a request and abort its unfinished completions. May be called twice."""
        ...

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Tokens of unfinished completions beyond the `known` ones, by request and member."""
        ...

    async def update(self, version: int, challenge: Challenge | None = None) -> Loaded:
        """Load a published version, unless it is loaded and proven; returns the version that samples the next token.
        With a challenge, sampling waits for the answer, and stops if that is outside the tolerance.

        Raises:
            WireError: it is not published, or not of this model; the engine goes on with its version.
            EngineLost: the engine does not answer.
        """
        ...

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """The log-probabilities of all tokens but the first of each text by the version in use, at temperature 1.

        Raises:
            RefusedRequest: a text is none that the model can read.
            EngineLost: the engine does not answer.
        """
        ...

    async def health(self) -> EngineHealth:
        """Version, queue length and counters."""
        ...

    def drain_spans(self) -> list[Span]:
        """Busy spans since the last call."""
        ...
