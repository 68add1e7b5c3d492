"""Interface of the generator behind an engine's HTTP server. Implemented by the native engine
(`engine.native.generation`) and by clients of servers such as vLLM (`stretto_servers`)."""

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

#: Default reason why completions end early; it follows the engine's name in a message.
ENDED = "ended before the completion did"


class Stream:
    """Finished completions of requests that were submitted together, encoded as frames (`core.frames`) for one HTTP
    response. `completions`: how many the requests have in all."""

    def __init__(self, completions: int) -> None:
        self.missing = completions  # completions that have not ended; 0 once the stream was refused
        self.broken = False  # the engine failed, or the client went away
        self._ready = bytearray()
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether `next` returns frames without waiting."""
        return bool(self._ready)

    def ended(self, completion: Completion) -> None:
        """Append a finished completion to the frames; ignored once the stream was refused."""
        if not self.missing:
            return
        self._ready += frame(completion)
        self.missing -= 1
        self._wake.set()

    def refuse(self, error: RefusedRequest | EngineLied) -> None:
        """End the stream with an error that was found after submission: a refused request, or invalid results. The
        error is the last frame; completions that finished before are still delivered. A complete stream ignores it."""
        if self.missing:
            self._ready += frame([Refusal.of(error)])
            self.missing = 0
            self._wake.set()

    def break_off(self, why: str = ENDED) -> None:
        """End the stream before its completions have ended (`why` is not sent); those that have are still delivered. A
        complete stream stays as it is."""
        self.broken = self.missing > 0
        self._wake.set()

    async def next(self) -> bytes:
        """Wait for frames and return all since the last call; may be empty if the stream is broken. Call it only while
        `missing` or `ready`: it has no timeout."""
        await self._wake.wait()
        self._wake.clear()
        chunk, self._ready = bytes(self._ready), bytearray()
        return chunk


class Backend(Protocol):
    """Generates completions and loads weights. A WireError or EngineLost that is raised here is raised again by the
    client of the HTTP server."""

    async def prepare(self, requests: Sequence[GenerateRequest]) -> None:
        """Do slow preparations for `submit_all`, such as compiling grammars, while generation continues. Raises
        RefusedRequest if a request is invalid, or cannot be prepared in time."""

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Submit requests that start together; the stream gets each completion when it has ended.

        Raises:
            RefusedRequest: a request is invalid; then none is accepted.
            EngineLost: the server is stopping, or too many completions wait.
        """

    def close(self, request: str) -> None:
        """End the request with this id and abort its unfinished completions. An unknown id is ignored."""

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """New tokens of unfinished completions, by request id and member; completions without any are left out.
        `known`: by request id, the number of tokens of each member that the caller already has; other requests are
        left out."""

    async def update(self, version: int, challenge: Challenge | None = None) -> Loaded:
        """Load a published version, unless it is loaded and proven; returns the version that samples the next token,
        and the scores that answer the challenge. `challenge`: a text with the trainer's log-probabilities, which prove
        the weights; None: no check. With it, no token is sampled before the engine has answered it, nor after an answer
        outside the tolerance, until a version is loaded.

        Raises:
            WireError: the version is not published, not of this model, or older than the version in use; the engine
                keeps its version.
            EngineLost: the engine does not reply.
        """

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text (token ids), by the version in use, at temperature
        1.

        Raises:
            RefusedRequest: a text is empty, longer than the context, or has tokens outside the vocabulary.
            EngineLost: the engine does not reply.
        """

    async def health(self) -> EngineHealth:
        """The engine's version, queue length and counters."""

    def drain_spans(self) -> list[Span]:
        """Times at which the engine was busy, since the last call; each span is returned once."""
