"""OpenAI's Chat Completions: how a client of ``/v1/chat/completions`` asks and is answered.

Fields that choose nothing here (`store`, `metadata`, `user` ...) are accepted and ignored, known or not; what would
choose something and is not to be had (several choices, top log-probabilities, images) is refused by name. A reasoning
is told as `reasoning_content`, as vLLM and SGLang do, and read back from there or from `reasoning`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stretto.conversation.messages import AskedTurn, Message, SaidTurn, SampledToken, Tool, ToolCall, Wanted
from stretto.core.engine import LONGEST_STOP, MOST_STOPS
from stretto.core.errors import RefusedRequest
from stretto.core.records import StopReason
from stretto.gateway.dialects import COMMENT, NotServed
from stretto.processes.http.bodies import parse_record

_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_LAST_EVENT = b"data: [DONE]\n\n"
_Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]


class ChatTextPart(msgspec.Struct, frozen=True):
    """A part of a message; a refusal of ours does not exist, and is read as text."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str = "{}"


class ChatCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A message as clients send it, with the fields of our replies."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatTextPart] | None = None
    name: str | None = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def message(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text + part.refusal for part in content)
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return Message(
            role="system" if self.role == "developer" else self.role,
            text=text,
            reasoning=self.reasoning_content or self.reasoning or "",
            calls=tuple(calls),
            call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class OfferedFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True):
    function: OfferedFunction
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, frozen=True):
    name: str = ""
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatStreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ChatRequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions, the fields that choose something."""

    model: str
    messages: Annotated[list[ChatMessageBody], Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None

    def wanted(self) -> Wanted:
        choice, form = self.tool_choice or "auto", self.response_format
        return Wanted(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            tool_choice=choice if isinstance(choice, str) else choice.function.name,
            parallel_calls=self.parallel_tool_calls is not False,
            json=form is not None and form.type != "text",
            schema=form.json_schema.schema if form and form.json_schema else None,
            logprobs=0 if self.logprobs else None,
        )


class ChatDialect:
    """The dialect of ``/v1/chat/completions`` (a `dialects.Dialect`)."""

    path = "/v1/chat/completions"
    body = ChatRequestBody
    keep_alive = COMMENT
    counts = ()

    def parse(self, body: bytes) -> AskedTurn:
        """See `Dialect`."""
        asked = parse_record(body, ChatRequestBody)
        for place, message in enumerate(asked.messages):
            if message.role == "tool" and not message.tool_call_id:
                raise RefusedRequest(f"messages[{place}].tool_call_id", "missing", "the id of the call it answers")
            if message.role != "assistant" and message.tool_calls:
                raise RefusedRequest(f"messages[{place}].tool_calls", f"calls of the {message.role}", "the assistant's")
        return AskedTurn(
            model=asked.model,
            messages=tuple(message.message() for message in asked.messages),
            tools=tuple(
                Tool(
                    tool.function.name,
                    tool.function.description or "",
                    tool.function.parameters or {},
                    tool.function.strict,
                )
                for tool in asked.tools or ()
            ),
            wanted=asked.wanted(),
            stream=bool(asked.stream),
            dialect_fields={
                "usage": bool(asked.stream and asked.stream_options and asked.stream_options.include_usage)
            },
        )

    def reply(self, asked: AskedTurn, said: SaidTurn) -> bytes:
        """See `Dialect`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", **_told(said.message), "refusal": None},
            "logprobs": _logprobs(asked, said.tokens),
            "finish_reason": _finish(said),
        }
        told = {**_head(said, "chat.completion"), "choices": [choice], "usage": _usage(said)}
        return msgspec.json.encode(told)

    def events(self, asked: AskedTurn, said: SaidTurn) -> Iterable[bytes]:
        """See `Dialect`."""
        head, with_usage = _head(said, "chat.completion.chunk"), asked.dialect_fields.get("usage")
        usage = {"usage": None} if with_usage else {}
        for delta, finish in _deltas(said):
            tokens = _logprobs(asked, said.tokens) if finish else None
            choice = {"index": 0, "delta": delta, "logprobs": tokens, "finish_reason": finish}
            yield _event({**head, "choices": [choice], **usage})
        if with_usage:
            yield _event({**head, "choices": [], "usage": _usage(said)})
        yield _LAST_EVENT

    def refuse(self, why: NotServed) -> bytes:
        """See `Dialect`."""
        kind = _KINDS.get(why.status, "invalid_request_error")
        told = {"message": why.message, "type": kind, "param": why.field or None, "code": why.code or None}
        return msgspec.json.encode({"error": told})

    def fail(self, why: NotServed) -> bytes:
        """See `Dialect`."""
        return b"data: " + self.refuse(why) + b"\n\n"

    def headers(self, said: SaidTurn) -> Mapping[str, str]:
        """See `Dialect`."""
        return {"x-request-id": f"req_{said.id}"}


def _deltas(said: SaidTurn) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The parts of a stream: the role, the reasoning, the text, each call, and why it ended."""
    message = said.message
    yield {"role": "assistant", "content": ""}, None
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}, None
    if message.text:
        yield {"content": message.text}, None
    for place, call in enumerate(_calls(message)):
        yield {"tool_calls": [{"index": place, **call}]}, None
    yield {}, _finish(said)


def _told(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"content": message.text if message.text or not message.calls else None}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.calls:
        told["tool_calls"] = _calls(message)
    return told


def _calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]


def _finish(said: SaidTurn) -> str:
    if said.stop_reason is StopReason.LENGTH:
        return "length"
    return "tool_calls" if said.message.calls else "stop"


def _logprobs(asked: AskedTurn, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
    if asked.wanted.logprobs is None:
        return None
    told = [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
        for token in tokens
    ]
    return {"content": told, "refusal": None}


def _head(said: SaidTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.id}", "object": kind, "created": said.created, "model": said.model}


def _usage(said: SaidTurn) -> dict[str, Any]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.sampled_tokens,
        "total_tokens": said.prompt_tokens + said.sampled_tokens,
    }


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(told) + b"\n\n"
