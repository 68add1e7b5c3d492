"""The engine of `stretto serve`, which samples in a process of its own, so that sending takes no time from its steps.

request ─► /submit ─► engine's process: step, step, step ...
                                 │ one message a step, with the new tokens of all requests
client ◄─ take(token) ◄──────────┘
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn

import msgspec
from starlette.types import Receive, Scope, Send

from stretto.core.engine import EngineHealth, NewToken, Progress
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, StrettoError, WireError
from stretto.core.records import Completion, GenerateRequest
from stretto.core.tasks import run_beside, to_the_end
from stretto.engine.backend import ENDED
from stretto.engine.http.client import HttpEngine, error_of
from stretto.engine.http.connections import Connections
from stretto.engine.wire import MSGPACK, Refusal, Sampled
from stretto.processes.http.asgi import LARGEST_BODY, read_body, reply, unless_gone

log = logging.getLogger(__name__)

#: Sends a new token to a client; returns False to get the token from the iterator later instead.
Take = Callable[[NewToken], bool]

_LOOKS = 6  # at an engine with open requests, within the longest wait for a reply
_AGAIN_SECONDS = 0.1  # between two attempts to reach an engine that is being replaced
_LATER = [(b"retry-after", b"1")]


class _TokenStream:
    """The tokens of requests submitted together, as they are sampled.

    Each token is offered to `take` (None: nobody) when it arrives. Iterating yields the tokens that `take` has not
    consumed, and the end of each completion. So a step with many streams need not wake a task for each of them.
    `completions`: how many the requests have in all.
    """

    def __init__(self, completions: int, take: Take | None = None) -> None:
        self.missing, self._take = completions, take
        self._new: list[Progress] = []
        self._known = Counter[tuple[str, int]]()  # tokens of each completion so far
        self._error: StrettoError | None = None
        self._fault: Exception | None = None  # of `take`
        self._wake = asyncio.Event()

    def progressed(self, new: NewToken) -> None:
        """Offer the next token of an unfinished completion to `take`. Queue it for the iterator if `take` does not
        consume it or fails, or if earlier tokens are queued."""
        self._known[new.request, new.member] += 1
        try:
            if self._take is not None and not self._new and self._take(new):
                return
        except Exception as error:  # a fault of one client's stream must not end the others'; its iterator raises it
            self._fault = self._fault or error
        self._pass_on(new.progress())

    def ended(self, completion: Completion) -> None:
        """Queue the end of a finished completion for the iterator: its tokens that `progressed` has not had, with the
        stop reason."""
        self.missing -= 1
        known = self._known[completion.request, completion.member]
        rest, likeliest = completion.segment.after(known), completion.top_logprobs[known:]
        self._pass_on(Progress(completion.request, completion.member, rest, likeliest))

    def _pass_on(self, progress: Progress) -> None:
        self._new.append(progress)
        self._wake.set()

    def fail(self, error: StrettoError) -> None:
        """End the stream: the iterator raises `error` instead of further tokens, queued ones included. A second error,
        or one after the last completion has ended, is ignored."""
        self._error = self._error or error
        self._wake.set()

    def __aiter__(self) -> _TokenStream:
        return self

    async def __anext__(self) -> list[Progress]:
        """Wait for tokens; returns all since the last call, one `Progress` per completion and step. It has no timeout.

        Raises:
            StopAsyncIteration: all completions have ended and were returned.
            StrettoError: the error of `fail`.
            Exception: an error raised by the consumer `take`.
        """
        while True:
            if (error := self._fault or (self._error if self.missing else None)) is not None:
                raise error
            if self._new:
                new, self._new = self._new, []
                return new
            if not self.missing:
                raise StopAsyncIteration
            await self._wake.wait()
            self._wake.clear()


class RemoteEngine:
    """A native engine that passes on each token when it is sampled; the tokens of all requests come over one connection
    (a feed). Satisfies `engine.http.lifecycle.OpenWork`.

    An engine that ends, or is replaced, ends all requests in progress with EngineLost; later requests go to its
    successor at the same address.
    """

    def __init__(
        self,
        name: str,
        address: str,
        seconds: float = 120.0,
        suspect: Callable[[], None] = lambda: None,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`name`: of the engine, for errors. `address`: ``unix:/path/to.sock`` or ``host:port``. `seconds`: longest
        wait for a reply; the engine replies between two steps. `suspect`: called when a reply has not come in time.
        `progressed`: called when completions have ended."""
        self.name = name
        self.stopping = False  # open requests are finished, new ones refused
        self.opened = asyncio.Event()  # the engine takes requests; else it starts, or is being replaced
        self._client = HttpEngine(name, address, health_seconds=seconds)
        self._connections = Connections(name, address)
        self._seconds, self._suspect, self._progressed = seconds, suspect, progressed
        self._streams = dict[str, _TokenStream]()
        self._passed = 0  # requests in progress that `pass_on` has passed on
        self._left = list[str]()  # ids of requests that the engine is to abort
        self._leaving = asyncio.Event()
        self._feed = ""  # name of the newest feed

    @property
    def open_requests(self) -> int:
        """Number of requests in progress."""
        return len(self._streams) + self._passed

    @asynccontextmanager
    async def streaming(
        self, requests: Sequence[GenerateRequest], take: Take | None = None
    ) -> AsyncIterator[_TokenStream]:
        """Context manager: wait for a connection to the engine (without a deadline), submit requests, and abort those
        that are not over at the end, soon after it. It yields an iterator: without `take`, over completions that have
        ended. With `take`, each token is passed to `take` when it arrives; if that is False, the iterator yields it.

        Raises:
            RefusedRequest: the engine refuses one of the requests, and so all; the iterator may raise it too.
            EngineLost, DeadlineExceeded: the server stops, too many completions wait, or the engine does not reply; the
                iterator raises EngineLost if the engine ends.
        """
        await self.opened.wait()  # no deadline: an engine that is not replaced in time ends the server
        if self.stopping:
            raise EngineLost(self.name, "is stopping")
        stream = _TokenStream(sum(len(request.seeds) for request in requests), take)
        self._streams |= {request.id: stream for request in requests}
        try:
            # To the end: the abort of a client that has gone must not overtake its requests.
            await to_the_end(self._submit(requests, every_token=take is not None))
            yield stream
        finally:
            for request in requests:
                self._streams.pop(request.id, None)
            if stream.missing:
                self._left += [request.id for request in requests]
                self._leaving.set()

    async def _submit(self, requests: Sequence[GenerateRequest], *, every_token: bool) -> None:
        with self._call():
            await self._client.submit(self._feed, requests, every_token=every_token)

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            yield
        except RefusedRequest:
            raise
        except DeadlineExceeded:
            self._suspect()
            raise
        except WireError as error:  # this process has no descriptor free, say: the client may try again
            raise EngineLost(self.name, f"cannot be asked: {error}") from None

    async def health(self) -> EngineHealth:
        """Version of the weights, length of the queue, and counters. Raises EngineLost, DeadlineExceeded."""
        with self._call():
            return await self._client.health()

    async def run(self) -> None:
        """Receive tokens until cancelled; then `break_off` is called. If the engine is lost, wait for its successor.
        Raises WireError if a message of an open feed cannot be decoded."""
        try:
            while True:
                feed = uuid.uuid4().hex
                try:
                    await run_beside(self._abort(), self._receive(feed))
                except WireError:
                    if self._feed == feed:
                        raise  # else this process has no descriptor free: a client may go
                except (EngineLost, DeadlineExceeded):
                    pass  # a successor comes
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self.break_off()

    async def _abort(self) -> NoReturn:
        """Loop: make the engine abort the requests that clients have left; repeated until the engine has replied. While
        requests are open, the engine is asked even with none to abort: this notices an engine that hangs, whose
        heartbeats go on."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds / _LOOKS):
                    await self._leaving.wait()
            self._leaving.clear()
            if not (self._left or self.open_requests):
                continue
            left, self._left = self._left, []
            try:
                with self._call():
                    await self._client.abort(left)
            except (EngineLost, DeadlineExceeded):  # it is late, or this process has no descriptor free
                self._left += left
                await asyncio.sleep(_AGAIN_SECONDS)
                self._leaving.set()

    async def _receive(self, feed: str) -> None:
        """Open a feed with this name and pass on what comes, until it breaks off. Its end aborts all its requests."""
        self._left.clear()
        try:
            async for sampled in self._client.tokens(feed):
                self._feed = feed
                self.opened.set()
                self._pass_on(sampled)
        finally:
            self.opened.clear()
            self._end_all()

    def _pass_on(self, sampled: Sampled) -> None:
        streams = self._streams
        for new in sampled.tokens:
            if (stream := streams.get(new.request)) is not None:
                stream.progressed(new)
        if sampled.ended:
            self._progressed()
        for completion in sampled.ended:
            if (stream := streams.get(completion.request)) is not None:
                stream.ended(completion)
        for request, told in sampled.refused:
            if (stream := streams.get(request)) is not None:
                stream.fail(error := error_of(told))
                if isinstance(error, EngineLost):
                    log.warning("request %s: %s", request, error)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI application: pass a request of the engine's own interface on to the engine, and its reply back. A body
        that is too large gets a 413; a 503 means that the engine is lost, or does not begin completions any more."""
        body = await read_body(scope, receive)
        if body is None:
            await _refuse(send, 413, RefusedRequest("body", "too many bytes", f"at most {LARGEST_BODY:,} bytes"))
        elif self.stopping and scope["path"] == "/generate":
            await _refuse(send, 503, EngineLost(self.name, "is stopping"))
        else:
            self._passed += 1
            try:
                await unless_gone(receive, self._exchange(scope, body, send))
            finally:
                self._passed -= 1

    async def _exchange(self, scope: Scope, body: bytes, send: Send) -> None:
        connection = None
        try:
            async with self._connections.one() as connection:
                connection.send(scope["method"], scope["path"], body)
                part = await connection.read()
                headers = [(b"content-type", MSGPACK.encode()), *(_LATER if connection.status == 503 else ())]
                await send({"type": "http.response.start", "status": connection.status, "headers": headers})
                while part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    part = await connection.read()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            if scope["path"] == "/generate" and connection.status == 200:
                self._progressed()
        except (EngineLost, DeadlineExceeded, WireError) as error:
            lost = error if isinstance(error, EngineLost) else EngineLost(self.name, f"cannot be asked: {error}")
            if connection is None or not connection.status:  # else the server breaks off the reply that has begun
                await _refuse(send, 503, lost)

    def break_off(self) -> None:
        """End every request in progress now, and refuse new ones."""
        self.stopping = True
        self._end_all()
        self.opened.set()  # for those that wait

    def _end_all(self) -> None:
        for stream in self._streams.values():
            stream.fail(EngineLost(self.name, ENDED))


async def _refuse(send: Send, status: int, error: RefusedRequest | EngineLost) -> None:
    body = msgspec.msgpack.encode(Refusal.of(error))
    await reply(send, status, MSGPACK, body, _LATER if status == 503 else ())
