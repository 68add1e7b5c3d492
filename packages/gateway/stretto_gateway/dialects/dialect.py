"""Interface of dialects. A dialect is the format of requests, replies and errors of one kind of client.

A dialect is pure: it decodes bytes to records and encodes records to bytes, without access to sessions or engines.
Events of a stream are made from a complete turn, so that a replay has the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stretto.core.errors import RefusedRequest
from stretto_gateway.requests import NotServed, Request
from stretto_workflows.chat.messages import ChatRequest, SampledTurn

#: Fields that a request may make too long for the context, by the engine's names or a session's.
_IN_CONTEXT = frozenset({"prompt_token_ids", "sampling.max_tokens", "messages"})


@dataclass(frozen=True)
class TokenCount:
    """Kind of request that counts the tokens of a prompt. `parse` decodes a body (RefusedRequest for a wrong field),
    `reply` encodes the number as a JSON body."""

    path: str
    body: type[msgspec.Struct]  #: record type of the body, for the description of the interface
    parse: Callable[[bytes], ChatRequest]
    reply: Callable[[int], bytes]


class Dialect(Protocol):
    """Format of requests for a turn of a conversation, their replies and errors (Protocol). `keep_alive`: sent while a
    stream waits. `fields`: client's names of the engine's fields. `strict`: too large token limits are refused."""

    path: str  #: such as ``/v1/chat/completions``
    keep_alive: bytes  #: sent while a stream waits for its first event, so that no idle timeout ends the connection
    fields: Mapping[str, str]  #: the client's names of the engine's fields, where they differ
    strict: bool  #: refuse a limit of tokens beyond the context; otherwise it is reduced

    @property
    def body(self) -> type[msgspec.Struct]:
        """Record type of a request's body."""

    @property
    def counts(self) -> Sequence[TokenCount]:
        """Token-count requests of the dialect; empty for none."""

    def parse(self, body: bytes) -> ChatRequest:
        """Decode a body.

        Raises:
            RefusedRequest: names the first wrong field and its allowed values.
        """

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        """Encode the whole reply as JSON. `turns`: the completions, one for each requested."""

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        """Encode the whole reply as server-sent events. `turns`: the completions, one for each requested."""

    def refuse(self, why: NotServed) -> bytes:
        """Encode the JSON body of an error reply."""

    def fail(self, why: NotServed) -> bytes:
        """Encode the last event of a stream that fails."""

    def reply_headers(self, id: str) -> Mapping[str, str]:
        """Headers that clients of the dialect expect: a request id made from the reply's `id`."""


def refusal(error: RefusedRequest, fields: Mapping[str, str], request: Request | None) -> NotServed:
    """Make the error reply (status 400) for a wrong request, in which the field has the client's name. Its code is
    "context_length_exceeded" if the context is too short, else "". `fields`: the client's names of the engine's fields,
    where they differ. `request`: the decoded request, None if it could not be decoded."""
    field = fields.get(error.field) or error.field.replace("sampling.", fields.get("sampling.", ""))
    if isinstance(request, ChatRequest):
        grammar = "response_format" if request.options.json else "tools"
        field = {"max_tokens": request.limit or field, "grammar": grammar}.get(field, field)
    # What is allowed elsewhere may name a client's own tool, or a field, with this word.
    too_long = error.field in _IN_CONTEXT and "context" in error.allowed
    code = "context_length_exceeded" if too_long else ""
    message = str(RefusedRequest(field, error.found, error.allowed))
    return NotServed(400, message, "" if field == "body" else field, code)
