"""Decoded requests of every dialect, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from stretto.conversation.messages import ChatRequest, SamplingOptions
from stretto.core.records import Record

_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    409: [(b"x-should-retry", b"false")],  # some clients retry a 409 by default
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}


class PromptRequest(Record, frozen=True):
    """One HTTP request for completions of plain prompts (texts or token ids).

    Attributes:
        model: name of the requested model; None for the served one.
        dialect_fields: data that the dialect needs to encode the reply.
        n: completions per prompt.
        usual_tokens: limit of a completion if the client gives none; None: the rest of the context.
        stop_token_ids: tokens that end a completion, beside the end of sequence.
        ignore_eos: whether a completion goes on after an end of sequence.
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
    """Raised to send an error reply to the client.

    Attributes:
        status: HTTP status, 400 or more.
        field: path of the wrong field in the body; "" for none.
        code: error code for clients, such as "context_length_exceeded" or "session_ended"; "" for none.
        headers: headers of the reply, such as Retry-After.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "", allow: str = "") -> None:
        """`allow`: value of the header Allow, for a 405; "" for none."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = _HEADERS.get(status, []) + ([(b"allow", allow.encode())] if allow else [])
