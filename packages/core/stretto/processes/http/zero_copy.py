"""ASGI's extension ``http.response.zerocopysend`` for uvicorn: the kernel sends a file, this process copies nothing.

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

from stretto.processes.http.gathering import GatheringTransport

ZERO_COPY = "http.response.zerocopysend"
_AT_ONCE = 4 << 20  # bytes sent in a row before other connections are served
_FLUSH_SECONDS = 0.001


def zero_copy(protocol: HttpToolsProtocol) -> ASGI3Application:
    """Wrap the application of a connection; it has the extension unless the connection is encrypted."""
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
    """Send `count` bytes of a file from `offset` on, after all bytes that were written to the transport before.

    Raises:
        OSError: the connection is broken, or the file is shorter.
    """
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
                sent = os.sendfile(connection, file, offset, min(count, _AT_ONCE))
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
    """Wait until the kernel takes more. The sender's deadline bounds the wait."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)
