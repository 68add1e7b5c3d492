"""Anthropic's Messages.

A message is a text or a list of *blocks*. A user message with tool results becomes one message per result, and one for
its text. Unknown top-level fields are ignored, because new beta fields rarely change the conversation. Unknown blocks
are refused by name, because a part of the conversation would be lost.

Claude Code sends its version in a block of its system prompt (``x-anthropic-billing-header``), which is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, StopReason
from stretto.processes.http.asgi import parse_record, sent_event
from stretto_gateway.dialects.dialect import TokenCount
from stretto_gateway.dialects.openai import MostTokens, Stops, Temperature, TopK, TopP
from stretto_gateway.requests import NotServed, shared_options
from stretto_workflows.chat.messages import ChatRequest, Message, SampledTurn, SamplingOptions, Tool, ToolCall

_BILLING = "x-anthropic-billing-header:"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Block(Record, frozen=True, tag_field="type", kw_only=True):
    """A part of a message. `cache_control` has no effect here."""

    cache_control: dict[str, Any] | None = None


class _TextBlock(_Block, frozen=True, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class _ThinkingBlock(_Block, frozen=True, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class _ToolUseBlock(_Block, frozen=True, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class _ToolReferenceBlock(_Block, frozen=True, tag="tool_reference", kw_only=True):
    """Name of a tool that the client has found in a search and offers from now on."""

    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class _ToolResultBlock(_Block, frozen=True, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[_TextBlock | _ToolReferenceBlock] | None = None
    is_error: bool | None = None


class _AnthropicMessage(Record, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_TextBlock | _ThinkingBlock | _ToolUseBlock | _ToolResultBlock]


class _AnthropicTool(Record, frozen=True, forbid_unknown_fields=False):
    """A tool that the client runs. Tools of Anthropic's servers have other types and are refused."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class _ToolChoice(Record, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(Record, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(Record, frozen=True):
    effort: str | None = None
    format: _OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class _CountBody(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /v1/messages/count_tokens: the fields of a prompt. A null field counts as absent."""

    model: str
    messages: Annotated[list[_AnthropicMessage], Meta(min_length=1)]
    system: str | list[_TextBlock] | None = None
    tools: list[_AnthropicTool] | None = None


class _MessagesBody(_CountBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /v1/messages: the fields of a prompt, and how to sample. A null field counts as absent; fields
    without effect are ignored."""

    max_tokens: MostTokens
    tool_choice: _ToolChoice | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    output_config: _OutputConfig | None = None


class MessagesDialect:
    """Dialect of ``/v1/messages`` (satisfies `dialect.Dialect`)."""

    path = "/v1/messages"
    body = _MessagesBody
    keep_alive = sent_event({"type": "ping"}, "ping")
    strict = False
    fields: Mapping[str, str] = {"prompt_token_ids": "messages"}

    @property
    def counts(self) -> Sequence[TokenCount]:
        return [TokenCount(f"{self.path}/count_tokens", _CountBody, _counted, _count)]

    def parse(self, body: bytes) -> ChatRequest:
        found = parse_record(body, _MessagesBody)
        choice = found.tool_choice or _ToolChoice("auto")
        form = found.output_config.format if found.output_config else None
        return ChatRequest(
            model=found.model,
            messages=tuple(_messages(found)),
            tools=_tools(found),
            options=SamplingOptions(
                max_tokens=found.max_tokens,
                stop=tuple(found.stop_sequences or ()),
                tool_choice=_chosen(choice),
                parallel_calls=not choice.disable_parallel_tool_use,
                json=form is not None,
                schema=form.schema if form else None,
                **shared_options(found),
            ),
            stream=bool(found.stream),
        )

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        [turn] = turns
        return msgspec.json.encode(
            {**_beginning(turn), "content": _blocks(turn), **_ending(turn), "usage": _usage(turn)}
        )

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        for kind, fields in _events(turns[0]):
            yield sent_event({"type": kind, **fields}, kind)

    def refuse(self, why: NotServed) -> bytes:
        return msgspec.json.encode(_error(why))

    def fail(self, why: NotServed) -> bytes:
        return sent_event(_error(why), "error")

    def reply_headers(self, id: str) -> Mapping[str, str]:
        return {"request-id": f"req_{id}"}


def _counted(body: bytes) -> ChatRequest:
    found = parse_record(body, _CountBody)
    return ChatRequest(found.model, tuple(_messages(found)), _tools(found))


def _count(tokens: int) -> bytes:
    return msgspec.json.encode({"input_tokens": tokens})


def _error(why: NotServed) -> dict[str, Any]:
    kind = "api_error" if why.status == 500 else _KINDS.get(why.status, "invalid_request_error")
    place = f"{why.field}: " if why.field and not why.message.startswith(why.field) else ""
    return {"type": "error", "error": {"type": kind, "message": place + why.message}}


def _tools(body: _CountBody) -> tuple[Tool, ...]:
    offered = body.tools or ()
    return tuple(Tool(tool.name, tool.description or "", tool.input_schema, tool.strict) for tool in offered)


def _messages(body: _CountBody) -> Iterator[Message]:
    system = body.system
    if system is not None:
        blocks = [_TextBlock(text=system)] if isinstance(system, str) else system
        yield Message("system", _text([block for block in blocks if not block.text.startswith(_BILLING)]))
    for place, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield Message(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant(message, f"messages[{place}]")
        else:
            yield from _others(message, f"messages[{place}]")


def _assistant(message: _AnthropicMessage, place: str) -> Message:
    blocks = [block for block in message.content if not isinstance(block, str)]
    if any(isinstance(block, _ToolResultBlock) for block in blocks):
        raise RefusedRequest(
            f"{place}.content", "a tool_result of the assistant", "results are in messages of the user"
        )
    return Message(
        "assistant",
        text=_text([block for block in blocks if isinstance(block, _TextBlock)]),
        reasoning="".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock)),
        calls=tuple(
            ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in blocks
            if isinstance(block, _ToolUseBlock)
        ),
    )


def _others(message: _AnthropicMessage, place: str) -> Iterator[Message]:
    texts = list[_TextBlock]()
    for block in message.content:
        if isinstance(block, _ToolResultBlock):
            content = block.content or ""
            yield Message("tool", content if isinstance(content, str) else _text(content), call_id=block.tool_use_id)
        elif isinstance(block, _TextBlock):
            texts.append(block)
        else:
            raise RefusedRequest(
                f"{place}.content", f"a block of the assistant in a message of the {message.role}", "text"
            )
    if texts or not message.content:
        yield Message(message.role, _text(texts))


def _text(blocks: Iterable[_TextBlock | _ToolReferenceBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _chosen(choice: _ToolChoice) -> str:
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise RefusedRequest("tool_choice.name", "missing", "the name of a tool")
    return choice.name


def _beginning(turn: SampledTurn) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn.model, "content": []}


def _ending(turn: SampledTurn) -> dict[str, Any]:
    if turn.stop_reason is StopReason.LENGTH:
        reason = "max_tokens"
    elif turn.message.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if turn.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": turn.stop if reason == "stop_sequence" else None}


def _usage(turn: SampledTurn, sampled: int | None = None) -> dict[str, int]:
    return {
        "input_tokens": turn.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": turn.sampled_tokens if sampled is None else sampled,
    }


def _blocks(turn: SampledTurn) -> list[dict[str, Any]]:
    message, blocks = turn.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": turn.id})
    if message.text or not (blocks or message.calls):
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in message.calls
    ]
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """Decode the arguments of a call, a JSON object or "" for {} (others have not been parsed as a call)."""
    read = json.loads(arguments or "{}")
    assert isinstance(read, dict)
    return read


def _events(turn: SampledTurn) -> Iterator[tuple[str, dict[str, Any]]]:
    """Types and fields of a turn's events. Each block's content is a single delta, because the turn is complete."""
    started = {**_beginning(turn), "stop_reason": None, "stop_sequence": None, "usage": _usage(turn, sampled=0)}
    yield "message_start", {"message": started}
    calls = {call.id: call.arguments for call in turn.message.calls}
    for place, block in enumerate(_blocks(turn)):
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
    yield "message_delta", {"delta": _ending(turn), "usage": _usage(turn)}
    yield "message_stop", {}
