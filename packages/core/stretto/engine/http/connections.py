"""HTTP/1.1 to one engine over connections that stay open: a request costs a write and a few reads.

The conductor requests a hundred groups per second on a shared core. A general HTTP client would take more time than all
its other work (docs/explanation/decisions/0007-own-connections.md). httptools parses the responses.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import httptools

from stretto.core.deadlines import deadline
from stretto.core.errors import EngineLost, WireError
from stretto.core.frames import LARGEST_FRAME
from stretto.engine.wire import MSGPACK, split_address
from stretto.processes.kernel import notice_silence

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60  # without a sign of the other machine's kernel, which is then unreachable or was restarted
_IDLE_SECONDS = (
    2.0  # servers close idle connections after about five seconds; a request sent at that moment would be lost
)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)  # network or machine is down


class Connection(asyncio.Protocol):
    """One HTTP connection to an engine, with one exchange at a time. An asyncio protocol: the event loop calls its
    methods. `engine`: name for errors; `key`: bearer token, "" for none; `host`: for the Host header.

    Example::

        connection.send("POST", "/generate", body)
        while part := await connection.read():   # `connection.status` is set when the first part has arrived
            ...
    """

    def __init__(self, engine: str, key: str = "", host: str = "localhost") -> None:
        self._engine, self._host = engine, host
        self._authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._transport: asyncio.Transport | None = None
        self._wake = asyncio.Event()
        self._lost = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.complete = self._kept = False
        self._completed = 0.0
        self.status = 0

    def is_reusable(self, idle: float) -> bool:
        """Whether the connection is open, kept by the server, and its last response ended within `idle` seconds."""
        since = asyncio.get_running_loop().time() - self._completed
        return not self._lost and self.complete and self._kept and since < idle

    def send(self, method: str, path: str, body: bytes, media: str = MSGPACK) -> None:
        """Send a request, without waiting, and prepare for its response. The previous response must have ended. On a
        lost connection nothing is sent, and `read` raises EngineLost. `media`: media type of the request's body, and
        the one asked for the response's."""
        assert self._transport is not None, "the event loop has connected it"
        self._begin()
        headers = f"accept: {media}\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n"
        headers += f"{self._authorization}\r\n"
        if self._lost:  # `read` says so
            return
        self._transport.write(f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\n{headers}".encode() + body)

    async def read(self) -> bytes:
        """Wait for the next part of the response's body; empty at its end. The caller sets the deadline. Raises
        EngineLost if the connection breaks before the end, or the response is not HTTP."""
        parts = await self.parts()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def parts(self) -> list[bytes]:
        """Wait for the next parts of the response's body, in the pieces that have arrived; none at its end. The caller
        sets the deadline. Raises EngineLost if the connection breaks before the end, or the response is not HTTP."""
        while not self._parts and not self.complete:
            if self._lost:
                raise EngineLost(self._engine, "broke off in the middle of a reply")
            self._wake.clear()
            await self._wake.wait()  # the deadline is the caller's
        parts, self._parts = self._parts, []
        return parts

    async def rest(self, most: int = LARGEST_FRAME) -> bytes:
        """The remaining body of the response. Raises EngineLost if the connection breaks or the response is not HTTP,
        and WireError if the body has more than `most` bytes."""
        parts, size = list[bytes](), 0
        while part := await self.read():
            parts.append(part)
            size += len(part)
            if size > most:
                raise WireError(f"{self._engine} sent a reply of more than {most:,} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection once all unsent data is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once; unsent data is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._lost = True
        self._wake.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._wake.set()

    def on_headers_complete(self) -> None:
        """Store the response's status; called by httptools' parser, like `on_body` and `on_message_complete`."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self._kept = bool(self._parser.should_keep_alive())  # the parser knows now, and not any more afterwards
        self._completed = asyncio.get_running_loop().time()


class Connections:
    """A pool of connections to one engine, opened when they are needed."""

    def __init__(
        self,
        engine: str,
        address: str,
        key: str = "",
        context: ssl.SSLContext | None = None,
        silent: int = _SILENT_SECONDS,
        idle: float = _IDLE_SECONDS,
    ) -> None:
        """`engine`: name for errors. `address`: ``unix:/path/to.sock`` or ``host:port``. `key`: bearer token; "": none
        is sent. `context`: TLS of TCP connections; None: plain. `silent`: seconds without a sign of the engine's
        machine after which a TCP connection counts as lost. `idle`: seconds after which an idle connection is not used
        again."""
        self._engine, self._key, self._context, self._silent = engine, key, context, silent
        self._path, self._host, self._port = split_address(address)
        self._named = address if self._path is None else "localhost"  # as an HTTP server knows itself
        self._longest = idle
        self._idle = deque[Connection]()  # in the order of their last use
        self._used: set[Connection] = set()
        self._breaks = 0  # calls of `break_off`

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        """Context manager: an idle or new connection for one exchange. Leaving the block before the response is
        complete closes the connection, by which the engine aborts the request.

        Raises:
            EngineLost: no process listens at the address, it cannot be reached, or TLS fails.
            DeadlineExceeded: the address does not reply at all.
            WireError: this process cannot open a connection, for instance because too many files are open.
        """
        while self._idle and not self._idle[0].is_reusable(self._longest):  # those of a burst, idle for longest
            self._idle.popleft().close()
        while self._idle and not self._idle[-1].is_reusable(self._longest):
            self._idle.pop().close()
        breaks = self._breaks
        connection = self._idle.pop() if self._idle else await self._connect()
        if breaks != self._breaks:  # another process may listen there by now
            connection.abort()
            raise EngineLost(self._engine, "ended while a connection to it was made")
        self._used.add(connection)
        try:
            yield connection
        finally:
            self._used.discard(connection)
            if connection.is_reusable(self._longest):
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the idle connections. A connection in use returns to the pool when its exchange ends."""
        while self._idle:
            self._idle.pop().close()

    def break_off(self) -> None:
        """Close all connections at once; exchanges in progress end with EngineLost, and those that still connect once
        they have."""
        self._breaks += 1
        self.close()
        for connection in self._used:
            connection.abort()

    async def _connect(self) -> Connection:
        loop, protocol = asyncio.get_running_loop(), lambda: Connection(self._engine, self._key, self._named)
        try:
            async with deadline(f"the client of {self._engine}", "a connection", _CONNECT_SECONDS):
                if self._path is not None:
                    _, made = await loop.create_unix_connection(protocol, self._path)
                else:
                    transport, made = await loop.create_connection(protocol, self._host, self._port, ssl=self._context)
                    notice_silence(transport.get_extra_info("socket"), self._silent)
        except (ConnectionError, FileNotFoundError) as error:
            raise EngineLost(self._engine, f"does not listen ({error.strerror or error})") from None
        except ssl.SSLError as error:
            raise EngineLost(self._engine, f"does not speak our TLS ({error.reason})") from None
        except UnicodeError as error:  # a name that no resolver takes
            raise EngineLost(self._engine, f"cannot be reached ({error})") from None
        except OSError as error:
            # Of a name with several addresses that all failed, asyncio's error has no number.
            if isinstance(error, (socket.gaierror, TimeoutError)) or error.errno in (None, *_UNREACHABLE):
                raise EngineLost(self._engine, f"cannot be reached ({error.strerror or error})") from None
            # A fault of this process, not of the engine, such as too many open files.
            raise WireError(f"no connection to {self._engine} can be made: {error.strerror or error}") from None
        return made
