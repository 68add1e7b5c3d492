"""A body in, a reply out, and the news that the client has gone: what both interfaces do with HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import Receive, Scope, Send

#: A longer body of a client is refused before it is read to its end.
LARGEST_BODY = 16 << 20

Header = tuple[bytes, bytes]


async def read_body(scope: Scope, receive: Receive, largest: int = LARGEST_BODY) -> bytes | None:
    """The body of a request; None when it has more than `largest` bytes."""
    if int(header(scope, b"content-length") or 0) > largest:
        return None
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > largest:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


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
