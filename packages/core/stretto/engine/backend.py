"""What generates behind an engine's HTTP server: the model of this process (`engine.native`), or a server of another
make (`stretto_servers`)."""

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

#: Why completions break off, if nothing else is known; follows the engine's name.
ENDED = "ended before the completion did"


class Stream:
    """The completions of requests that were submitted together, as frames."""

    def __init__(self, completions: int) -> None:
        self.missing = completions
        self.broken = False  # the engine failed, or the client went away
        self._ready = bytearray()
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    def ended(self, completion: Completion) -> None:
        """A completion is finished."""
        if not self.missing:  # they were refused
            return
        self._ready += frame(completion)
        self.missing -= 1
        self._wake.set()

    def refuse(self, error: RefusedRequest | EngineLied) -> None:
        """One of the requests turns out not to be served, or not truly; finished completions are delivered all the
        same."""
        if self.missing:
            self._ready += frame([Refusal.of(error)])
            self.missing = 0
            self._wake.set()

    def break_off(self, why: str = ENDED) -> None:
        """No more completions will come; finished ones are delivered all the same."""
        self.broken = self.missing > 0
        self._wake.set()

    async def next(self) -> bytes:
        """All frames since the last call, at least one unless the stream is broken. The client has the deadline."""
        await self._wake.wait()
        self._wake.clear()
        chunk, self._ready = bytes(self._ready), bytearray()
        return chunk


class Backend(Protocol):
    """See the module. Errors reach the client as they are raised here."""

    async def prepare(self, requests: Sequence[GenerateRequest]) -> None:
        """What takes long before `submit_all`, beside the generation.

        Raises:
            RefusedRequest: as `submit_all`.
        """
        ...

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Submit requests whose completions are streamed whole.

        Raises:
            RefusedRequest: one of them will not be served, and so none.
            EngineLost: the server is stopping, or too many completions wait.
        """
        ...

    def close(self, request: str) -> None:
        """End a request; unfinished completions are aborted. Closing twice is no error."""
        ...

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """What unfinished completions have beyond their known tokens."""
        ...

    async def update(self, version: int, challenge: Challenge | None = None) -> Loaded:
        """Load a published version, unless it is there and proven; returns the version that samples the next token.
        With a challenge nothing is sampled before it is answered, nor after it, outside of its tolerance.

        Raises:
            WireError: it is not published, or not of this model; the engine goes on as it was.
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
        """Version, queue and counters."""
        ...

    def drain_spans(self) -> list[Span]:
        """What it did since the last call."""
        ...
