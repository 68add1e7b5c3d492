"""Completions of one HTTP request in progress."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

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
    _send_now: Callable[[Progress], bool] | None = None  # while a stream takes tokens as they come

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

    def take(self, progress: Progress) -> bool:
        """Send new tokens of a stream at once; False if its client lags, or is still being sent earlier ones."""
        return self._send_now is not None and self._send_now(progress)

    async def write(self, dialect: ChoiceDialect, call: ChatExchange, stream: Stream) -> None:
        """Send the choices of a reply, streamed or whole."""
        request, streamed = self.request, self.request.stream
        members = [(prompt.id, member) for prompt in self.prompts for member in range(len(prompt.seeds))]
        writers = {member: dialect.writer(request, index, self.model) for index, member in enumerate(members)}
        head = dialect.head(request, self.name, self.created, self.model.name, whole=not streamed)

        def parts_of(progress: Progress) -> list[Part]:
            return writers[progress.request, progress.member](progress)

        if not streamed:
            whole = [part async for new in self._counted(stream) for progress in new for part in parts_of(progress)]
            whole.sort(key=itemgetter("index"))
            usage = usage_of(self.prompt_tokens, self.sampled)
            await call.reply(msgspec.json.encode({**head, "choices": whole, "usage": usage}))
            return
        encode = dialect.encoder(request, head)
        opening = [part for index in range(len(members)) for part in dialect.opening(index)]
        await self._stream(call, stream, encode(opening), lambda progress: encode(parts_of(progress)))
        await call.write(dialect.closing(request, head, usage_of(self.prompt_tokens, self.sampled)), last=True)

    async def _stream(
        self, call: ChatExchange, stream: Stream, opening: bytes, events_of: Callable[[Progress], bytes]
    ) -> None:
        """Send events as their tokens come: in the step that samples them, or here if the client lags."""

        def send_now(progress: Progress) -> bool:
            sent = call.write_now(lambda: events_of(progress))
            if sent:
                self._count(progress)
            return sent

        await call.write(opening)
        self._send_now = send_now
        async for new in self._counted(stream):
            self._send_now = None  # what comes meanwhile is sent behind this
            if events := b"".join(map(events_of, new)):
                await call.write(events)
            self._send_now = send_now

    async def _counted(self, stream: Stream) -> Stream:
        async for new in stream:
            for progress in new:
                self._count(progress)
            yield new
        self.last_token = time.monotonic() - self.began

    def _count(self, progress: Progress) -> None:
        self.sampled += progress.segment.length
        self.first_token = self.first_token or time.monotonic() - self.began
