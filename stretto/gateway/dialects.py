"""What a dialect is: how one kind of client asks, is answered and is refused.

A dialect is pure: bytes in, a record out; a record in, bytes out. It knows no session, no token and no engine. The
events of a stream are made from the whole turn, so that a replay tells them byte for byte; what keeps a connection open
until then stands before the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from stretto.conversation.messages import AskedTurn, SaidTurn
from stretto.core.records import Record

COMMENT = b": keep-alive\n\n"  #: of a stream of events; clients pass over it


class NotServed(Record, frozen=True):
    """Why a request is not served."""

    status: int  # of HTTP: 4xx, or 503 when it may be tried again
    message: str
    field: str = ""  # the wrong field of the body, as a path of its names
    code: str = ""  # "context_length_exceeded", "model_not_found", "session_ended", "invalid_api_key", "unavailable"


class RequestForm(Protocol):
    """One way to ask about a conversation."""

    path: str  #: behind the address of the session, such as ``/v1/chat/completions``

    @property
    def body(self) -> type[msgspec.Struct]:
        """What it is asked with."""
        ...

    def parse(self, body: bytes) -> AskedTurn:
        """What the body asks for.

        Raises:
            RefusedRequest: names the first wrong field, with what is allowed there.
        """
        ...


class TokenCount(RequestForm, Protocol):
    """One way to ask how many tokens the prompt of a turn would have; the turn is not made."""

    def counted(self, tokens: int) -> bytes:
        """The reply, as JSON."""
        ...


class Dialect(RequestForm, Protocol):
    """One way to ask for a turn."""

    keep_alive: bytes  #: what a stream tells before its first event, so that no idle timeout ends the connection

    @property
    def counts(self) -> Sequence[TokenCount]:
        """How its clients ask for a count, if they do."""
        ...

    def reply(self, asked: AskedTurn, said: SaidTurn) -> bytes:
        """The whole reply, as JSON."""
        ...

    def events(self, asked: AskedTurn, said: SaidTurn) -> Iterable[bytes]:
        """The same reply as server-sent events, to the last one."""
        ...

    def refuse(self, why: NotServed) -> bytes:
        """The body of an error, as JSON."""
        ...

    def fail(self, why: NotServed) -> bytes:
        """The last event of a stream that had begun when it became known that there is no turn."""
        ...

    def headers(self, said: SaidTurn) -> Mapping[str, str]:
        """Headers of a reply that clients of the dialect look for, such as a request id."""
        ...


def openapi(dialects: Iterable[Dialect]) -> bytes:
    """The OpenAPI 3.1 description of the dialects, made from the records into which requests are decoded. The gateway
    refuses more than it does: what depends on the session and on the model."""
    served: list[RequestForm] = [form for dialect in dialects for form in (dialect, *dialect.counts)]
    template = "#/components/schemas/{name}"
    references, schemas = msgspec.json.schema_components([dialect.body for dialect in served], ref_template=template)
    paths = {
        dialect.path: {"post": _described(reference)} for dialect, reference in zip(served, references, strict=True)
    }
    described = {"openapi": "3.1.0", "info": {"title": "stretto gateway", "version": "1"}, "paths": paths}
    return msgspec.json.encode({**described, "components": {"schemas": schemas}})


def _described(body: Mapping[str, Any]) -> dict[str, Any]:
    why = {"400": "a field is wrong", "401": "the key is no session's", "404": "no such model", "409": "it has ended"}
    statuses = {"200": "a turn", **why, "413": "the body is too large", "503": "it may be tried again"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {status: {"description": text} for status, text in statuses.items()},
    }
