"""Transports below uvicorn: the small writes of one iteration of the event loop are sent together, and files by the
kernel (ASGI's extension ``http.response.zerocopysend``).

A write to a socket wakes the process at its other end, which costs as much as ten further writes. If 64 streams to one
client get a token each in one iteration, their writes follow directly on each other, and the client is woken once.

An application sees ``"http.response.zerocopysend"`` in the scope's extensions unless the connection is encrypted, and
then sends messages of this type with an open `file` (descriptor), `offset`, `count` and `more_body`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from starlette.types import Message, Receive, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_AT_ONCE = 1 << 16  # bytes: a longer write is not delayed


class Gathered:
    """Transports of one event loop with small writes to send in its next iteration."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport) -> None:
        """Flush this transport in the next iteration of the event loop. Call it once for each flush."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport whose small writes wait for the next iteration of the event loop; all else passes to `inner`."""

    def __init__(self, inner: asyncio.Transport, gathered: Gathered) -> None:
        super().__init__()
        self._inner, self._gathered = inner, gathered
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data after everything that was written before; it is dropped if the connection is closed. Data of at
        most 64 KiB wait for the next iteration of the event loop."""
        if len(data) > _AT_ONCE:
            self.flush()
            if not self._inner.is_closing():  # asyncio drops what is written then, and uvloop may raise RuntimeError
                self._inner.write(data)
            return
        if not self._parts:
            self._gathered.add(self)
        self._parts.append(bytes(data))

    def flush(self) -> None:
        """Pass all waiting data to `inner` now, joined; drop it if the connection is closing."""
        parts, self._parts = self._parts, []
        if parts and not self._inner.is_closing():
            self._inner.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Close the connection after everything that was written is sent."""
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        """Close the connection at once and drop unsent data."""
        self._parts.clear()
        self._inner.abort()

    def get_write_buffer_size(self) -> int:
        """Number of written bytes, waiting here or in `inner`, that are not yet passed to the kernel."""
        return sum(map(len, self._parts)) + self._inner.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Information about the inner connection by its asyncio name, as "socket"; `default` if there is none."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._inner.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass received data to this protocol from now on."""
        self._inner.set_protocol(protocol)


ZERO_COPY = "http.response.zerocopysend"
_SENT_AT_ONCE = 4 << 20  # bytes sent in a row before other connections are served
_FLUSH_SECONDS = 0.001


def zero_copy(protocol: HttpToolsProtocol) -> ASGI3Application:
    """Return the application of the connection `protocol`, wrapped so that it can send files by the kernel: it may send
    messages of the type `ZERO_COPY` (ASGI's extension). On an encrypted connection the extension is not offered."""
    inner = protocol.app

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] != ZERO_COPY:
                return await send(message)
            count: int = message["count"]
            if count > protocol.cycle.expected_content_length:
                raise RuntimeError("a file longer than the content-length of the reply")
            await _send_file(protocol.transport, message["file"], message["offset"], count)
            protocol.cycle.expected_content_length -= count
            return await send({"type": "http.response.body", "more_body": message.get("more_body", False)})

        if protocol.scheme == "http":
            scope["extensions"] = scope.get("extensions", {}) | {ZERO_COPY: {}}
        await inner(scope, receive, sending)

    return app  # type: ignore[return-value]


async def _send_file(transport: asyncio.Transport, file: int, offset: int, count: int) -> None:
    """Send `count` bytes of the open descriptor `file` from `offset` on, after all bytes that were written to the
    transport before. Raises OSError if the connection is broken or the file is shorter."""
    if isinstance(transport, GatheringTransport):
        transport.flush()
    while transport.get_write_buffer_size() and not transport.is_closing():
        await asyncio.sleep(_FLUSH_SECONDS)
    if transport.is_closing():
        raise ConnectionResetError("the client has gone")
    connection = os.dup(transport.get_extra_info("socket").fileno())  # the event loop watches the other one itself
    try:
        while count:
            try:
                sent = os.sendfile(connection, file, offset, min(count, _SENT_AT_ONCE))
            except BlockingIOError:
                await _writable(connection)
                continue
            if not sent:
                raise OSError("a file became shorter while it was sent")
            offset, count = offset + sent, count - sent
            await asyncio.sleep(0)
    finally:
        os.close(connection)


async def _writable(connection: int) -> None:
    """Wait until this socket can take more bytes. The sender's deadline bounds the wait."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)
