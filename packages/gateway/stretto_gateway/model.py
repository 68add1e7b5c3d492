"""The served model: converts messages to tokens, and sampled tokens to messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeVar

import msgspec

from stretto.core.errors import DataError, ModelFolderError, RefusedRequest
from stretto.core.forest import Tokens
from stretto.core.records import Likeliest, Segment, StopReason
from stretto.engine.text import StopFinder
from stretto.launch.recipe.extensions import GatewayConfig
from stretto_gateway.requests import SamplingRule
from stretto_verify.thoughts import opened
from stretto_workflows.chat.bridge import ChatTemplate, Renderer
from stretto_workflows.chat.messages import ChatRequest, Message, SampledToken, SampledTurn, Tool
from stretto_workflows.chat.tool_calls import form_of, knows_reasoning, split_reasoning

_NAMES = 65_536  # size of the cache for texts of single tokens
_LONG_TEXT = 20_000  # characters; encoding more takes milliseconds, and releases the GIL
_SHOWN = 400  # characters of a reason
_CALL_ID = 9  # characters of the id of a call, as Mistral's templates want
_LAST = 64  # last tokens of a prompt, in which the opening mark of a thought is looked for
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class ServedModel:
    """Name, tokenizer, sampling rule and settings of the model that a server offers.

    Attributes:
        reasoning: whether thoughts are split from the text of a reply, if the chat template has marks for them.
    """

    name: str
    template: ChatTemplate
    rule: SamplingRule
    config: GatewayConfig = field(default_factory=GatewayConfig)
    reasoning: bool = True

    @cached_property
    def renderer(self) -> Renderer:
        """Renderer that converts conversations to tokens."""
        return Renderer(self.template)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token of the vocabulary."""
        return max(map(len, self.template.vocabulary))

    @cached_property
    def spell(self) -> Callable[[int], str]:
        """Function that returns the text of a token id; it caches texts."""
        return lru_cache(maxsize=_NAMES)(lambda token: self.template.spell((token,)))

    async def encoded(self, characters: int, encode: Callable[[], Encoded]) -> Encoded:
        """Return the result of `encode`, which encodes a prompt of this many `characters`. A long prompt is encoded in
        a thread.

        Raises:
            RefusedRequest: the tokenizer or the chat template refuses the prompt.
        """
        try:
            return await asyncio.to_thread(encode) if characters > _LONG_TEXT else encode()
        except (ModelFolderError, DataError) as error:  # its place is left out, because it is a folder of the server
            found, remedy = (text[:_SHOWN] for text in (error.problems[0].found, error.problems[0].remedy))
            raise RefusedRequest("prompt_token_ids", found, remedy or "see the chat template") from None

    def tokens(self, segment: Segment, top_logprobs: Sequence[Likeliest] = ()) -> list[SampledToken]:
        """Convert a segment to tokens with their texts and log-probabilities. `top_logprobs`: likeliest tokens at each
        position; empty for none."""
        ranks = top_logprobs or [()] * segment.length
        return [
            SampledToken(self.spell(token), logprob, tuple((self.spell(other), number) for other, number in likeliest))
            for token, logprob, likeliest in zip(segment.token_ids, segment.behavior_logprobs, ranks, strict=True)
        ]

    def turn(
        self,
        request: ChatRequest,
        segment: Segment,
        *,
        id: str,
        created: int,
        prompt: Tokens,
        call_id: Callable[[int], str],
        top_logprobs: Sequence[Likeliest] = (),
    ) -> SampledTurn:
        """Convert a completion to a turn, whose message ends before a stop text, with reasoning and tool calls parsed.
        The result depends only on the arguments, so that a replay gives the same.

        Args:
            segment: the completion, which has ended (`stop_reason`).
            id, created: id and Unix time (seconds) of the turn.
            prompt: tokens of the prompt.
            call_id: called with 0, 1, ... for the calls in the message; returns a text whose first nine characters
                become the id of the call. It must consist of letters and digits.
            top_logprobs: likeliest tokens at each position; empty for none.
        """
        ids, stops = segment.token_ids, request.options.stop
        if ids and segment.stop_reason is StopReason.STOP and ids[-1] in self.template.eos_token_ids:
            ids = ids[:-1]
        text, stop = _before_stop(self.template.spell(ids), stops)
        message = self._message(request, text, opened(self.template.spell(prompt[-_LAST:])), call_id)
        if not message.calls and not message.reasoning:
            text, stop = _before_stop(self.template.decode(ids), stops)
            message = Message("assistant", text)
        assert segment.stop_reason is not None
        return SampledTurn(
            id=id,
            created=created,
            model=self.name,
            message=message,
            stop_reason=segment.stop_reason,
            stop=stop,
            prompt_tokens=len(prompt),
            sampled_tokens=segment.length,
            tokens=() if request.options.logprobs is None else tuple(self.tokens(segment, top_logprobs)),
        )

    def _message(self, request: ChatRequest, text: str, opens: str, call_id: Callable[[int], str]) -> Message:
        splits = self.reasoning and (opens or knows_reasoning(self.template.chat_template))
        reasoning, rest = split_reasoning(text, opens) if splits else ("", text)
        if not request.tools or request.options.tool_choice == "none":
            return Message("assistant", rest, reasoning)
        parsed = form_of(self.template.chat_template).parse(rest, lambda number: call_id(number)[:_CALL_ID])
        return Message("assistant", parsed.text, reasoning, parsed.calls)


def characters_of(messages: Sequence[Message], tools: Sequence[Tool]) -> int:
    """Number of characters of messages, their reasoning and calls included, and of tools as JSON: an estimate of the
    length of their prompt."""
    calls = sum(len(call.name) + len(call.arguments) for message in messages for call in message.calls)
    texts = sum(len(message.text) + len(message.reasoning) for message in messages)
    return texts + calls + len(msgspec.json.encode(tools).decode())


def _before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Split a text at the first stop text; returns the text before it, and the stop text ("" if there is none)."""
    finder = StopFinder(stops)
    return finder.push(text) + finder.end(), finder.found
