"""Conversion of messages to prompt tokens, and of completions to messages. Tokens of earlier turns are reused
unchanged; only new messages are encoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.core.errors import RefusedRequest
from stretto.core.forest import Tokens
from stretto_workflows.chat.bridge import ChatTemplate, Renderer
from stretto_workflows.chat.messages import Message, Tool, ToolCall
from stretto_workflows.chat.tool_calls import HermesForm, Parsed, form_of, split_reasoning
from stretto_workflows.task import ChatMessage

#: Tools of a turn, as in Chat Completions.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PlainRendering:
    """Rendering for a model without a chat template: contents of the messages, concatenated. The model sees neither
    their roles and tool calls, nor the `tools` of a turn. Its own tool calls are parsed nevertheless, if a turn has
    tools.

    Attributes:
        encode: encodes text that continues a sequence, to token ids.
    """

    encode: Callable[[str], Tokens]

    def prompt(
        self, messages: Sequence[ChatMessage], known: int, held: Tokens, tools: Tools, told: Tools = ()
    ) -> tuple[Tokens, str, Tools]:
        """Whole prompt of the next turn, after all `messages`, the cause of a branch, and the tools that the prompt
        describes: always "" and none here. `TemplateRendering` gives "drift" if its chat template cannot continue
        `held` with the messages after it, and "tools_changed" if a reply was sampled without these tools.
        `held`: tokens of the first `known` messages, as sampled; empty if none are known. `tools`: of the turn.
        `told`: tools that `held` describes.

        Raises:
            RefusedRequest: a message or a tool is invalid.
            DataError: the chat template refuses the messages, or the tokenizer cannot encode a character.
        """
        return held + self.encode("".join(_read(message).text for message in messages[known:])), "", ()

    def message(self, said: Tokens, text: str, tools: Tools, opens: str = "") -> dict[str, Any]:
        """Convert a completion to a chat message of the assistant. With `tools`, its tool calls are parsed, in the
        format of Hermes; without, all of it is text. `said`: the completion's tokens. `text`: its text without special
        tokens. `opens`: opening mark of the thought that the prompt opens, "" if it opens none."""
        return _told(text, HermesForm().parse(text, _name) if tools else None)


class TemplateRendering:
    """Rendering by the chat template of the model's tokenizer; thoughts and tool calls are parsed in its format. The
    methods are those of `PlainRendering`."""

    def __init__(self, template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> None:
        """`template`: tokenizer with a chat template. `arguments`: of the template; None: none."""
        self._template, self._renderer = template, Renderer(template, arguments)
        self._form = form_of(template.chat_template)

    def given(self, arguments: Mapping[str, Any]) -> TemplateRendering:
        """Return the rendering with these arguments of the template."""
        return TemplateRendering(self._template, arguments)

    def prompt(
        self, messages: Sequence[ChatMessage], known: int, held: Tokens, tools: Tools, told: Tools = ()
    ) -> tuple[Tokens, str, Tools]:
        replied = bool(held) and messages[known - 1].get("role") == "assistant"
        changed = bool(tools) and tools != told
        if held and known == len(messages) and (replied or not changed):  # a reply that goes on stays as it was begun
            return held, "", told
        history, offered = [_read(message) for message in messages], [_tool(tool) for tool in tools]
        if not replied or changed:
            return self._renderer.whole(history, offered), "tools_changed" if replied else "", tools
        tail = self._renderer.tail(history[known - 1], held, history[known:], offered)
        return (self._renderer.whole(history, offered), "drift", tools) if tail is None else (held + tail, "", told)

    def message(self, said: Tokens, text: str, tools: Tools, opens: str = "") -> dict[str, Any]:
        reasoning, rest = split_reasoning(text, opens)
        parsed = None
        if tools:  # some calls begin with a special token
            ends = self._template.eos_token_ids
            spelt = self._template.spell(said[:-1] if said and said[-1] in ends else said)
            parsed = self._form.parse(split_reasoning(spelt, opens)[1], _name)
        told = _told(rest, parsed if parsed is not None and parsed.calls else None)
        return told | ({"reasoning_content": reasoning} if reasoning else {})


#: Converts messages to tokens and completions to messages, for one model.
Rendering = PlainRendering | TemplateRendering


def _name(number: int) -> str:
    return f"call_{number:05}"


def _told(text: str, parsed: Parsed | None) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": text if parsed is None else parsed.text}
    if parsed is not None and parsed.calls:
        told["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.calls
        ]
    return told


def _read(message: ChatMessage) -> Message:
    calls = [
        ToolCall(str(call.get("id") or ""), str(call["function"]["name"]), _arguments(call["function"]["arguments"]))
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


def _arguments(given: object) -> str:
    """Arguments of a call as JSON text. Chat templates take an object in its place, and so do messages here."""
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function", tool)
    try:
        return msgspec.convert({key: function[key] for key in function if key in Tool.__struct_fields__}, Tool)
    except msgspec.ValidationError as error:
        raise RefusedRequest("tools", f"{error}", "a tool has a name, a description and parameters") from None
