"""Messages, tools and requests of a conversation. They are independent of a client's dialect: each dialect is converted
to them and back.

    chat completions ─┐                                          ┌─ chat completions
    responses        ─┼─► ChatRequest ─► tokens ─► SampledTurn ──┼─ responses
    Anthropic's      ─┘   (messages, tools, how to sample)       └─ Anthropic's

Recorded sessions store these records as JSON, and find the reply to a request by the digest of its JSON. So fields must
keep their names, and a new field must default to `UNSET`, so that the JSON of earlier requests does not change.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field, structs

from stretto.core.records import Record, StopReason

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Record, frozen=True):
    """A call of a tool by the assistant. `arguments`: text of a JSON object, exactly as the model wrote it.

    Example: ``ToolCall(id="call_0", name="add", arguments='{"a": 1,  "b": 2}')``
    """

    id: str
    name: str
    arguments: str


class Message(Record, frozen=True):
    """One message. Only the assistant has `reasoning` and `calls`. Only a tool has `call_id`: id of the call whose
    result is `text`. `name`: of the author, or of the tool.

    Example: ``Message("assistant", "", reasoning="small numbers", calls=(ToolCall(...),))``
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


class Tool(Record, frozen=True):
    """A tool that the model may call. `parameters`: a JSON schema. `strict`: whether the client wants calls that fit
    it; None: it has not said."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}
    strict: bool | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The tool as a dict for chat templates."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": told}


class SamplingOptions(Record, frozen=True):
    """Sampling options of a request. None leaves an option to the session or the server. `stop`: stop texts.
    `tool_choice`: "auto", "none", "required", or the name of a tool. `parallel_calls`: a message may have several
    calls. `json`, `schema`: the text must be a JSON object, with this JSON schema. `logprobs`: number of likeliest
    tokens to report for each token; None: no log-probabilities at all."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    json: bool = False
    schema: Mapping[str, Any] | None = None
    logprobs: int | None = None


class ChatRequest(Record, frozen=True):
    """One HTTP request for the next message of a conversation.

    Attributes:
        messages: the whole conversation, or, with `previous`, the messages after that reply.
        previous: id of the reply that `messages` follow; "": none.
        dialect_fields: data that the dialect needs to write the reply.
        stream: the client wants the reply as server-sent events.
        n: number of completions, if the client wants several; UNSET: one.
        limit: the client's name for `max_tokens`, if it is not the dialect's usual one; error replies use it.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    options: SamplingOptions = field(default=SamplingOptions(), name="wanted")
    stream: bool = False
    previous: str = ""
    dialect_fields: Mapping[str, Any] = {}
    n: int | UnsetType = UNSET
    limit: str | UnsetType = UNSET


class SampledToken(Record, frozen=True):
    """A sampled token as text. `likeliest`: (text, log-probability) of the most likely tokens at its position.
    `offset`: where its text begins in the text of the completion. Both are set only if the dialect shows them."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()
    offset: int = 0


class SampledTurn(Record, frozen=True):
    """One sampled message, from which a dialect writes its reply. `id`: letters and digits; equal when the turn is
    replayed. `created`: Unix time. `stop`: the stop text that ended it, which is not part of the message; "": none.
    `reasoning_tokens` are among the `sampled_tokens`. `tokens`: empty unless the request wants log-probabilities."""

    id: str
    created: int
    model: str
    message: Message
    stop_reason: StopReason
    stop: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    reasoning_tokens: int = 0
    tokens: tuple[SampledToken, ...] = ()


class Match(enum.Enum):
    """Degree to which two messages match, from best to worst: EQUAL, EQUAL_AS_JSON (the arguments of calls differ in
    spelling only), DIFFERENT."""

    EQUAL = "equal"
    EQUAL_AS_JSON = "equal as JSON"
    DIFFERENT = "different"


def compare(one: Message, other: Message) -> Match:
    """Compare a sampled message with the one that a client sends back: EQUAL; EQUAL_AS_JSON if only the spelling of
    call arguments differs, not the JSON that they mean; or DIFFERENT.

    All fields count, also ids of calls and names of authors. A message without its reasoning is DIFFERENT.
    """
    if one == other:
        return Match.EQUAL
    plain = [(structs.replace(message, calls=()), [*map(_meant, message.calls)]) for message in (one, other)]
    return Match.EQUAL_AS_JSON if plain[0] == plain[1] else Match.DIFFERENT


def shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count the equal messages at the beginning of two histories; arguments of calls are compared as JSON."""
    alike = (compare(*pair) is not Match.DIFFERENT for pair in zip(one, other, strict=False))
    return next((place for place, same in enumerate(alike) if not same), min(len(one), len(other)))


def _meant(call: ToolCall) -> tuple[str, str, str]:
    try:
        meant = json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        meant = call.arguments
    return call.id, call.name, meant
