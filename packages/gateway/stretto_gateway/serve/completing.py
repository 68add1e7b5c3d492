"""Completions of one HTTP request in progress."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from stretto.conversation.messages import ChatRequest, SampledTurn
from stretto.core.engine import Progress
from stretto.core.records import GenerateRequest
from stretto_gateway.app import ChatExchange, date_of_reply
from stretto_gateway.dialects.openai import ChoiceDialect, Part, usage_of
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import Request

_CALL_ID = 9  # letters and digits, as Mistral's templates want
Stream = AsyncIterator[list[Progress]]


@dataclass
class Completing:
    """Completions of one HTTP request while the engine samples them.

    Attributes:
        request: the client's request.
        prompts: requests to the engine, one per prompt.
        name: id of the reply, without a prefix.
        sampled: number of tokens so far.
        first_token, last_token: seconds until the first one, and until all completions have ended.
    """

    request: Request
    prompts: Sequence[GenerateRequest]
    name: str
    model: ServedModel
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=date_of_reply)
    sampled: int = 0
    first_token: float | None = None
    last_token: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.prompt_token_ids) for prompt in self.prompts)

    async def turns(self, stream: Stream) -> list[SampledTurn]:
        """Completions as messages, once all have ended."""
        assert isinstance(self.request, ChatRequest)
        found = {progress.member: progress async for new in self._counted(stream) for progress in new}
        return [
            self.model.turn(
                self.request,
                progress.segment,
                id=self.name,
                created=self.created,
                prompt=self.prompts[0].prompt_token_ids,
                call_id=lambda number: secrets.token_hex(_CALL_ID)[:_CALL_ID],
                top_logprobs=progress.top_logprobs,
            )
            for _, progress in sorted(found.items())
        ]

    async def write(self, dialect: ChoiceDialect, call: ChatExchange, stream: Stream) -> None:
        """Send the choices of a reply, streamed or whole."""
        request, streamed, whole = self.request, self.request.stream, list[Part]()
        members = [(prompt.id, member) for prompt in self.prompts for member in range(len(prompt.seeds))]
        writers = {member: dialect.writer(request, index, self.model) for index, member in enumerate(members)}
        head = dialect.head(request, self.name, self.created, self.model.name, whole=not streamed)
        if streamed:
            opening = [part for index in range(len(members)) for part in dialect.opening(index)]
            await call.write(self._events(dialect, head, opening))
        async for new in self._counted(stream):
            parts = [part for progress in new for part in writers[progress.request, progress.member](progress)]
            if not streamed:
                whole += parts
            elif parts:
                await call.write(self._events(dialect, head, parts))
        usage = usage_of(self.prompt_tokens, self.sampled)
        if streamed:
            await call.write(dialect.closing(request, head, usage), last=True)
        else:
            whole.sort(key=itemgetter("index"))
            await call.reply(msgspec.json.encode({**head, "choices": whole, "usage": usage}))

    def _events(self, dialect: ChoiceDialect, head: Mapping[str, Any], parts: Sequence[Part]) -> bytes:
        return b"".join(dialect.event(self.request, head, [part]) for part in parts)

    async def _counted(self, stream: Stream) -> Stream:
        async for new in stream:
            self.sampled += sum(progress.segment.length for progress in new)
            self.first_token = self.first_token or time.monotonic() - self.began
            yield new
        self.last_token = time.monotonic() - self.began
