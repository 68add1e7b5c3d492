"""Helpers of all handlers: a request with its client, bodies, replies, errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded
from stretto.processes.http.asgi import read_body
from stretto.processes.http.reach import names_loopback
from stretto_tinker.wire.bodies import parse

JSON, PROTO = "application/json", "application/x-protobuf"
#: Most bytes of a request's body. The SDK sends at most 5 MB, unless a single sequence is longer.
LARGEST_BODY = 64 << 20
_BODY_SECONDS = 60.0
_HEAD_BYTES = 1024

Body = TypeVar("Body", bound=msgspec.Struct)


class NotServed(Exception):
    """Raised by a handler to reply with an HTTP error of this `status`, whose body has the `message`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


@dataclass(frozen=True)
class Call:
    """One HTTP request, and the client that sent it. `owner`: the client's id (`service.owner_of`); "" for requests
    without API key. `head`, `tail`: beginning and end of the body, also of one that `body` refuses as too large; no
    tail if its end was not read."""

    request: Request
    owner: str
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)

    @property
    def near(self) -> bool:
        """Whether the request comes from a loopback address."""
        return (client := self.request.client) is not None and names_loopback(client.host)

    def path(self, name: str) -> str:
        """Value of the parameter `name` in the request's path."""
        return str(self.request.path_params[name])

    def number(self, name: str, default: int, most: int) -> int:
        """Value of the query parameter `name`, a whole number from 0 to `most`; `default` if the request has none.

        Raises:
            NotServed: 400 if it is not such a number.
        """
        text = self.request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 12 or int(text) > most:
            raise NotServed(400, f"{name}: {text!r:.40}; 0 to {most:,}")
        return int(text)

    async def body(self) -> bytes:
        """Read the body.

        Raises:
            NotServed: 413 for a body that is too large, 408 for one that takes more than a minute, 415 for a compressed
                one.
        """

        last = bytearray()

        async def receive() -> Message:
            message = await self.request.receive()
            part = message.get("body", b"")
            if len(self.head) < _HEAD_BYTES:
                self.head.extend(part[:_HEAD_BYTES])
            last[:] = (last + part[-_HEAD_BYTES:])[-_HEAD_BYTES:]
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.tail[:] = last
            return message

        coded = self.request.headers.get("content-encoding", "identity")
        if coded != "identity":
            raise NotServed(415, f"content-encoding: {coded!r:.40} is not served; send the body as it is")
        try:
            async with deadline("the server", "the body of a request", _BODY_SECONDS):
                raw = await read_body(self.request.scope, receive, LARGEST_BODY)
        except DeadlineExceeded:
            raise NotServed(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
        if raw is None:
            raise NotServed(413, f"body: more than {LARGEST_BODY:,} bytes, which is the limit; send fewer datums")
        return raw

    async def parsed(self, kind: type[Body]) -> Body:
        """Read the body and decode it as a record of the type `kind`.

        Raises:
            NotServed: 413, 408 or 415 for a body that is too large, too slow or compressed.
            RefusedRequest: it is not JSON, or a field is wrong.
        """
        return parse(await self.body(), kind)


Handler = Callable[[Call], Awaitable[Response]]


def told(found: Any, status: int = 200) -> Response:
    """Make a reply with the value `found` as JSON. `status`: HTTP status."""
    return Response(msgspec.json.encode(found), status, media_type=JSON)
