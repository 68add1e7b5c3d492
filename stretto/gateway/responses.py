"""OpenAI's Responses: how a client of ``/v1/responses`` asks and is answered.

One message of the assistant is up to three kinds of *items*, in this order: its reasoning, its text, its calls. Back
from the client, the items of one turn are one message again. Fields that choose nothing here (`store`, `metadata`,
`service_tier` ...) are accepted and ignored; built-in tools, images and files are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stretto.conversation.messages import AskedTurn, Message, SaidTurn, Tool, ToolCall, Wanted
from stretto.core.engine import MOST_LIKELIEST
from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, StopReason
from stretto.gateway.dialects import COMMENT, NotServed
from stretto.processes.http.bodies import parse_record

_LOGPROBS = "message.output_text.logprobs"
_RESPONSE = "resp_"
#: What a reply says again of its request, with the values of a request that says nothing.
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
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "server_error"}

Role = Literal["system", "developer", "user", "assistant"]


class Part(Record, frozen=True):
    """A part of an item's content. Refusals are never sent from here, and read as text."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


Content = str | list[Part]


class Item(Record, frozen=True):
    """One item of the input, of any kind; which fields it needs depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Role | None = None
    content: Content | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Content | None = None
    # of our replies, which clients send back
    id: str | None = None
    status: str | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    phase: str | None = None
    namespace: str | None = None


class FunctionTool(Record, frozen=True):
    """A function that the client runs. The tools that OpenAI's servers run are not there."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Record, frozen=True):
    type: Literal["function"]
    name: str


class TextFormat(Record, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Record, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Record, frozen=True, kw_only=True):
    """POST /v1/responses. A field that is null counts as absent."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None
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


class ResponsesDialect:
    """The dialect of ``/v1/responses`` (a `dialects.Dialect`)."""

    path = "/v1/responses"
    body = ResponsesBody
    keep_alive = COMMENT
    counts = ()

    def parse(self, body: bytes) -> AskedTurn:
        asked = parse_record(body, ResponsesBody)
        items = [Item(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
        system = (Message("system", asked.instructions),) if asked.instructions is not None else ()
        tools = tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {}, tool.strict) for tool in asked.tools or ()
        )
        if asked.background:
            raise RefusedRequest("background", "true", "only false or null: a response is made while its client waits")
        previous = asked.previous_response_id or ""
        if previous and not previous.startswith(_RESPONSE):
            raise RefusedRequest("previous_response_id", repr(previous[:80]), "the id of a response of this session")
        return AskedTurn(
            model=asked.model,
            messages=(*system, *messages_of(items)),
            tools=tools,
            wanted=_wanted(asked),
            stream=bool(asked.stream),
            previous=previous.removeprefix(_RESPONSE),
            dialect_fields=_echoed(asked),
        )

    def reply(self, asked: AskedTurn, said: SaidTurn) -> bytes:
        return msgspec.json.encode(_response(asked, said, _items(said)))

    def events(self, asked: AskedTurn, said: SaidTurn) -> Iterable[bytes]:
        for number, (kind, fields) in enumerate(_story(asked, said)):
            data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
            yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def refuse(self, why: NotServed) -> bytes:
        return msgspec.json.encode({"error": _error(why)})

    def fail(self, why: NotServed) -> bytes:
        # OpenAI's event has the fields of the error beside its type; its clients raise where there is an `error`.
        told = {**_error(why), "type": "error", "sequence_number": 0, "error": _error(why)}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"

    def headers(self, said: SaidTurn) -> Mapping[str, str]:
        return {"x-request-id": f"req_{said.id}"}


def _error(why: NotServed) -> dict[str, Any]:
    return {
        "message": why.message,
        "type": _KINDS.get(why.status, "invalid_request_error"),
        "param": why.field or None,
        "code": why.code or None,
    }


def messages_of(items: Sequence[Item]) -> list[Message]:
    """The items of a turn of the assistant as one message, every other item as its own.

    Raises:
        RefusedRequest: an item lacks a field of its type.
    """
    found: list[Message] = []
    for place, item in enumerate(items):
        new = _message(item, f"input[{place}]")
        last = found[-1] if found else None
        if last is not None and last.role == new.role == "assistant" and _goes_on(last, new):
            found[-1] = replace(
                last,
                text=last.text + new.text,
                reasoning=last.reasoning + new.reasoning,
                calls=(*last.calls, *new.calls),
            )
        else:
            found.append(new)
    return found


def _goes_on(last: Message, new: Message) -> bool:
    """Whether both are of one turn: its reasoning comes before its text, its text before its calls."""
    if new.calls:
        return True
    return not last.calls and not last.text


def _message(item: Item, place: str) -> Message:
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


def _wanted(asked: ResponsesBody) -> Wanted:
    form = (asked.text.format if asked.text else None) or TextFormat("text")
    choice = asked.tool_choice or "auto"
    logprobs = asked.top_logprobs if asked.top_logprobs or _LOGPROBS not in (asked.include or ()) else 0
    return Wanted(
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        tool_choice=choice if isinstance(choice, str) else choice.name,
        parallel_calls=asked.parallel_tool_calls is not False,
        json=form.type != "text",
        schema=form.schema,
        logprobs=logprobs,
    )


def _echoed(asked: ResponsesBody) -> dict[str, Any]:
    """The fields of `_ECHOED` that the request has, as JSON."""
    told = msgspec.to_builtins(asked)
    return {field: told[field] for field in _ECHOED if told[field] is not None}


def _items(said: SaidTurn) -> list[dict[str, Any]]:
    """The items of the turn; what a cut turn said last is incomplete."""
    message, items = said.message, list[dict[str, Any]]()
    if message.reasoning:
        thought = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{said.id}", "type": "reasoning", "summary": [], "content": thought})
    if message.text or not message.calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": _logprobs(said)}
        items.append({"id": f"msg_{said.id}", "type": "message", "role": "assistant", "content": [part]})
    for number, call in enumerate(message.calls):
        kind = {"id": f"fc_{said.id}{number}", "type": "function_call"}
        items.append({**kind, "call_id": call.id, "name": call.name, "arguments": call.arguments})
    for item in items:
        item["status"] = "completed"
    if said.stop_reason is StopReason.LENGTH:
        items[-1]["status"] = "incomplete"
    return items


def _logprobs(said: SaidTurn) -> list[dict[str, Any]]:
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
        for token in said.tokens
    ]


def _response(asked: AskedTurn, said: SaidTurn, items: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """The whole response; before there are items, as it begins."""
    cut = said.stop_reason is StopReason.LENGTH
    status = "in_progress" if items is None else "incomplete" if cut else "completed"
    return {
        **_ECHOED,
        **asked.dialect_fields,
        "id": _RESPONSE + said.id,
        "object": "response",
        "created_at": said.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": said.model,
        "output": items or [],
        "usage": None if items is None else _usage(said),
    }


def _usage(said: SaidTurn) -> dict[str, Any]:
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": said.reasoning_tokens},
        "total_tokens": said.prompt_tokens + said.sampled_tokens,
    }


def _story(asked: AskedTurn, said: SaidTurn) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of the turn: their types and fields."""
    empty: dict[str, Any]
    beginning, items = _response(asked, said, None), _items(said)
    yield "response.created", {"response": beginning}
    yield "response.in_progress", {"response": beginning}
    for place, item in enumerate(items):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        started = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": place, "item": started}
        yield from _telling(item, {"item_id": item["id"], "output_index": place})
        yield "response.output_item.done", {"output_index": place, "item": item}
    whole = _response(asked, said, items)
    yield f"response.{whole['status']}", {"response": whole}


def _telling(item: dict[str, Any], at: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What an item says, as one delta: the turn is whole before its first event is."""
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
