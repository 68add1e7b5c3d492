"""Dialects: requests, replies and errors of one kind of client each.

A dialect is pure: it decodes bytes to records and encodes records to bytes, without sessions or engines. Events are
made from a complete turn, so that a replay is byte-equal.
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
    """Requests that count the tokens of a prompt."""

    path: str
    body: type[msgspec.Struct]
    parse: Callable[[bytes], ChatRequest]
    reply: Callable[[int], bytes]


class Dialect(Protocol):
    """Format of requests for the next turn of a conversation (Protocol)."""

    path: str  #: such as ``/v1/chat/completions``
    keep_alive: bytes  #: sent in a stream before the first event, so that no idle timeout ends the connection
    fields: Mapping[str, str]  #: the client's name of a field of the engine, where it has another
    strict: bool  #: refuse a limit of tokens beyond the context; else the context cuts it

    @property
    def body(self) -> type[msgspec.Struct]:
        """Record type of a request's body."""
        ...

    @property
    def counts(self) -> Sequence[TokenCount]:
        """Token-count requests of the same clients."""
        ...

    def parse(self, body: bytes) -> ChatRequest:
        """Decode a body.

        Raises:
            RefusedRequest: names the first wrong field, with what is allowed there.
        """
        ...

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        """Encode the whole reply as JSON; `turns` has one turn, or as many as requested."""
        ...

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        """Encode the same reply as server-sent events."""
        ...

    def refuse(self, why: NotServed) -> bytes:
        """JSON body of an error."""
        ...

    def fail(self, why: NotServed) -> bytes:
        """Last event of a stream that fails."""
        ...

    def reply_headers(self, id: str) -> Mapping[str, str]:
        """Headers that clients of the dialect expect, such as a request id."""
        ...


def refusal(error: RefusedRequest, fields: Mapping[str, str], request: Request | None) -> NotServed:
    """Error reply for a wrong request. `fields` are the client's names, as in `Dialect`."""
    field = fields.get(error.field) or error.field.replace("sampling.", fields.get("sampling.", ""))
    if isinstance(request, ChatRequest):
        grammar = "response_format" if request.options.json else "tools"
        field = {"max_tokens": request.limit or field, "grammar": grammar}.get(field, field)
    code = "context_length_exceeded" if "context" in error.allowed else ""
    message = str(RefusedRequest(field, error.found, error.allowed))
    return NotServed(400, message, "" if field == "body" else field, code)
