"""OpenAI's Responses.

A turn of the assistant is a list of *items*, in this order: reasoning, text, calls. Items that a client sends back are
joined to one message again. Fields without effect here (`store`, `metadata`, `service_tier` ...) are ignored. Built-in
tools, images and files are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, StopReason
from stretto.processes.http.asgi import parse_record, sent_event
from stretto_gateway.dialects.openai import (
    MinP,
    MostTokens,
    OpenAIDialect,
    Seed,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    error_of,
    logprob_of,
)
from stretto_gateway.requests import NotServed, shared_options
from stretto_workflows.chat.messages import ChatRequest, Message, SampledTurn, SamplingOptions, Tool, ToolCall

_LOGPROBS = "message.output_text.logprobs"
_RESPONSE = "resp_"
#: Fields of a request that its reply repeats, with default values.
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}

Role = Literal["system", "developer", "user", "assistant"]


class _Part(Record, frozen=True):
    """A part of an item's content. A refusal is read as text."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


Content = str | list[_Part]


class _Item(Record, frozen=True):
    """One item of the input. Required: role and content of a message; `call_id`, name and arguments of a call;
    `call_id` and output of a call's result; nothing of a reasoning item."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Role | None = None
    content: Content | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Content | None = None
    # fields of our replies, which clients send back
    id: str | None = None
    status: str | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    phase: str | None = None
    namespace: str | None = None


class _FunctionTool(Record, frozen=True):
    """A function that the client runs. Tools that OpenAI's servers run are refused."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChosenFunction(Record, frozen=True):
    type: Literal["function"]
    name: str


class _TextFormat(Record, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextOptions(Record, frozen=True):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _ResponsesBody(Record, frozen=True, kw_only=True):
    """Body of POST /v1/responses. A null field counts as absent. `background` may not be true. Fields from
    `stream_options` on are ignored; the response repeats some."""

    model: str
    input: str | Annotated[list[_Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MostTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    text: _TextOptions | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    stream: bool | None = None
    background: bool | None = None
    # accepted and ignored
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None  # of built-in tools
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    context_management: list[Any] | None = None


class ResponsesDialect(OpenAIDialect):
    """Dialect of ``/v1/responses`` (satisfies `dialect.Dialect`)."""

    path = "/v1/responses"
    body = _ResponsesBody

    def parse(self, body: bytes) -> ChatRequest:
        found = parse_record(body, _ResponsesBody)
        items = [_Item(role="user", content=found.input)] if isinstance(found.input, str) else found.input
        system = (Message("system", found.instructions),) if found.instructions is not None else ()
        tools = tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {}, tool.strict) for tool in found.tools or ()
        )
        if found.background:
            raise RefusedRequest("background", "true", "only false or null: a response is made while its client waits")
        previous = found.previous_response_id or ""
        if previous and not previous.startswith(_RESPONSE):
            raise RefusedRequest("previous_response_id", repr(previous[:80]), "the id of a response of this session")
        return ChatRequest(
            model=found.model,
            messages=(*system, *messages_of(items)),
            tools=tools,
            options=_options(found),
            stream=bool(found.stream),
            previous=previous.removeprefix(_RESPONSE),
            dialect_fields=_echoed(found),
        )

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        return msgspec.json.encode(_response(request, turns[0], _items(turns[0])))

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        for number, (kind, fields) in enumerate(_events(request, turns[0])):
            yield sent_event({"type": kind, "sequence_number": number, **fields}, kind)

    def fail(self, why: NotServed) -> bytes:
        # OpenAI's event has the error's fields at top level, but its clients raise only if there is a field `error`.
        return sent_event({**error_of(why), "type": "error", "sequence_number": 0, "error": error_of(why)}, "error")


def messages_of(items: Sequence[_Item]) -> list[Message]:
    """Convert items to messages: one for all items of an assistant's turn, and one for every other item.

    Raises:
        RefusedRequest: an item lacks a field of its type.
    """
    found: list[Message] = []
    for place, item in enumerate(items):
        new = _message(item, f"input[{place}]")
        last = found[-1] if found else None
        # Behind text or calls, only calls belong to the same turn.
        if last is not None and last.role == new.role == "assistant" and (new.calls or not (last.calls or last.text)):
            found[-1] = replace(
                last,
                text=last.text + new.text,
                reasoning=last.reasoning + new.reasoning,
                calls=(*last.calls, *new.calls),
            )
        else:
            found.append(new)
    return found


def _message(item: _Item, place: str) -> Message:
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else item.summary
        return Message("assistant", reasoning=_text(parts or []))
    if item.type == "function_call":
        call = ToolCall(
            _needed(item.call_id, place, "call_id"),
            _needed(item.name, place, "name"),
            _needed(item.arguments, place, "arguments"),
        )
        return Message("assistant", calls=(call,))
    if item.type == "function_call_output":
        output = item.output
        if output is None:
            raise RefusedRequest(f"{place}.output", "missing", "the result of the call, as text")
        return Message("tool", _text(output), call_id=_needed(item.call_id, place, "call_id"))
    if item.content is None:
        raise RefusedRequest(f"{place}.content", "missing", "the text of the message")
    role = _needed(item.role, place, "role")
    return Message("system" if role == "developer" else role, _text(item.content))


def _needed(found: Any, place: str, field: str) -> Any:
    if found is None:
        raise RefusedRequest(f"{place}.{field}", "missing", "needed by an item of this type")
    return found


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def _options(body: _ResponsesBody) -> SamplingOptions:
    form = (body.text.format if body.text else None) or _TextFormat("text")
    choice = body.tool_choice or "auto"
    logprobs = body.top_logprobs if body.top_logprobs or _LOGPROBS not in (body.include or ()) else 0
    return SamplingOptions(
        max_tokens=body.max_output_tokens,
        tool_choice=choice if isinstance(choice, str) else choice.name,
        parallel_calls=body.parallel_tool_calls is not False,
        json=form.type != "text",
        schema=form.schema,
        logprobs=logprobs,
        **shared_options(body),
    )


def _echoed(body: _ResponsesBody) -> dict[str, Any]:
    fields = msgspec.to_builtins(body)
    return {field: fields[field] for field in _ECHOED if fields[field] is not None}


def _items(turn: SampledTurn) -> list[dict[str, Any]]:
    """JSON items of a turn: its reasoning, its text (left out if there are only calls), its calls. The last item of a
    truncated turn has the status "incomplete"."""
    message, items = turn.message, list[dict[str, Any]]()
    if message.reasoning:
        thought = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{turn.id}", "type": "reasoning", "summary": [], "content": thought})
    if message.text or not message.calls:
        part = {
            "type": "output_text",
            "text": message.text,
            "annotations": [],
            "logprobs": list(map(logprob_of, turn.tokens)),
        }
        items.append({"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "content": [part]})
    for number, call in enumerate(message.calls):
        kind = {"id": f"fc_{turn.id}{number}", "type": "function_call"}
        items.append({**kind, "call_id": call.id, "name": call.name, "arguments": call.arguments})
    for item in items:
        item["status"] = "completed"
    if turn.stop_reason is StopReason.LENGTH:
        items[-1]["status"] = "incomplete"
    return items


def _response(request: ChatRequest, turn: SampledTurn, items: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """Response object, as JSON. `items`: its output; None for the first events of a stream, with the status
    "in_progress" and without usage."""
    cut = turn.stop_reason is StopReason.LENGTH
    status = "in_progress" if items is None else "incomplete" if cut else "completed"
    return {
        **_ECHOED,
        **request.dialect_fields,
        "id": _RESPONSE + turn.id,
        "object": "response",
        "created_at": turn.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": turn.model,
        "output": items or [],
        "usage": None if items is None else _usage(turn),
    }


def _usage(turn: SampledTurn) -> dict[str, Any]:
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": turn.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
    }


def _events(request: ChatRequest, turn: SampledTurn) -> Iterator[tuple[str, dict[str, Any]]]:
    empty: dict[str, Any]
    beginning, items = _response(request, turn, None), _items(turn)
    yield "response.created", {"response": beginning}
    yield "response.in_progress", {"response": beginning}
    for place, item in enumerate(items):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        started = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": place, "item": started}
        yield from _deltas(item, {"item_id": item["id"], "output_index": place})
        yield "response.output_item.done", {"output_index": place, "item": item}
    whole = _response(request, turn, items)
    yield f"response.{whole['status']}", {"response": whole}


def _deltas(item: dict[str, Any], at: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Events for the content of an item, with a single delta, because the turn is complete. `at`: fields that locate
    the item in the response."""
    if item["type"] == "function_call":
        called = "response.function_call_arguments"
        yield f"{called}.delta", {**at, "delta": item["arguments"]}
        yield f"{called}.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        return
    part, at = item["content"][0], {**at, "content_index": 0}
    spoken = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": "", **({"logprobs": []} if logprobs else {})}}
    yield f"{spoken}.delta", {**at, "delta": part["text"], **logprobs}
    yield f"{spoken}.done", {**at, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**at, "part": part}
