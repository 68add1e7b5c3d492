"""From the tokens of a turn to the message that a client reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Protocol

from stretto_verify.thoughts import opened

from stretto.conversation.bridge import ChatTemplate
from stretto.conversation.forest import Tokens
from stretto.conversation.messages import AskedTurn, Message, SaidTurn, SampledToken
from stretto.conversation.session import Turn
from stretto.conversation.tool_calls import form_of, knows_reasoning, split_reasoning
from stretto.core.records import StopReason

_CALL_ID = 9  # letters and digits: what Mistral's templates want
_LAST = 64  # tokens of a prompt among which the mark of a thought may be


class SpeakingTemplate(ChatTemplate, Protocol):
    """A tokenizer that also reads back."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Its tokens as text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...


@dataclass(frozen=True)
class Teller:
    """Makes messages of completions, for one model."""

    model: str
    template: SpeakingTemplate

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one token can stand for."""
        return max(map(len, self.template.vocabulary))

    def said(self, asked: AskedTurn, turn: Turn, prompt: Tokens, session: str, created: int) -> SaidTurn:
        """What the model said in a turn; a function of its arguments, so that a replay says it again."""
        segment = turn.segment
        ids = segment.token_ids
        if ids and segment.stop_reason is StopReason.STOP and ids[-1] in self.template.eos_token_ids:
            ids = ids[:-1]
        text, stop = _cut(self.template.spell(ids), asked.wanted.stop)
        name = partial(_named, session, turn.node)
        message = self._message(asked, text, opened(self.template.spell(prompt[-_LAST:])), name)
        if not message.calls and not message.reasoning:
            message = Message("assistant", _cut(self.template.decode(ids), asked.wanted.stop)[0])
        assert segment.stop_reason is not None
        return SaidTurn(
            id=_named(session, turn.node),
            created=created,
            model=self.model,
            message=message,
            stop_reason=segment.stop_reason,
            stop=stop,
            prompt_tokens=len(prompt),
            sampled_tokens=len(segment.token_ids),
            tokens=()
            if asked.wanted.logprobs is None
            else tuple(
                SampledToken(self.template.spell((token,)), logprob)
                for token, logprob in zip(segment.token_ids, segment.behavior_logprobs, strict=True)
            ),
        )

    def _message(self, asked: AskedTurn, text: str, opens: str, name: Callable[[int], str]) -> Message:
        """With its reasoning and its calls, as far as the model and the request know such."""
        has_reasoning = opens or knows_reasoning(self.template.chat_template)
        reasoning, rest = split_reasoning(text, opens) if has_reasoning else ("", text)
        if not asked.tools or asked.wanted.tool_choice == "none":
            return Message("assistant", rest, reasoning)
        form = form_of(self.template.chat_template)
        parsed = form.parse(rest, name)
        return Message("assistant", parsed.text, reasoning, parsed.calls)


def _named(session: str, node: int, call: int | None = None) -> str:
    """An id that a replay makes again: of a turn, or of a call in it."""
    name = blake2b(f"{session}\0{node}\0{call}".encode(), digest_size=12).hexdigest()
    return name if call is None else name[:_CALL_ID]


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop text, and that stop text; a text without one is whole."""
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)[0]], min(places)[1]) if places else (text, "")
