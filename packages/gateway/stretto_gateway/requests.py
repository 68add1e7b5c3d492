"""Decoded requests of every dialect, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from stretto.conversation.messages import ChatRequest, SamplingOptions
from stretto.core.records import Record

_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    409: [(b"x-should-retry", b"false")],  # clients would try again
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}


class PromptRequest(Record, frozen=True):
    """One HTTP request for completions of plain prompts (texts or token ids).

    Attributes:
        model: None: the served one.
        dialect_fields: data that the dialect needs to write the reply.
        usual_tokens: limit of a completion if the client gives none; None: the rest of the context.
        stop_token_ids: tokens that end a completion, besides the end of sequence.
        ignore_eos: the end of sequence does not end a completion.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    options: SamplingOptions
    stream: bool = False
    dialect_fields: Mapping[str, Any] = {}
    n: int | UnsetType = UNSET
    usual_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


Request = ChatRequest | PromptRequest


class NotServed(Exception):
    """Error reply of a request.

    Attributes:
        status: HTTP status, 400 or more.
        field: the wrong field of the body, as a path of names; "" for none.
        code: such as "context_length_exceeded", "model_not_found" or "session_ended"; "" for none.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "", allow: str = "") -> None:
        """`allow`: the allowed method of this path, if the request had another."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = _HEADERS.get(status, []) + ([(b"allow", allow.encode())] if allow else [])
