"""Requests of OpenAI's clients, and their validation.

A body is decoded into a record; msgspec checks types and bounds, and the engine checks what depends on it (tokens,
context). The fields are OpenAI's, plus `top_k` and `min_p`. A field that is null counts as absent. Three kinds of
fields have no effect on the reply:

    harmless   `user`, `metadata` ...: accepted and ignored
    neutral    `presence_penalty`, `tools` ...: accepted with the value that changes nothing, refused with any other
    unknown    refused by name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from stretto.core.engine import LONGEST_STOP, MOST_LIKELIEST, MOST_STOPS, json_grammar
from stretto.core.errors import RefusedRequest
from stretto.core.records import Record
from stretto.processes.http.bodies import parse_record

MOST_CHOICES = 128
MOST_PROMPTS = 1024
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_LARGEST = 2**31 - 1

Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)]
Decoded = TypeVar("Decoded", bound="Body")


class StreamOptions(Record, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Record, frozen=True):
    type: Literal["text"]
    text: str


class OpenAIMessage(Record, frozen=True):
    """One turn of a conversation. The last fields are those of our replies, which clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None

    def turn(self) -> dict[str, str]:
        """The message as a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class Body(Record, frozen=True, kw_only=True):
    """The fields of both endpoints."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_LARGEST)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # harmless
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # neutral
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def neutral(self) -> Mapping[str, tuple[object, ...]]:
        """The allowed values of the neutral fields, besides null."""
        return {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def grammar(self) -> str:
        """What a completion has to follow; empty for none."""
        return ""

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def likeliest(self) -> int:
        """Number of top log-probabilities for each sampled token."""
        raise NotImplementedError

    def most_tokens(self, left: int) -> int:
        """The requested limit of a completion; `left` is the room in the context."""
        raise NotImplementedError


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def neutral(self) -> Mapping[str, tuple[object, ...]]:
        return {**super().neutral, "echo": (False,), "suffix": ("",), "best_of": (self.n or 1,)}

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    def most_tokens(self, left: int) -> int:
        return min(_COMPLETION_TOKENS, left) if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt as text or as token ids.

        Raises:
            RefusedRequest: the list is empty, too long, or of mixed kinds.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = tuple(part for part in self.prompt if isinstance(part, int))
        if tokens and len(tokens) == len(self.prompt):
            return [tokens]
        texts: list[str | tuple[int, ...]] = [part for part in self.prompt if isinstance(part, str)]
        lists: list[str | tuple[int, ...]] = [tuple(part) for part in self.prompt if isinstance(part, list)]
        found = texts or lists
        if not found or len(found) != len(self.prompt):
            shown = "an empty list" if not self.prompt else "a list of different kinds"
            raise RefusedRequest("prompt", shown, "a text, a list of token ids, or a list of either")
        if len(found) > MOST_PROMPTS:
            raise RefusedRequest("prompt", f"{len(found):,} prompts", f"at most {MOST_PROMPTS:,} in one request")
        return found


class SchemaBody(Record, frozen=True):
    """`strict` changes nothing: what is sampled follows the schema in any case."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class FormatBody(Record, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[OpenAIMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: FormatBody | None = None
    # neutral
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None

    @property
    def neutral(self) -> Mapping[str, tuple[object, ...]]:
        return {
            **super().neutral,
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (True, False),
            "modalities": (["text"],),
        }

    @property
    def grammar(self) -> str:
        form = self.response_format
        if form is None or form.type == "text":
            return ""
        return json_grammar(form.json_schema.schema if form.json_schema else None)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    def most_tokens(self, left: int) -> int:
        """The requested limit; without one, a completion may fill the context."""
        requested = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return left if requested is None else requested


def parse(raw: bytes, kind: type[Decoded]) -> Decoded:
    """The request in a body of OpenAI's.

    Raises:
        RefusedRequest: the body is invalid; names the first wrong field.
    """
    body = parse_record(raw, kind)
    _check(body)
    return body


def _check(body: Body) -> None:
    for field, values in body.neutral.items():
        found = getattr(body, field)
        if found is not None and found not in values:
            allowed = " or ".join(json.dumps(value) for value in values)
            raise RefusedRequest(field, _short(found), f"only {allowed} or null: the engine supports nothing else")
    form = body.response_format if isinstance(body, ChatBody) else None
    if form is not None and (form.type == "json_schema") is (form.json_schema is None):
        allowed = 'json_schema with the type "json_schema", and with no other'
        raise RefusedRequest("response_format", repr(form.type), allowed)
    if body.likeliest and not body.wants_logprobs:
        raise RefusedRequest("top_logprobs", "set without logprobs", 'only together with "logprobs": true')
    if body.stream_options is not None and not body.stream:
        raise RefusedRequest("stream_options", "set without stream", 'only together with "stream": true')


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
