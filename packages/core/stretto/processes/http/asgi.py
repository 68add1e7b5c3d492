"""HTTP of every server: the body of a request, whole replies, server-sent events, clients that close the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from stretto.core.tasks import cancel_and_wait

#: A longer body of a client is refused before it is read to its end.
LARGEST_BODY = 16 << 20
_DROPPED_BYTES, _DROPPED_SECONDS = 64 << 20, 5.0  # of a body that is refused
JSON, EVENT_STREAM = "application/json", "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"  #: a comment in a stream of events, which clients skip
_STREAMED = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hand on what keeps the connection open
]

Header = tuple[bytes, bytes]
T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, largest: int = LARGEST_BODY) -> bytes | None:
    """The body of a request; None when it has more than `largest` bytes.

    Most clients send all before they read the reply, and would find their connection reset if it ended before: so some
    more of such a body is read, and dropped. A client that waits to be told to send is not told to.
    """
    if int(header(scope, b"content-length") or 0) > largest:
        if header(scope, b"expect") is None:
            await _drop(receive)
        return None
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        more = message.get("more_body", False)
        if size > largest:
            parts.clear()
            if more:
                await _drop(receive)
            return None
    return b"".join(parts)


async def _drop(receive: Receive) -> None:
    """Read to the end of a body, or to the end of the patience with it."""
    left, more = _DROPPED_BYTES, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROPPED_SECONDS):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header; names are in small letters."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def reply(send: Send, status: int, content_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
    """A whole reply."""
    told = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def when_gone(receive: Receive, leave: Callable[[], None]) -> None:
    """Call `leave` as soon as the client has closed its connection; for a task of its own."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


async def unless_gone(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    alive: Callable[[], Coroutine[Any, Any, None]] | None = None,
    seconds: float | None = None,
) -> T | None:
    """The result of `work`; None if the client closes its connection before, which cancels the work. `alive` is awaited
    every `seconds` until then. The deadline is that of the work or of the client."""
    working, gone = asyncio.create_task(work), asyncio.create_task(when_gone(receive, lambda: None))
    try:
        while not (await asyncio.wait((working, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            if alive is not None:
                await alive()
        return working.result() if working.done() else None
    finally:
        await cancel_and_wait([working, gone])


def sent_event(data: object, kind: str = "", id: object = None) -> bytes:
    """One server-sent event, whose data is written as JSON.

    >>> sent_event({"a": 1}, "news")
    b'event: news\\ndata: {"a":1}\\n\\n'
    """
    head = (f"event: {kind}\n" if kind else "") + ("" if id is None else f"id: {id}\n")
    return b"%bdata: %b\n\n" % (head.encode(), msgspec.json.encode(data))


class HttpExchange:
    """One request and its reply, which is whole or a stream of events.

    Attributes:
        status: of the reply, once it has begun; 0 before.
        headers: further headers of the reply.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self._send = scope, receive, send
        self.status = 0
        self.headers: list[Header] = []

    async def send(self, message: Message) -> None:
        """Send a message of ASGI."""
        self.status = self.status or message["status"]  # the first message of a reply has it
        await self._send(message)

    async def reply(self, body: bytes, status: int = 200, media: str = JSON) -> None:
        """Send a whole reply."""
        await reply(self.send, status, media, body, self.headers)

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Send events. The first ones begin the reply."""
        if not self.status:
            headers = [*_STREAMED, *self.headers]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": events, "more_body": not last})
