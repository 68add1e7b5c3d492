"""Parsing and writing tool calls in the syntax of model families, and splitting off reasoning.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes, ChatML
    llama     {"name": "add", "parameters": {"a": 1}}; {...}                     Llama 3, with or without <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]               and [TOOL_CALLS]add[ARGS]{"a": 1}

If one call of a message is malformed, the whole message is text. Arguments keep every byte that the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from stretto.core.engine import json_rule
from stretto.core.errors import UNREADABLE
from stretto_verify.thoughts import MARKS, with_opening
from stretto_workflows.chat.messages import Tool, ToolCall

NameCall = Callable[[int], str]
"""Returns the id for a call, by its number in the message (from 0)."""

_CALL, _CALLED = "<tool_call>", "</tool_call>"
_BETWEEN = re.compile(r"[; \n]*")
_MISTRAL, _ARGUMENTS, _PYTHON = "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"
MOST_CALLS = 16  #: most calls in one message that is sampled with a grammar


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class Parsed:
    """A parsed message: its calls, and the text around them, "" if that is blank. Without `calls`, `text` is the whole
    message."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class CallForm(Protocol):
    """Syntax of tool calls in one family of models: parses, writes and (by a grammar) enforces them (Protocol)."""

    def parse(self, text: str, name: NameCall) -> Parsed:
        """Parse the calls in a message. Without calls, or with a malformed one, the whole message is text. `name`:
        returns the id for a call, by its number from 0."""

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as the model would."""

    def rules(self, tools: Sequence[Tool], word: Callable[[str], str], *, parallel: bool) -> str:
        """Write rules of a grammar (for `Sampling.grammar`), of which ``calls`` admits only calls of these tools.

        Args:
            word: returns the grammar for a text: a single token, if the text is one token of the vocabulary.
            parallel: admit up to `MOST_CALLS` calls; otherwise exactly one.

        Raises:
            RefusedRequest: a tool's schema cannot be expressed.
        """


class HermesForm:
    """Tool calls of Qwen 2.5 and 3, Hermes, and other ChatML models (satisfies `CallForm`)."""

    def parse(self, text: str, name: NameCall) -> Parsed:
        written, around, at = list[str](), list[str](), 0
        while (begin := text.find(_CALL, at)) >= 0:
            around.append(text[at:begin])
            begin += len(_CALL)
            end = _end_of_object(text, begin, _CALLED)
            if end < 0:  # then the whole message is text, and the search for ends takes linear time
                return Parsed(text)
            written.append(text[begin:end])
            at = end + len(_CALLED)
        outside = "".join((*around, text[at:]))
        return Parsed(text) if "tool_call>" in outside else _parsed(text, outside, written, name)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)

    def rules(self, tools: Sequence[Tool], word: Callable[[str], str], *, parallel: bool) -> str:
        call = f'call: {word(_CALL)} "\\n" tool "\\n" {word(_CALLED)}'
        calls = _several("call", "\n", parallel)
        return f"calls: {calls}\n{call}\n{_tool_rules(tools, 'arguments')}"


class LlamaForm:
    """Tool calls of Llama 3.1 and later: the whole message consists of calls (satisfies `CallForm`)."""

    def parse(self, text: str, name: NameCall) -> Parsed:
        body = text.strip().removeprefix(_PYTHON).strip()
        return _parsed(text, "", _objects(body) if body.startswith("{") else (), name)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_object(call, "parameters") for call in calls)

    def rules(self, tools: Sequence[Tool], word: Callable[[str], str], *, parallel: bool) -> str:
        return f"calls: {_several('tool', '; ', parallel)}\n{_tool_rules(tools, 'parameters')}"


class MistralForm:
    """Tool calls of Mistral: after a control token (satisfies `CallForm`)."""

    def parse(self, text: str, name: NameCall) -> Parsed:
        outside, marked, body = text.partition(_MISTRAL)
        if not marked:
            return Parsed(text)
        written = [*_listed(body)] if body.lstrip().startswith("[") else []
        if not written:
            named = [*_named(body)]
            if not all(_is_object(arguments) for _, arguments in named):  # `}, "name": "other"` would rename it
                return Parsed(text)
            written = [f'{{"name": {json.dumps(tool.strip())}, "arguments": {arguments}}}' for tool, arguments in named]
        return _parsed(text, outside, written, name)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{_MISTRAL}[{', '.join(_object(call, 'arguments') for call in calls)}]"

    def rules(self, tools: Sequence[Tool], word: Callable[[str], str], *, parallel: bool) -> str:
        listed = f'{word(_MISTRAL)} "[" {_several("tool", ", ", parallel)} "]"'
        return f"calls: {listed}\n{_tool_rules(tools, 'arguments')}"


def form_of(chat_template: str) -> CallForm:
    """Return the syntax of tool calls that the source of a chat template renders; Hermes' if it renders none."""
    if _MISTRAL in chat_template:
        return MistralForm()
    if "<tool_call>" not in chat_template and (_PYTHON in chat_template or '"parameters": ' in chat_template):
        return LlamaForm()
    return HermesForm()


def split_reasoning(text: str, opens: str = "") -> tuple[str, str]:
    """Split a message into (reasoning, rest), without marks and the newlines beside them. If reasoning has begun and
    has no end mark, all text is reasoning. All text before an end mark is reasoning, also without a mark that begins
    it. `opens`: mark of reasoning with which the prompt ends; "": none.

    >>> split_reasoning("<think>small</think>3"), split_reasoning("small", "<think>")
    (('small', '3'), ('small', ''))
    """
    text = with_opening(text, opens)
    own = [(begin, end) for begin, end in MARKS if text.startswith(begin) and end in text]
    for begin, end in own or MARKS:  # the rest may speak of other marks
        before, ended, behind = text.partition(end)
        if ended or text.startswith(begin):
            return before.removeprefix(begin).strip("\n"), behind.lstrip("\n")
    return "", text


def knows_reasoning(chat_template: str) -> bool:
    """Whether a chat template renders the reasoning of a message."""
    return any(end in chat_template for _, end in MARKS)


def instructions(tools: Sequence[Tool]) -> str:
    """Describe tools in a text for the system message, in the words of Qwen's and Hermes' templates. For models whose
    template has no tools."""
    listed = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )


def result(text: str) -> str:
    """Wrap the result of a tool in ``<tool_response>`` tags, for a model whose template has no tools."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _parsed(text: str, outside: str, written: Iterable[str], name: NameCall) -> Parsed:
    """Parse the calls of a message `text`, each `written` as a JSON object. `outside`: the text around them. Without
    calls, or with a malformed one, the whole message is text. `name`: returns the id for a call."""
    found = []
    for number, one in enumerate(written):
        try:
            call = msgspec.json.decode(one, type=_Written)
            arguments = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
        except (UnicodeError, *UNREADABLE):
            return Parsed(text)
        if not call.name or not _is_object(arguments):
            return Parsed(text)
        found.append(ToolCall(name(number), call.name, arguments))
    return Parsed("" if outside.isspace() else outside, tuple(found)) if found else Parsed(text)


def _is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (UnicodeError, *UNREADABLE):
        return False
    return True


def _end_of_object(text: str, begin: int, mark: str) -> int:
    """Position of the `mark` behind the JSON object that is written from `begin` on; -1 if there is none. Texts in the
    object may contain the mark."""
    end = text.find(mark, begin)
    if end < 0 or _is_object(text[begin:end]):
        return end
    try:
        _, behind = json.JSONDecoder().raw_decode(text, end - len(text[begin:end].lstrip()))
    except (ValueError, RecursionError):
        return -1
    end = text.find(mark, behind)
    return -1 if text[behind:end].strip() else end


def _object(call: ToolCall, field: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{field}": {call.arguments}}}'


def _several(rule: str, between: str, parallel: bool) -> str:
    """Write a grammar expression for one `rule`; if `parallel`, for 1 to `MOST_CALLS` with `between` between them."""
    return f"{rule} ({json.dumps(between)} {rule}){{0,{MOST_CALLS - 1}}}" if parallel else rule


def _tool_rules(tools: Sequence[Tool], field: str) -> str:
    """Write grammar rules for ``tool``: a call of one of these tools, as JSON. `field`: key of the arguments."""
    lines = ["tool: " + " | ".join(f"tool_{at}" for at in range(len(tools)))]
    for at, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{field}": '
        arguments = json_rule({**tool.parameters, "type": "object"})
        lines += [f'tool_{at}: {json.dumps(opening)} arguments_{at} "}}"', f"arguments_{at}: {arguments}"]
    return "\n".join(lines)


def _objects(text: str) -> Iterator[str]:
    """Yield the JSON objects in a text, which are separated by semicolons; if one is malformed, the rest of the text
    last."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield text[at:]
            return
        yield text[at:end]
        between = _BETWEEN.match(text, end)
        at = between.end() if between else end
        if at == end < len(text):
            yield text[at:]
            return


def _named(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and arguments of each call in a text like ``add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}``; of a
    malformed last one, the rest of the text stands for its arguments."""
    at = 0
    while True:
        called = text.find(_ARGUMENTS, at)
        tool, begin = text[at:called], called + len(_ARGUMENTS)
        if called < 0 or _MISTRAL in tool:
            yield tool, ""
            return
        end = _end_of_object(text, begin, _MISTRAL)
        if end < 0:
            yield tool, text[begin:]
            return
        yield tool, text[begin:end]
        at = end + len(_MISTRAL)


def _listed(text: str) -> Iterator[str]:
    """Yield the items of a JSON array as they are written; the text itself if it is no array."""
    try:
        yield from (bytes(raw).decode() for raw in msgspec.json.decode(text, type=list[msgspec.Raw]))
    except (UnicodeError, *UNREADABLE):
        yield text
