"""The one task that steps an engine, and the streams that its answers leave by.

open(request) ─► stream ◄─ put(frame) ◄─ run(): step, step, step ...
"""

from __future__ import annotations

import asyncio

from stretto.core.frames import frame
from stretto.core.records import GenerateRequest
from stretto.engine.embedded import EmbeddedEngine


class Stream:
    """The answers of one open request on their way to the client."""

    def __init__(self, answers: int) -> None:
        self.missing = answers
        self.broken = False  # the engine failed, or the client went away
        self._ready = bytearray()
        self._wake = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    def put(self, answer: bytes) -> None:
        self._ready += answer
        self.missing -= 1
        self._wake.set()

    def break_off(self) -> None:
        self.broken = True
        self._wake.set()

    async def next(self) -> bytes:
        """All frames since the last call, at least one; empty when broken. The client keeps the deadline."""
        await self._wake.wait()
        self._wake.clear()
        chunk, self._ready = bytes(self._ready), bytearray()
        return b"" if self.broken else chunk


class Generation:
    """The engine and the streams of its open requests."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._streams: dict[str, Stream] = {}
        self._work = asyncio.Event()

    def open(self, request: GenerateRequest) -> Stream:
        """Begin a request.

        Raises:
            RefusedRequest: the engine will not serve it.
        """
        self.engine.add(request)
        self._work.set()
        self._streams[request.id] = stream = Stream(len(request.seeds))
        return stream

    def close(self, request: str) -> None:
        """End a request; unfinished answers are aborted. Closing twice is no error."""
        stream = self._streams.pop(request, None)
        if stream is not None and stream.missing:
            stream.break_off()
            self.engine.abort(request)

    async def run(self) -> None:
        """Step for as long as there is work, for ever. An error of the engine breaks all streams and is raised."""
        try:
            while True:
                if self.engine.idle:
                    self.engine.check_integrity()  # nothing is owed to anybody, so nothing may be held
                    self._work.clear()
                    await self._work.wait()  # without a deadline: having nothing to do is no failure
                for completion in self.engine.step():
                    self._streams[completion.request].put(frame(completion))
                await asyncio.sleep(0)  # requests are read, answers written, weights loaded
        finally:
            for stream in self._streams.values():
                stream.break_off()
