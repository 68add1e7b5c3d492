"""ASGI helpers of every server: request bodies, replies, server-sent events, clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from stretto.core.errors import RefusedRequest
from stretto.core.tasks import cancel_and_wait

#: Default limit on the body of a request, in bytes; a longer body is refused before it is read to its end.
LARGEST_BODY = 16 << 20
_DROPPED_BYTES, _DROPPED_SECONDS = 64 << 20, 5.0  # most that is read and dropped of a refused body
#: ASGI extension: a function with which an application writes a part of a reply at once (`processes.http.server`).
WRITE_NOW = "stretto.write_now"
KEEP_ALIVE = b": keep-alive\n\n"  #: a comment in a stream of events, which clients skip

Header = tuple[bytes, bytes]
T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, largest: int = LARGEST_BODY) -> bytes | None:
    """Read the body of a request; None if it has more than `largest` bytes.

    Most clients send everything before they read the reply, and would see a reset connection. So a bounded rest of a
    too large body is read and dropped, unless the client waits for ``100 Continue``.

    Raises:
        RefusedRequest: the client has disconnected before the end of the body; the part that came is no request.
    """
    if int(header(scope, b"content-length") or 0) > largest:
        if header(scope, b"expect") is None:
            await _drop(receive)
        return None
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedRequest("body", f"broken off after {size:,} bytes", "a whole body")
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
    """Read and drop the rest of a body, within a bound of time."""
    left, more = _DROPPED_BYTES, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROPPED_SECONDS):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


def header(scope: Scope, name: bytes) -> bytes | None:
    """Value of a header, or None; `name` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def reply(send: Send, status: int, content_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
    """Send a whole reply."""
    told = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def when_gone(receive: Receive, leave: Callable[[], None]) -> None:
    """Call `leave` as soon as the client has disconnected; run it as a task."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


async def unless_gone(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    alive: Callable[[], Coroutine[Any, Any, None]] | None = None,
    seconds: float | None = None,
) -> T | None:
    """Result of `work`; None, with the work cancelled, if the client disconnects first. `alive` is awaited every
    `seconds` until then. No deadline of its own: that of the work or the client applies."""
    working, gone = asyncio.create_task(work), asyncio.create_task(when_gone(receive, lambda: None))
    try:
        while not (await asyncio.wait((working, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            if alive is not None:
                await alive()
        return working.result() if working.done() else None
    finally:
        await cancel_and_wait([working, gone])


def sent_event(data: object, kind: str = "", id: object = None) -> bytes:
    """Encode one server-sent event, with `data` as JSON.

    >>> sent_event({"a": 1}, "news")
    b'event: news\\ndata: {"a":1}\\n\\n'
    """
    head = (f"event: {kind}\n" if kind else "") + ("" if id is None else f"id: {id}\n")
    return b"%bdata: %b\n\n" % (head.encode(), msgspec.json.encode(data))
