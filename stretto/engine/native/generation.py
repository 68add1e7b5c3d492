"""The one task that steps an engine, and those who listen to its answers.

open(request) ─► stream ◄─ ended(completion) ◄─ run(): step, step, step ...
follow(request, listener) ─► listener ◄─ progressed(tokens), ended(completion)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.frames import frame
from stretto.core.records import MOST_ANSWERS, Completion, GenerateRequest
from stretto.engine.native.completions import Progress
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.sampling import BrokenLogits

log = logging.getLogger(__name__)

#: Answers that may wait for a row; more of them would only grow the memory and the waiting. One request may fill it.
MOST_WAITING = MOST_ANSWERS

#: What an engine did whose answers break off, if nothing else is known.
ENDED = "ended before the answer did"

#: Turns of the event loop between two steps. A request takes two or three until it is queued (its bytes are read, its
#: handler starts, the handler has the body); with one turn between steps it would wait for as many steps. Three halve
#: the time to the first token of 16 streams, and cost nothing that can be seen.
_TURNS = 3


class CompletionListener(Protocol):
    """Who asked for answers. Called between two steps, so what it does must be quick."""

    @property
    def missing(self) -> int:
        """Answers that have not ended."""
        ...

    def progressed(self, progress: Progress) -> None:
        """An unfinished answer has new tokens. Only those who follow every token are told."""
        ...

    def ended(self, completion: Completion) -> None:
        """An answer is whole; it holds the tokens that were told before, too."""
        ...

    def break_off(self, why: str = ENDED) -> None:
        """No more answers will come: the engine failed, or the request was aborted. `why` follows the engine's name."""
        ...


class Stream:
    """The answers to requests that were sent together, on their way to the client as frames."""

    def __init__(self, answers: int) -> None:
        self.missing = answers
        self.broken = False  # the engine failed, or the client went away
        self._ready = bytearray()
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    def progressed(self, progress: Progress) -> None:
        """Nothing: frames hold whole answers."""

    def ended(self, completion: Completion) -> None:
        self._ready += frame(completion)
        self.missing -= 1
        self._wake.set()

    def break_off(self, why: str = ENDED) -> None:
        self.broken = self.missing > 0  # whole answers are delivered all the same
        self._wake.set()

    async def next(self) -> bytes:
        """All frames since the last call, at least one unless it broke. The client keeps the deadline."""
        await self._wake.wait()
        self._wake.clear()
        chunk, self._ready = bytes(self._ready), bytearray()
        return chunk


class Generation:
    """The engine and those who listen to it."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.stopping = False  # open requests are answered, new ones are not
        self._listeners: dict[str, CompletionListener] = {}
        self._told: dict[str, list[int]] = {}  # tokens of each answer that its follower knows, by request
        self._work = asyncio.Event()

    @property
    def open_requests(self) -> int:
        return len(self._listeners)

    def open(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Begin requests whose answers are wanted whole; no step is made before the last of them has begun.

        Raises:
            RefusedRequest: the engine will not serve one of them; none has begun.
            EngineLost: the server is stopping, or too many answers wait already.
        """
        stream = Stream(sum(len(request.seeds) for request in requests))
        begun: list[str] = []
        try:
            for request in requests:
                self.follow(request, stream, every_token=False)
                begun.append(request.id)
        except (RefusedRequest, EngineLost):
            for id in begun:
                self.close(id)
            raise
        return stream

    def follow(self, request: GenerateRequest, listener: CompletionListener, *, every_token: bool) -> None:
        """Begin a request; `listener` hears of its answers until `close`.

        Raises:
            RefusedRequest, EngineLost: as for `open`.
        """
        if self.stopping:
            raise EngineLost(self.engine.name, "is stopping")
        if request.id in self._listeners:  # the engine may be done with it; whoever asked is still being answered
            raise RefusedRequest("id", repr(request.id), "an id that no open request has")
        if self.engine.waiting and self.engine.waiting + len(request.seeds) > MOST_WAITING:
            how = f"has {self.engine.waiting:,} answers waiting already, of {MOST_WAITING:,} that may"
            raise EngineLost(self.engine.name, how)
        self.engine.add(request)
        self._work.set()
        self._listeners[request.id] = listener
        if every_token:
            self._told[request.id] = [0] * len(request.seeds)

    def close(self, request: str) -> None:
        """End a request; unfinished answers are aborted. Closing twice is no error."""
        listener = self._listeners.pop(request, None)
        self._told.pop(request, None)
        if listener is not None and listener.missing:
            listener.break_off()
            self.engine.abort(request)

    async def run(self) -> None:
        """Step for as long as there is work, for ever. An error of the engine breaks all requests and is raised."""
        try:
            while True:
                if self.engine.idle:
                    self.engine.check_integrity()  # nothing is owed to anybody, so nothing may be held
                    self._work.clear()
                    await self._work.wait()  # without a deadline: having nothing to do is no failure
                for completion in self._step():
                    self._listeners[completion.request].ended(completion)
                if self._told:
                    self._tell()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)  # requests are read, answers written, weights loaded
        finally:
            self.break_off()

    def break_off(self) -> None:
        """End every request as it is, and begin no other."""
        self.stopping = True
        for listener in self._listeners.values():
            listener.break_off()

    def _step(self) -> list[Completion]:
        return self.engine.step()

    def _tell(self) -> None:
        for progress in self.engine.progress(self._told):
            self._told[progress.request][progress.member] += len(progress.segment.token_ids)
            self._listeners[progress.request].progressed(progress)


class SharedGeneration(Generation):
    """The engine of clients who know nothing of each other: what one of them asks must not end the answers of others.

    A request whose logits are not finite ends by itself. The weights are, since they were loaded from a folder
    (`model.hf.folder.load_policy`); their sums have left the range of `engine.dtype`. In a run that is an error,
    which `Generation` raises: an answer that is missing for such a reason would bend the distribution that is trained.
    """

    def _step(self) -> list[Completion]:
        try:
            return super()._step()
        except BrokenLogits as broken:
            for request in broken.requests:
                log.warning("%s gives up request %s: %s", self.engine.name, request, broken)
                self._listeners[request].break_off(f"cannot go on: {broken}")
            self.engine.give_up(broken.requests)
            return []
