"""OpenAI's Chat Completions.

Unknown fields are ignored, because agents send many without effect; the strict variant for `stretto serve` refuses them
by name. Replies hold reasoning in `reasoning_content`, as in vLLM and SGLang; requests may also have it in
`reasoning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from stretto.core.engine import Progress
from stretto.core.errors import RefusedRequest
from stretto.core.records import StopReason
from stretto.processes.http.asgi import parse_record
from stretto_gateway.dialects.openai import (
    ChoiceDialect,
    CompletionText,
    MostTokens,
    OpenAIBody,
    Part,
    TopLogprobs,
    logprob_of,
    usage_of,
)
from stretto_workflows.chat.messages import ChatRequest, Message, SampledToken, SampledTurn, Tool, ToolCall


class _ChatTextPart(msgspec.Struct, frozen=True):
    """A part of a message. A refusal is read as text."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str = "{}"


class _ChatCall(msgspec.Struct, frozen=True):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _ChatMessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a request, which may have the fields of an earlier reply. A null field counts as absent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatTextPart] | None = None
    name: str | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def message(self, place: str) -> Message:
        """Convert to a dialect-independent message. `place`: path of the message in the body, for errors.

        Raises:
            RefusedRequest: a field that the role needs is missing, or a field of another role is set.
        """
        if self.content is None and self.role != "assistant":
            raise RefusedRequest(f"{place}.content", "missing", "the text of the message")
        if self.role == "tool" and not self.tool_call_id:
            raise RefusedRequest(f"{place}.tool_call_id", "missing", "the id of the call it answers")
        if self.role != "assistant" and self.tool_calls:
            raise RefusedRequest(f"{place}.tool_calls", f"calls of the {self.role}", "the assistant's")
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


class _OfferedFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatTool(msgspec.Struct, frozen=True):
    function: _OfferedFunction
    type: Literal["function"] = "function"


class _NamedFunction(msgspec.Struct, frozen=True):
    name: str


class _ChosenTool(msgspec.Struct, frozen=True):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _JsonSchema(msgspec.Struct, frozen=True):
    schema: dict[str, Any]


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions. Unknown fields are ignored. `max_completion_tokens` counts, not `max_tokens`,
    if both are given."""

    messages: Annotated[list[_ChatMessageBody], Meta(min_length=1)]
    max_completion_tokens: MostTokens | None = None
    tools: list[_ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: list[str] | None = None

    def request(self) -> ChatRequest:
        """Convert to a dialect-independent request.

        Raises:
            RefusedRequest: fields contradict each other, or a message lacks a field of its role.
        """
        choice, form = self.tool_choice or "auto", self.response_format or _ResponseFormat("text")
        if (form.type == "json_schema") is (form.json_schema is None):
            allowed = 'json_schema with the type "json_schema", and with no other'
            raise RefusedRequest("response_format", repr(form.type), allowed)
        if self.top_logprobs and not self.logprobs:
            raise RefusedRequest("top_logprobs", "set without logprobs", 'only together with "logprobs": true')
        functions = [tool.function for tool in self.tools or ()]
        return ChatRequest(
            model=self.model,
            messages=tuple(message.message(f"messages[{place}]") for place, message in enumerate(self.messages)),
            tools=tuple(Tool(one.name, one.description or "", one.parameters or {}, one.strict) for one in functions),
            options=self.options(
                self.max_completion_tokens or self.max_tokens,
                (self.top_logprobs or 0) if self.logprobs else None,
                tool_choice=choice if isinstance(choice, str) else choice.function.name,
                parallel_calls=self.parallel_tool_calls is not False,
                json=form.type != "text",
                schema=form.json_schema.schema if form.json_schema else None,
            ),
            stream=bool(self.stream),
            dialect_fields={"usage": self.include_usage},
            n=UNSET if self.n in (None, 1) else self.n,
            limit="max_completion_tokens" if self.max_completion_tokens else UNSET,
        )


class _StrictChatBody(_ChatBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions; unknown fields are refused."""


class ChatDialect(ChoiceDialect):
    """Dialect of ``/v1/chat/completions`` (satisfies `dialect.Dialect`). With `strict`, unknown fields and unsupported
    values are refused."""

    path = "/v1/chat/completions"
    body: type[_ChatBody]
    prefix, object, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.body = _StrictChatBody if strict else _ChatBody

    def parse(self, body: bytes) -> ChatRequest:
        found = parse_record(body, self.body)
        if self.strict:
            found.check_neutral(modalities=(["text"],))
        return found.request()

    def reply(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **_content(turn.message), "refusal": None},
                "logprobs": _logprobs(request, turn.tokens),
                "finish_reason": _finish(turn),
            }
            for index, turn in enumerate(turns)
        ]
        head = self.head(request, turns[0].id, turns[0].created, turns[0].model, whole=True)
        return msgspec.json.encode({**head, "choices": choices, "usage": _usage(turns)})

    def events(self, request: ChatRequest, turns: Sequence[SampledTurn]) -> Iterable[bytes]:
        head = self.head(request, turns[0].id, turns[0].created, turns[0].model, whole=False)
        for index, turn in enumerate(turns):
            for delta in _deltas(turn):
                yield self.event(request, head, [_part(index, delta)])
            yield self.event(request, head, [_part(index, {}, _logprobs(request, turn.tokens), _finish(turn))])
        yield self.closing(request, head, _usage(turns))

    def opening(self, index: int) -> list[Part]:
        return [_part(index, {"role": "assistant", "content": ""})]

    def text_part(self, index: int, text: str) -> Part:
        return _part(index, {"content": text})

    def writer(self, request: ChatRequest, index: int, text: CompletionText) -> Callable[[Progress], list[Part]]:
        def write(progress: Progress) -> list[Part]:
            piece, parts = text.take(progress), list[Part]()
            if piece is not None and (piece.text or piece.tokens):
                parts.append(_part(index, {"content": piece.text}, _logprobs(request, piece.tokens)))
            if piece is not None and piece.finish is not None:
                parts.append(_part(index, {}, finish=piece.finish))
            return parts

        return write


def _part(index: int, delta: Part, logprobs: Any = None, finish: str | None = None) -> Part:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _deltas(turn: SampledTurn) -> Iterator[Part]:
    message = turn.message
    yield {"role": "assistant", "content": ""}
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.text:
        yield {"content": message.text}
    for place, call in enumerate(_calls(message)):
        yield {"tool_calls": [{"index": place, **call}]}


def _content(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = {"content": message.text if message.text or not message.calls else None}
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    if message.calls:
        content["tool_calls"] = _calls(message)
    return content


def _calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]


def _finish(turn: SampledTurn) -> str:
    return "tool_calls" if turn.message.calls and turn.stop_reason is StopReason.STOP else turn.stop_reason


def _logprobs(request: ChatRequest, tokens: Iterable[SampledToken]) -> dict[str, Any] | None:
    if request.options.logprobs is None:
        return None
    return {"content": [logprob_of(token) for token in tokens], "refusal": None}


def _usage(turns: Sequence[SampledTurn]) -> dict[str, int]:
    return usage_of(turns[0].prompt_tokens, sum(turn.sampled_tokens for turn in turns))
