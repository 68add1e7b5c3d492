"""The messages of a conversation, in the dialect of no client: what every dialect is read into and written from.

    chat completions ─┐                                        ┌─ chat completions
    responses        ─┼─► AskedTurn ─► tokens ─► SaidTurn ─────┼─ responses
    Anthropic's      ─┘   (messages, tools, how to sample)     └─ Anthropic's

Two histories are compared message by message: the texts, the reasoning and the calls of a message are what counts, not
how a client spells them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stretto.core.records import Record, StopReason

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Record, frozen=True):
    """A call of a tool by the assistant. `arguments` is the text of a JSON object, as the model wrote it.

    Example: ``ToolCall(id="call_0", name="add", arguments='{"a": 1,  "b": 2}')``
    """

    id: str
    name: str
    arguments: str


class Message(Record, frozen=True):
    """One message. `reasoning` and `calls` are the assistant's alone; `call_id` is a tool's alone, and names the call
    whose result `text` is.

    Example: ``Message("assistant", "", reasoning="small numbers", calls=(ToolCall(...),))``
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""  # of the author, or of the tool


class Tool(Record, frozen=True):
    """A tool that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}
    strict: bool | None = None

    @property
    def function(self) -> dict[str, Any]:
        """As chat templates take it."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": told}


class Wanted(Record, frozen=True):
    """How the next message is to be sampled; None leaves it to the session."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"  # or "none", "required", or the name of a tool
    parallel_calls: bool = True
    json: bool = False  # the text has to be a JSON object
    schema: Mapping[str, Any] | None = None  # that it has to follow
    logprobs: int | None = None  # likeliest tokens to tell with each token; None: no log-probabilities


class AskedTurn(Record, frozen=True):
    """What one HTTP request asks for. `previous` names the reply whose conversation `messages` go on with, or is empty
    when they are the whole of it. `dialect_fields` are what a dialect has to say again in its reply."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    wanted: Wanted = Wanted()
    stream: bool = False
    previous: str = ""
    dialect_fields: Mapping[str, Any] = {}


class SampledToken(Record, frozen=True):
    """A sampled token as its own text."""

    text: str
    logprob: float


class SaidTurn(Record, frozen=True):
    """What the model said. `stop` is the stop text at which it ended, which is not part of the message."""

    id: str  # letters and digits; equal when the turn is replayed
    created: int  # seconds since 1970
    model: str
    message: Message
    stop_reason: StopReason
    stop: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    reasoning_tokens: int = 0
    tokens: tuple[SampledToken, ...] = ()  # where log-probabilities were asked for


class Likeness(enum.Enum):
    """How alike two messages are; in this order from the most to the least."""

    EQUAL = "equal"
    EQUAL_AS_JSON = "equal as JSON"  # but for how the arguments of calls are written
    DIFFERENT = "different"


def likeness(one: Message, other: Message) -> Likeness:
    """Compare what was said with what a client sends back.

    Ids of calls count; names of authors too. Reasoning that is left out makes a message different.
    """
    if one == other:
        return Likeness.EQUAL
    plain = [
        (
            message.role,
            message.text,
            message.reasoning,
            message.call_id,
            message.name,
            tuple(map(_meant, message.calls)),
        )
        for message in (one, other)
    ]
    return Likeness.EQUAL_AS_JSON if plain[0] == plain[1] else Likeness.DIFFERENT


def shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two histories begin with alike, the arguments of calls compared as JSON."""
    alike = (likeness(*pair) is not Likeness.DIFFERENT for pair in zip(one, other, strict=False))
    return next((place for place, same in enumerate(alike) if not same), min(len(one), len(other)))


def _meant(call: ToolCall) -> tuple[str, str, str]:
    try:
        meant = json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        meant = call.arguments
    return call.id, call.name, meant
