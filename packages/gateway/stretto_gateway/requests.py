"""Requests as every dialect decodes them, and the errors that they get."""

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
    """One HTTP request for completions of prompts: texts or token ids, no conversation.

    Attributes:
        model: None for the one that is served.
        dialect_fields: what the dialect needs to write the reply.
        usual_tokens: most tokens of a completion if the client names no limit; None: what the context leaves.
        stop_token_ids: tokens that end a completion, besides the end of sequence.
        ignore_eos: the end of sequence ends no completion.
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
    """The error that a request gets.

    Attributes:
        status: of HTTP, 400 or more.
        field: the wrong field of the body, as a path of names; "" for none.
        code: such as "context_length_exceeded", "model_not_found" or "session_ended"; "" for none.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "", allow: str = "") -> None:
        """`allow`: the method of this path, if it is not that of the request."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = _HEADERS.get(status, []) + ([(b"allow", allow.encode())] if allow else [])
