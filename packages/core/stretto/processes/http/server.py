"""uvicorn's server with bounds on the heads of requests, and on strangers: connections that have not yet shown the key.

httptools keeps a head (request line and headers, and the trailers of a body) until it ends, however long that is. Here
one of more than `LARGEST_HEAD` bytes is refused with 431, and its connection is closed. As with a body that is too
large, a bounded rest is read and dropped: most clients send everything before they read the reply.

At most `strangers` are open. A further one replaces one that has shown a wrong secret, or else the one that was idle
for longest; strangers whose request is being answered are not replaced, and if all are, the new caller is refused. A
stranger that is idle for `patience` seconds after its last reply (sends nothing, does not finish TLS, sends a request
very slowly, or takes nothing of its reply) is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stretto.core.tasks import cancel_and_wait
from stretto.processes.http.asgi import DROPPED_BYTES, DROPPED_SECONDS, WRITE_NOW
from stretto.processes.http.transport import Gathered, GatheringTransport, zero_copy

STRANGERS = 256
PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
_AT_ONCE = 128  # callers accepted in a row before other tasks run
_ADMIT, _GIVE_WAY = "stretto.admit", "stretto.give_way"
LARGEST_HEAD = 64 << 10
_OF_HEADER, _OF_REQUEST = len(": \r\n"), len("  HTTP/1.1\r\n\r\n")  # bytes beside names, values, method and url
_SAID = f"The head of a request has at most {LARGEST_HEAD:,} bytes.".encode()
_REFUSAL = b"\r\n".join(
    [
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"content-type: text/plain; charset=utf-8",
        b"content-length: %d" % len(_SAID),
        b"connection: close",
        b"",
        _SAID,
    ]
)


def admit(scope: Scope) -> None:
    """Mark the connection of this request as no stranger: the bounds on strangers no longer apply to it. The
    application calls it once a request has shown the key; a second call, or one under another server, does nothing."""
    if (admitted := scope.get("state", {}).get(_ADMIT)) is not None:
        admitted()


def give_way(scope: Scope) -> None:
    """Mark the connection of this request as the first to be replaced when too many strangers are connected. The
    application calls it for a wrong secret, before it delays the reply: those who guess take no room from those who
    know. Under another server it does nothing."""
    if (gives_way := scope.get("state", {}).get(_GIVE_WAY)) is not None:
        gives_way()


def settings_of(app: ASGIApp, **further: Any) -> uvicorn.Config:
    """uvicorn's configuration for `app`, with the settings that all servers share and `further` ones.

    Nothing is logged: an error of a request goes to its client, one that ends the server is raised.
    """
    return uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_level="critical", access_log=False, **further
    )


@dataclass(eq=False)
class _Stranger:
    """A connection that has not shown the key. `since`: when it was last seen to be busy. `gives_way`: it has shown a
    wrong secret. `stalled`: it takes nothing of its reply."""

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)  # when it was last seen to be busy
    protocol: _Protocol | None = None  # None until the TLS handshake is done
    greeting: asyncio.Task[None] | None = None
    gives_way: bool = False  # it has shown a wrong secret
    unsent: int = 0  # bytes of its reply that waited at the last look
    stalled: bool = False  # between the last two looks it took none of them

    def give_way(self) -> None:
        self.gives_way = True

    @property
    def gone(self) -> bool:
        return self.connection.fileno() < 0

    @property
    def busy(self) -> bool:
        """Whether a complete request has arrived, its reply is not complete, and the caller reads what is sent."""
        cycle = self.protocol.cycle if self.protocol is not None else None
        return cycle is not None and not cycle.more_body and not cycle.response_complete and not self.stalled

    def look(self) -> None:
        """Set `stalled`: whether the caller has read none of its waiting reply since the last call."""
        if self.protocol is not None and self.protocol.flow is not None:
            unsent = self.protocol.transport.get_write_buffer_size()
            self.stalled = self.protocol.flow.write_paused and unsent >= self.unsent > 0
            self.unsent = unsent

    @property
    def idle_since(self) -> float:
        """Time at which the connection was last seen to be busy, or got its last reply, in seconds of
        `time.monotonic`."""
        return self.since if self.protocol is None else max(self.since, self.protocol.answered_at)


def _write_now(cycle: RequestResponseCycle, part: Callable[[], bytes]) -> bool:
    """Write the bytes that `part` makes, if any, as one chunk of a reply, and return True. Returns False, without
    calling `part`, if the write would have to wait, the reply or its connection has ended, or the reply is not
    chunked."""
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    if body := part():
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def _written_now(inner: ASGI3Application) -> ASGI3Application:
    """Wrap an application so that each request has the extension `asgi.WRITE_NOW`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = scope.get("extensions", {}) | {WRITE_NOW: partial(_write_now, send.__self__)}
        await inner(scope, receive, send)

    return app


class _BoundedHeads(HttpToolsProtocol):
    """uvicorn's HTTP protocol that refuses heads of more than 64 KiB with status 431, and closes the connection.

    While a head comes, its pieces are counted, from the second on: a piece is bounded by the buffer of the transport. A
    head that has come whole is measured, unless its pieces prove that it is short.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._piece = self._first = 0  # bytes: of the newest piece, and of the one in which the request began
        self._kept = 0  # bytes that came since the parser has passed something on: it may keep them all
        self._dropped: int | None = None  # bytes that came after a refusal; None: nothing is refused

    def data_received(self, data: bytes) -> None:
        """Parse the next piece; refuse the request if its head is now too large. Drop what comes after a refusal, and
        close the connection if that is too much."""
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > DROPPED_BYTES:
                self.transport.close()
            return
        self._piece = len(data)
        self._kept += self._piece
        super().data_received(data)
        if self._kept > LARGEST_HEAD and self._dropped is None:
            self._refuse()

    def on_message_begin(self) -> None:
        """Start to count the bytes of a request."""
        self._first, self._kept = self._piece, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request. If its head is too large, refuse it (431) and raise ValueError, at which the parser
        stops."""
        if self._first + self._kept > LARGEST_HEAD:
            headers = sum(len(name) + len(value) + _OF_HEADER for name, value in self.headers)
            if len(self.parser.get_method()) + len(self.url) + _OF_REQUEST + headers > LARGEST_HEAD:
                self._refuse()
                raise ValueError("too large a head")  # the parser stops, and uvicorn calls `send_400_response`
        self._kept = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._kept = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, unless it is refused already."""
        if self._dropped is None:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self._dropped = 0
        replied = self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None at first
        if not replied:  # in the middle of a reply there is no other
            self.transport.close()
            return
        self.transport.write(_REFUSAL)
        self.timeout_keep_alive_task = self.loop.call_later(DROPPED_SECONDS, self.timeout_keep_alive_handler)


class _Protocol(_BoundedHeads):
    """uvicorn's HTTP protocol with bounded heads, batched writes (`Gathered`), files sent by the kernel (`zero_copy`)
    and the extension `WRITE_NOW`. `answered_at`: when the last reply was complete, in seconds of `time.monotonic`."""

    def __init__(self, gathered: Gathered, *settings: Any) -> None:
        super().__init__(*settings)
        self._gathered = gathered
        self.app = self._noted(_written_now(zero_copy(self)))
        self.answered_at = 0.0
        self._answered: RequestResponseCycle | None = None  # the request in progress; `cycle` is the newest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GatheringTransport(transport, self._gathered))

    def _noted(self, inner: ASGI3Application) -> ASGI3Application:
        """Wrap an application so that `_answered` is the request that it answers, marked as disconnected if the
        connection is closing."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self._answered = cycle = send.__self__
            cycle.disconnected = cycle.disconnected or self.transport.is_closing()
            await inner(scope, receive, send)

        return app

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress that its client has gone; uvicorn tells only the newest request, which may be
        one that waits behind it."""
        if self._answered is not None and self._answered is not self.cycle and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.answered_at = time.monotonic()
        super().on_response_complete()


class HttpServer(uvicorn.Server):
    """uvicorn server that limits *strangers*, connections whose requests have not shown the key (`admit`): their
    number, and how long one may be idle. It does so on sockets that are given to `serve`, not on those that
    uvicorn opens."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        strangers: int = STRANGERS,
        patience: float = PATIENCE_SECONDS,
        signals: bool = True,
    ) -> None:
        """Make a server that does not listen yet.

        Args:
            strangers: most open connections that have not shown the key (`admit`); a further one replaces the one idle
                for longest.
            patience: seconds after which an idle stranger is disconnected.
            signals: SIGINT and SIGTERM end the server; False: it does not handle them.
        """
        super().__init__(config)
        self._signals = signals
        self._most_strangers, self._idle_seconds = strangers, patience
        self._strangers: dict[_Stranger, None] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager in which SIGINT and SIGTERM end `serve`, which enters it; does nothing without `signals`."""
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn's server without sockets, and accept connections on `sockets` itself, so that strangers can be
        limited; `serve` calls it."""
        await super().startup(None if sockets is None else [])
        self._gathered = Gathered(asyncio.get_running_loop())
        for endpoint in sockets or []:
            endpoint.setblocking(False)
            endpoint.listen(self.config.backlog)
            self._listen(endpoint)
        self._looking = asyncio.create_task(self._look_after())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening on `sockets`, close strangers that are not yet uvicorn's connections, and let uvicorn end the
        others; `serve` calls it."""
        for endpoint in sockets or []:
            asyncio.get_running_loop().remove_reader(endpoint)
        greetings = [stranger.greeting for stranger in self._strangers if stranger.greeting is not None]
        await cancel_and_wait([self._looking, *greetings])
        for stranger in self._strangers:
            if stranger.protocol not in self.server_state.connections:  # uvicorn closes the others
                stranger.connection.close()
        await super().shutdown(sockets)

    def _listen(self, endpoint: socket.socket) -> None:
        if endpoint.fileno() >= 0:
            asyncio.get_running_loop().add_reader(endpoint, self._accept, endpoint)

    def _accept(self, endpoint: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = endpoint.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free, or the caller has closed the connection
                loop = asyncio.get_running_loop()
                loop.remove_reader(endpoint)
                loop.call_later(_PAUSE_SECONDS, self._listen, endpoint)
                return
            connection.setblocking(False)
            _send_at_once(connection)
            if self._has_room():
                self._greet(connection)
            else:
                connection.close()

    def _has_room(self) -> bool:
        if len(self._strangers) >= self._most_strangers:
            self._forget_the_gone()
        if len(self._strangers) >= self._most_strangers:
            idle = [stranger for stranger in self._strangers if stranger.gives_way or not stranger.busy]
            if not idle:
                return False
            self._turn_out(min(idle, key=lambda stranger: (not stranger.gives_way, stranger.idle_since)))
        return True

    def _greet(self, connection: socket.socket) -> None:
        loop, stranger = asyncio.get_running_loop(), _Stranger(connection)
        self._strangers[stranger] = None
        further = {_ADMIT: partial(self._strangers.pop, stranger, None), _GIVE_WAY: stranger.give_way}
        state = self.lifespan.state | further

        def protocol() -> _Protocol:
            stranger.protocol = _Protocol(self._gathered, self.config, self.server_state, state, loop)
            return stranger.protocol

        context = self.config.ssl
        seconds = self._idle_seconds if context is not None else None

        async def greet() -> None:
            try:
                await loop.connect_accepted_socket(protocol, connection, ssl=context, ssl_handshake_timeout=seconds)
            except OSError:  # no TLS, a certificate of another authority, a timeout, or a closed connection
                connection.close()

        stranger.greeting = asyncio.create_task(greet())

    async def _look_after(self) -> None:
        while True:
            self._forget_the_gone()
            now = time.monotonic()
            for stranger in [*self._strangers]:
                stranger.look()
                if stranger.busy:
                    stranger.since = now
                elif now - stranger.idle_since > self._idle_seconds:
                    self._turn_out(stranger)
            await asyncio.sleep(_LOOK_SECONDS)

    def _forget_the_gone(self) -> None:
        for stranger in [stranger for stranger in self._strangers if stranger.gone]:
            del self._strangers[stranger]

    def _turn_out(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        with contextlib.suppress(OSError):  # the caller has closed it already
            stranger.connection.shutdown(socket.SHUT_RDWR)  # the transport then sees the end of the connection


def _send_at_once(connection: socket.socket) -> None:
    """Disable Nagle's algorithm. With it the kernel holds back a small write (a token of a stream) until the client has
    acknowledged the one before, for up to 40 ms. asyncio does so only for sockets created with IPPROTO_TCP."""
    if connection.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # the caller has closed it already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
