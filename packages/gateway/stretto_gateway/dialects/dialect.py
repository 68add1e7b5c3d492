"""What a dialect is: the requests, replies and errors of one kind of client.

A dialect is pure: bytes in, a record out; a record in, bytes out. It knows no session and no engine. The events of a
turn are made from the whole turn, so that a replay sends them byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stretto.conversation.messages import ChatRequest, SampledTurn
from stretto.core.errors import RefusedRequest
from stretto_gateway.requests import NotServed, Request


@dataclass(frozen=True)
class TokenCount:
    """Requests for the number of tokens in a prompt."""

    path: str
    body: type[msgspec.Struct]
    parse: Callable[[bytes], ChatRequest]
    reply: Callable[[int], bytes]


class Dialect(Protocol):
    """Requests for the next turn of a conversation."""

    path: str  #: such as ``/v1/chat/completions``
    keep_alive: bytes  #: sent in a stream before the first event, so that no idle timeout ends the connection
    fields: Mapping[str, str]  #: the client's name of a field of the engine, where it has another
    strict: bool  #: refuse a limit of tokens beyond the context; else the context cuts it

    @property
    def body(self) -> type[msgspec.Struct]:
        """The record of a request's body."""
        ...

    @property
    def counts(self) -> Sequence[TokenCount]:
        """Requests of the same clients for a count of tokens."""
        ...

    def parse(self, body: bytes) -> ChatRequest:
        """Decode a body.

        Raises:
            RefusedRequest: names the first wrong field, with what is allowed there.
        """
        ...

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        """The whole reply as JSON. There is one turn, or as many as the request wants."""
        ...

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        """The same reply as server-sent events."""
        ...

    def refuse(self, why: NotServed) -> bytes:
        """The body of an error as JSON."""
        ...

    def fail(self, why: NotServed) -> bytes:
        """The last event of a stream that cannot go on."""
        ...

    def reply_headers(self, id: str) -> Mapping[str, str]:
        """Headers that clients of the dialect look for, such as a request id."""
        ...


def refusal(error: RefusedRequest, fields: Mapping[str, str], request: Request | None) -> NotServed:
    """The error for a wrong request. `fields` are the client's names, as in `Dialect`."""
    field = fields.get(error.field) or error.field.replace("sampling.", fields.get("sampling.", ""))
    if isinstance(request, ChatRequest):
        grammar = "response_format" if request.options.json else "tools"
        field = {"max_tokens": request.limit or field, "grammar": grammar}.get(field, field)
    code = "context_length_exceeded" if "context" in error.allowed else ""
    message = str(RefusedRequest(field, error.found, error.allowed))
    return NotServed(400, message, "" if field == "body" else field, code)
