"""Making the next prompt of a session: the tokens of the conversation so far, followed by the rendered new messages.

    request  system  user   assistant  tool          messages of a client
    known    system  user   assistant                the longest history of a completed turn that the request continues
    prompt   [ known tokens, as sampled ][ new tail ]

Sampled text is never encoded again. The history of a request is compared with the histories of completed turns, message
by message. If the messages are equal, or equal with the arguments of tool calls compared as JSON, the prompt continues
the known tokens. Otherwise a branch begins: the messages after the last known ones are rendered anew. Each branch has a
cause:

    again               the same messages once more
    fork                other messages after an earlier reply
    reasoning_stripped  a reply came back without its reasoning
    arguments           the arguments of a call came back with another meaning
    history_rewritten   an earlier message came back changed
    compaction          a long history was replaced by a shorter one
    subagent            a conversation with other instructions
    tools_changed       the same messages with other tools
    ambiguous           two replies have this text in different tokens: unknown which one the client means
    drift               the template cannot continue the known tokens with the new messages

The tail is rendered by the model's own chat template, after a placeholder for the known reply. The bridge uses it only
if the template renders the placeholder in the same way with and without the tail, and if the tokens of the tail spell
its text exactly.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from stretto.core.errors import DataError
from stretto.core.forest import Tokens
from stretto.engine.text import Detokenizer
from stretto_workflows.chat.messages import Match, Message, Tool, compare, shared
from stretto_workflows.chat.tool_calls import form_of, instructions, result

History = tuple[Message, ...]


class ChatTemplate(Detokenizer, Protocol):
    """Interface of a tokenizer with a chat template (implemented by `model.hf.tokenizer.Tokenizer`)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""

    @property
    def chat_template(self) -> str:
        """Source of the template; empty if there is none."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, opening: bool, **arguments: Any) -> str:
        """Render a conversation to a text for `encode_rendered`. Texts of the messages never become special tokens.

        `messages`: dicts as the template reads them. `opening`: add the beginning of an assistant's reply.
        `arguments`: of the chat template.

        Raises:
            DataError: the template refuses the messages.
        """

    def encode_rendered(self, text: str) -> Tokens:
        """Encode a text from `render_chat`, or a part of it.

        Raises:
            DataError: the text holds characters that the tokenizer does not know.
        """

    def read_rendered(self, text: str) -> str:
        """Return a text from `render_chat` without the marks by which `encode_rendered` recognises texts of
        messages."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id."""

    def encode(self, text: str, /) -> Tokens:
        """Encode a plain text.

        Raises:
            DataError: the text holds characters that the tokenizer does not know.
        """

    def spell(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, with special tokens."""


@dataclass(frozen=True)
class NextPrompt:
    """The prompt of a turn.

    Attributes:
        tokens: token ids of the whole prompt.
        cause: why a branch begins with this prompt (listed at the top of the module); "": none begins.
        history: the messages of the request; earlier replies are replaced by their sampled form.
        tools: the tools of the request.
        behind: completed turn that the prompt continues; None: it continues none.
        match: how well the history of the request matched that of `behind`.
    """

    tokens: Tokens
    cause: str
    history: History
    tools: tuple[Tool, ...]
    behind: CompletedTurn | None = None
    match: Match = Match.EQUAL


@dataclass(frozen=True)
class CompletedTurn:
    """A turn with its reply, the last message of `history`, which later prompts can continue. `tokens`: of the whole
    history, up to the last sampled token. `live`: False for a turn of an earlier process that no client has requested
    again; a request that differs from such a turn begins no branch."""

    id: str
    history: History
    tools: tuple[Tool, ...]
    tokens: Tokens
    live: bool = True


class Bridge:
    """Makes the prompts of one session from its completed turns.

    Example::

        bridge = Bridge(Renderer(tokenizer))
        history = (Message("user", "1+2?"),)
        prompt = bridge.next(history, tools)
        bridge.begin(history, prompt)
        turn = await session.turn(prompt.tokens, sampling, prompt.cause)
        tokens = prompt.tokens + turn.segment.token_ids
        bridge.add(CompletedTurn("0", (*prompt.history, reply), tools, tokens))
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[CompletedTurn] = []  # the longest first
        self._started: dict[tuple[History, bytes], NextPrompt] = {}

    def next(self, history: History, tools: tuple[Tool, ...], renderer: Renderer | None = None) -> NextPrompt:
        """Make the prompt for the reply to `history`, the messages of a request with these `tools`: the tokens of the
        longest completed turn that it continues, with the new messages behind, or else the whole history encoded. The
        bridge does not change; `begin` and `add` tell it what becomes of the prompt. `renderer`: None: the bridge's.

        Raises:
            DataError: the template refuses the messages, or the tokenizer does not know a character.
        """
        if (known := self._started.get((history, msgspec.json.encode(tools)))) is not None:
            return dataclasses.replace(known, cause="again")
        renderer = renderer or self._renderer
        longest, ambiguous = self._longest(history, tools)
        cause, tail, how = self._cause(history, tools, longest), None, Match.EQUAL
        if ambiguous:
            longest, cause = None, "ambiguous"
        if longest is not None:
            new, how = history[len(longest.history) :], _worst(longest.history, history)
            tail = renderer.tail(longest.history[-1], longest.tokens, new, tools)
            cause = cause or ("drift" if tail is None else "")
            history = (*longest.history, *new)
        tokens = renderer.whole(history, tools) if longest is None or tail is None else longest.tokens + tail
        return NextPrompt(tokens, cause, history, tools, longest, how)

    def begin(self, history: History, prompt: NextPrompt) -> None:
        """Keep `prompt`, made from `history`, as that of a turn that begins, unless one is kept for these messages and
        tools. A later request with the same messages and tools gets the kept prompt, with the cause ``again``."""
        self._started.setdefault((history, msgspec.json.encode(prompt.tools)), prompt)

    def add(self, turn: CompletedTurn) -> None:
        """Add a completed turn, so that later prompts may continue it; it replaces one with the same id."""
        others = [known for known in self._turns if known.id != turn.id]
        self._turns = sorted((*others, turn), key=lambda known: -len(known.history))

    def turn(self, id: str) -> CompletedTurn | None:
        """Return the completed turn with this id, or None."""
        return next((known for known in self._turns if known.id == id), None)

    def _longest(self, history: History, tools: tuple[Tool, ...]) -> tuple[CompletedTurn | None, bool]:
        """Find the completed turn with the most messages that `history` continues, with the same tools, a live one if
        any; None if there is none. Also returns whether other turns have the same messages in other tokens."""
        found: list[CompletedTurn] = []
        for turn in self._turns:
            size = len(turn.history)
            if found and size < len(found[0].history):
                break
            if size < len(history) and turn.tools == tools and shared(turn.history, history) == size:
                found.append(turn)
        known = [turn for turn in found if turn.live] or found
        return (known[0] if known else None), len({turn.tokens for turn in known}) > 1

    def _cause(self, history: History, tools: tuple[Tool, ...], found: CompletedTurn | None) -> str:
        """Return the cause of the branch that `history` begins: "tools_changed", "fork" (another turn goes on from
        `found` too), or that of `_difference`; "" if none begins. `found`: the completed turn that it continues; None:
        none."""
        size = 0 if found is None else len(found.history)
        longer = [turn for turn in self._turns if turn.live and len(turn.history) > size]
        if not longer:
            return ""
        nearest = max(longer, key=lambda turn: shared(turn.history, history))
        at = shared(nearest.history, history)
        if at < size:
            return ""  # the longer turns belong to another conversation
        if nearest.tools != tools and at == min(len(nearest.history), len(history)):
            return "tools_changed"
        if at == size > 0 and (at == len(history) or history[at].role != "assistant"):
            return "fork"
        return _difference(nearest.history, history, at)


class Renderer:
    """Renders conversations by a chat template. Tools are described in the system message if the template does not read
    `tools`."""

    def __init__(self, template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> None:
        """`template`: tokenizer with a chat template. `arguments`: of the template; None: none."""
        self._template, self._arguments = template, arguments or {}
        self._form = form_of(template.chat_template)
        self._knows_tools = "tools" in template.chat_template

    def whole(self, history: Sequence[Message], tools: Sequence[Tool]) -> Tokens:
        """Render and encode a whole conversation, with the tokens that open the next reply. Tools of which the template
        knows nothing are described in the system message.

        Raises:
            DataError: the template refuses the messages, or the tokenizer does not know a character.
        """
        written = self._written(history)
        if tools and not self._knows_tools:
            system = written.pop(0)["content"] + "\n\n" if written and written[0]["role"] == "system" else ""
            written.insert(0, {"role": "system", "content": system + instructions(tools)})
        return self._template.encode_rendered(self._render(written, tools, opening=True))

    def tail(self, reply: Message, known: Tokens, new: Sequence[Message], tools: Sequence[Tool]) -> Tokens | None:
        """Render and encode the messages that follow a known reply.

        Args:
            reply: the known reply.
            known: tokens of the conversation up to the reply's last sampled token.
            new: messages after the reply.
            tools: offered in the request.

        Returns:
            Tokens to append to `known`, with those that open the next reply; None if the template refuses the messages,
            or might not continue the known tokens in this way.

        Raises:
            DataError: the tokenizer does not know a character of `new`.
        """
        mark = f"(the known reply, {secrets.token_hex(8)})"  # random, so that no message has it
        marked = msgspec.structs.replace(reply, text=mark, reasoning="")
        dummy = [Message("user", "?"), marked]
        try:
            alone = self._render(self._written(dummy), tools, opening=False)
            both = self._render(self._written([*dummy, *new]), tools, opening=True)
        except DataError:
            return None
        (_, found, alone), (_, again, both) = alone.rpartition(mark), both.rpartition(mark)
        closing = self._closing(alone, known)
        if not (found and again and both.startswith(alone)) or closing is None:
            return None
        text = closing + both[len(alone) :]
        tokens = self._template.encode_rendered(text)
        return tokens if self._template.spell(tokens) == self._template.read_rendered(text) else None

    def _closing(self, behind: str, known: Tokens) -> str | None:
        """Return the template's text between the last known token and the next message; None if it is not known.
        `behind`: text of the template after a reply."""
        ends = [self._template.spell((end,)) for end in self._template.eos_token_ids]
        if known and known[-1] in self._template.eos_token_ids:
            end = self._template.spell(known[-1:])
            return behind.rpartition(end)[2] if end in behind else None
        places = [behind.rfind(end) for end in ends if end in behind]
        return behind[max(places) :] if places else None

    def _render(self, written: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, opening: bool) -> str:
        offered = {"tools": [tool.function for tool in tools]} if tools and self._knows_tools else {}
        return self._template.render_chat(written, opening=opening, **{**self._arguments, **offered})

    def _written(self, history: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert messages to dicts for the template; if it has no tools, calls become text, and results, joined, user
        messages."""
        if self._knows_tools:
            return [_native(message) for message in history]
        written: list[dict[str, Any]] = []
        for place, message in enumerate(history):
            text = message.text
            if message.calls:
                text += ("\n" if text else "") + self._form.render(message.calls)
            if message.role == "tool":
                text = result(text)
            if message.role == "tool" and place and history[place - 1].role == "tool":
                written[-1]["content"] += "\n" + text
            else:
                written.append({"role": "user" if message.role == "tool" else message.role, "content": text})
        return written


def _native(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name:
        written["name"] = message.name
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.call_id:
        written["tool_call_id"] = message.call_id
    if message.calls:
        written["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _read(call.arguments)}}
            for call in message.calls
        ]
    return written


def _read(arguments: str) -> Any:
    """The parsed arguments of a call; their text if it is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _worst(known: History, history: History) -> Match:
    """The worst match of two histories, compared message by message. No pair of messages may be DIFFERENT."""
    matches = {compare(*pair) for pair in zip(known, history, strict=False)}
    return Match.EQUAL_AS_JSON if Match.EQUAL_AS_JSON in matches else Match.EQUAL


def _difference(known: History, history: History, at: int) -> str:
    """Return the cause of a branch whose history first differs from a known one at message `at`: "compaction" (shorter,
    or begun anew after several replies), "subagent", "reasoning_stripped", "arguments" (of calls) or
    "history_rewritten"."""
    if at == len(history) or not any(message.role != "system" for message in known[:at]):
        replies = sum(message.role == "assistant" for message in known)
        return "compaction" if at and replies > 1 and len(history) < len(known) else "subagent"
    one, other = known[at], history[at]
    if one.role == other.role == "assistant":
        if compare(msgspec.structs.replace(one, reasoning=""), other) is not Match.DIFFERENT:
            return "reasoning_stripped"
        return "arguments" if _without_arguments(one) == _without_arguments(other) else "history_rewritten"
    return "compaction" if len(history) < len(known) else "history_rewritten"


def _without_arguments(message: Message) -> Message:
    calls = tuple(msgspec.structs.replace(call, arguments="") for call in message.calls)
    return msgspec.structs.replace(message, calls=calls)
