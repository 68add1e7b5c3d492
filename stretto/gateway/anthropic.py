"""Anthropic's Messages: how a client of ``/v1/messages`` asks and is answered.

A message is a text or a list of *blocks*. A user's message that holds results of tools is one message per result, then
its text. The interface grows by beta fields: top-level fields that are not known here are ignored, as they say nothing
of the conversation; blocks that are not known would lose a part of it, and are refused by name.

Claude Code tells its version in a block of its system prompt (``x-anthropic-billing-header``). It is no instruction to
a model, and this dialect takes it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stretto.conversation.messages import AskedTurn, Message, SaidTurn, Tool, ToolCall, Wanted
from stretto.core.engine import LONGEST_STOP, MOST_STOPS
from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, StopReason
from stretto.gateway.dialects import NotServed
from stretto.processes.http.bodies import parse_record

_BILLING = "x-anthropic-billing-header:"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Block(Record, frozen=True, tag_field="type", kw_only=True):
    """A part of a message. Where a prompt cache may end says nothing here."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block, frozen=True, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Block, frozen=True, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class ToolUseBlock(Block, frozen=True, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolReferenceBlock(Block, frozen=True, tag="tool_reference", kw_only=True):
    """A tool that the client has found for the model, and now has among its tools."""

    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ToolResultBlock(Block, frozen=True, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class AnthropicMessage(Record, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class AnthropicTool(Record, frozen=True, forbid_unknown_fields=False):
    """A tool that the client runs; those that Anthropic's servers run have a type of their own, and are refused."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoice(Record, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Record, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Record, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class CountBody(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """POST /v1/messages, the fields that choose something."""

    max_tokens: Annotated[int, Meta(ge=1)]
    tool_choice: ToolChoice | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]], Meta(max_length=MOST_STOPS)] | None
    ) = None
    stream: bool | None = None
    output_config: OutputConfig | None = None


class AnthropicTokenCount:
    """How clients of Anthropic ask for a count (a `dialects.TokenCount`)."""

    path = "/v1/messages/count_tokens"
    body = CountBody

    def parse(self, body: bytes) -> AskedTurn:
        asked = parse_record(body, CountBody)
        return AskedTurn(asked.model, tuple(_messages(asked)), _tools(asked))

    def counted(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})


class AnthropicDialect:
    """The dialect of ``/v1/messages`` (a `dialects.Dialect`)."""

    path = "/v1/messages"
    body = MessagesBody
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    counts = (AnthropicTokenCount(),)

    def parse(self, body: bytes) -> AskedTurn:
        asked = parse_record(body, MessagesBody)
        choice = asked.tool_choice or ToolChoice("auto")
        form = asked.output_config.format if asked.output_config else None
        return AskedTurn(
            model=asked.model,
            messages=tuple(_messages(asked)),
            tools=_tools(asked),
            wanted=Wanted(
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                stop=tuple(asked.stop_sequences or ()),
                tool_choice=_chosen(choice),
                parallel_calls=not choice.disable_parallel_tool_use,
                json=form is not None,
                schema=form.schema if form else None,
            ),
            stream=bool(asked.stream),
        )

    def reply(self, asked: AskedTurn, said: SaidTurn) -> bytes:
        return msgspec.json.encode(
            {**_beginning(said), "content": _blocks(said), **_ending(said), "usage": _usage(said)}
        )

    def events(self, asked: AskedTurn, said: SaidTurn) -> Iterable[bytes]:
        for kind, fields in _story(said):
            yield b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"

    def refuse(self, why: NotServed) -> bytes:
        place = f"{why.field}: " if why.field and not why.message.startswith(why.field) else ""
        told = {"type": _KINDS.get(why.status, "invalid_request_error"), "message": place + why.message}
        return msgspec.json.encode({"type": "error", "error": told})

    def fail(self, why: NotServed) -> bytes:
        return b"event: error\ndata: " + self.refuse(why) + b"\n\n"

    def headers(self, said: SaidTurn) -> Mapping[str, str]:
        return {"request-id": f"req_{said.id}"}


def _tools(asked: CountBody) -> tuple[Tool, ...]:
    offered = asked.tools or ()
    return tuple(Tool(tool.name, tool.description or "", tool.input_schema, tool.strict) for tool in offered)


def _messages(asked: CountBody) -> Iterator[Message]:
    system = asked.system
    if system is not None:
        blocks = [TextBlock(text=system)] if isinstance(system, str) else system
        yield Message("system", _text([block for block in blocks if not block.text.startswith(_BILLING)]))
    for place, message in enumerate(asked.messages):
        if isinstance(message.content, str):
            yield Message(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant(message, f"messages[{place}]")
        else:
            yield from _others(message, f"messages[{place}]")


def _assistant(message: AnthropicMessage, place: str) -> Message:
    blocks = [block for block in message.content if not isinstance(block, str)]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise RefusedRequest(
            f"{place}.content", "a tool_result of the assistant", "results are in messages of the user"
        )
    return Message(
        "assistant",
        text=_text([block for block in blocks if isinstance(block, TextBlock)]),
        reasoning="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
        calls=tuple(
            ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ),
    )


def _others(message: AnthropicMessage, place: str) -> Iterator[Message]:
    """Of a user or of the system: the results first, as Anthropic wants them, then the text."""
    texts = list[TextBlock]()
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content = block.content or ""
            yield Message("tool", content if isinstance(content, str) else _text(content), call_id=block.tool_use_id)
        elif isinstance(block, TextBlock):
            texts.append(block)
        else:
            raise RefusedRequest(
                f"{place}.content", f"a block of the assistant in a message of the {message.role}", "text"
            )
    if texts or not message.content:
        yield Message(message.role, _text(texts))


def _text(blocks: Iterable[TextBlock | ToolReferenceBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _chosen(choice: ToolChoice) -> str:
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise RefusedRequest("tool_choice.name", "missing", "the name of a tool")
    return choice.name


def _beginning(said: SaidTurn) -> dict[str, Any]:
    return {"id": f"msg_{said.id}", "type": "message", "role": "assistant", "model": said.model, "content": []}


def _ending(said: SaidTurn) -> dict[str, Any]:
    if said.stop_reason is StopReason.LENGTH:
        reason = "max_tokens"
    elif said.message.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if said.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": said.stop if reason == "stop_sequence" else None}


def _usage(said: SaidTurn, sampled: int | None = None) -> dict[str, int]:
    return {
        "input_tokens": said.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": said.sampled_tokens if sampled is None else sampled,
    }


def _blocks(said: SaidTurn) -> list[dict[str, Any]]:
    message, blocks = said.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": said.id})
    if message.text or not (blocks or message.calls):
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in message.calls
    ]
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; calls whose arguments are no JSON object are text of their message."""
    read = json.loads(arguments or "{}")
    assert isinstance(read, dict)
    return read


def _story(said: SaidTurn) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of the turn: their types and fields. The turn is whole before its first event: one delta a block."""
    started = {**_beginning(said), "stop_reason": None, "stop_sequence": None, "usage": _usage(said, sampled=0)}
    yield "message_start", {"message": started}
    calls = {call.id: call.arguments for call in said.message.calls}
    for place, block in enumerate(_blocks(said)):
        if block["type"] == "thinking":
            empty = {**block, "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        elif block["type"] == "text":
            empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        else:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": calls[block["id"]]}]
        yield "content_block_start", {"index": place, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": place, "delta": delta}
        yield "content_block_stop", {"index": place}
    yield "message_delta", {"delta": _ending(said), "usage": _usage(said)}
    yield "message_stop", {}
