"""From messages to the tokens of a prompt: tokens that are held stay as they are, only what is new is encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from stretto.conversation.bridge import ChatTemplate, Renderer
from stretto.conversation.forest import Tokens
from stretto.conversation.messages import Message, Tool, ToolCall
from stretto.conversation.tool_calls import form_of, split_reasoning
from stretto.core.errors import RefusedRequest
from stretto.worlds.workflows.task import ChatMessage


class Rendering(Protocol):
    """How a model's conversations are written."""

    def prompt(
        self, messages: Sequence[ChatMessage], known: int, held: Tokens, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Tokens, str]:
        """The tokens behind which the next turn stands, and why a branch begins, if one does. `held` are the tokens of
        the first `known` messages.

        Raises:
            RefusedRequest: these are no messages.
            DataError: the template refuses them, or the tokenizer a character.
        """
        ...

    def message(self, text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the model said as a message."""
        ...


@dataclass(frozen=True)
class PlainRendering:
    """Of a model without a chat template: the contents of the messages, one behind the other.

    Attributes:
        encode: text that continues a sequence, as token ids.
    """

    encode: Callable[[str], Tokens]

    def prompt(
        self, messages: Sequence[ChatMessage], known: int, held: Tokens, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Tokens, str]:
        """See `Rendering`."""
        return held + self.encode("".join(_read(message).text for message in messages[known:])), ""

    def message(self, text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See `Rendering`."""
        return {"role": "assistant", "content": text}


class TemplateRendering:
    """By the chat template of the model's tokenizer."""

    def __init__(self, template: ChatTemplate) -> None:
        self._renderer, self._form = Renderer(template), form_of(template.chat_template)

    def prompt(
        self, messages: Sequence[ChatMessage], known: int, held: Tokens, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Tokens, str]:
        """See `Rendering`."""
        if held and known == len(messages):
            return held, ""
        history, offered = [_read(message) for message in messages], [_tool(tool) for tool in tools]
        if not held or history[known - 1].role != "assistant":
            return self._renderer.whole(history, offered), ""
        tail = self._renderer.tail(history[known - 1], held, history[known:], offered)
        return (self._renderer.whole(history, offered), "drift") if tail is None else (held + tail, "")

    def message(self, text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See `Rendering`."""
        reasoning, rest = split_reasoning(text)
        parsed = self._form.parse(rest, lambda number: f"call_{number}") if tools else None
        told: dict[str, Any] = {"role": "assistant", "content": rest if parsed is None else parsed.text}
        if reasoning:
            told["reasoning_content"] = reasoning
        if parsed is not None and parsed.calls:
            told["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.calls
            ]
        return told


def _read(message: ChatMessage) -> Message:
    calls = [
        ToolCall(str(call.get("id", "")), str(call["function"]["name"]), str(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    told = {
        "role": message.get("role"),
        "text": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "call_id": message.get("tool_call_id") or "",
        "name": message.get("name") or "",
    }
    try:
        return msgspec.convert(told, Message)
    except msgspec.ValidationError as error:
        raise RefusedRequest("messages", f"{error}", 'a message is {"role": ..., "content": text}') from None


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function", tool)
    try:
        return msgspec.convert({key: function[key] for key in function if key in Tool.__struct_fields__}, Tool)
    except msgspec.ValidationError as error:
        raise RefusedRequest("tools", f"{error}", "a tool has a name, a description and parameters") from None
