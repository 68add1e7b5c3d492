"""Completions of one HTTP request in progress."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import msgspec

from stretto.core.engine import NewToken, Progress
from stretto.core.records import GenerateRequest
from stretto_gateway.app import ChatExchange, date_of_reply
from stretto_gateway.dialects.openai import ChoiceDialect, CompletionText, Part, usage_of
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import Request
from stretto_workflows.chat.messages import ChatRequest, SampledTurn

Stream = AsyncIterator[list[Progress]]


@dataclass
class Completing:
    """Completions of one HTTP request while the engine samples them.

    Attributes:
        request: the client's request.
        prompts: requests to the engine, one per prompt.
        name: id of the reply, without a prefix.
        began: start of the request, in seconds of `time.monotonic`.
        created: Unix time of the reply, in seconds.
        sampled: number of sampled tokens so far.
        first_token: seconds from the start to the first token; None before it.
        last_token: seconds from the start to the end of all completions; None before it.
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
    _send_now: Callable[[NewToken], bool] | None = None  # set while tokens may be sent as they are sampled

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.prompt_token_ids) for prompt in self.prompts)

    async def turns(self, stream: Stream) -> list[SampledTurn]:
        """Wait for all completions of a chat request; returns them as turns, in the order of the choices. `stream`: the
        engine's iterator over completions."""
        assert isinstance(self.request, ChatRequest)
        found = {progress.member: progress async for new in self._counted(stream) for progress in new}
        return [
            self.model.turn(
                self.request,
                progress.segment,
                id=self.name,
                created=self.created,
                prompt=self.prompts[0].prompt_token_ids,
                call_id=lambda number: secrets.token_hex(),
                top_logprobs=progress.top_logprobs,
            )
            for _, progress in sorted(found.items())
        ]

    def take(self, new: NewToken) -> bool:
        """Send a new token to the client at once; returns True if that is done. Returns False, without sending it, if
        the client lags, earlier tokens are still being sent, or `write` has not begun. Then the token must come with
        the stream that `write` reads."""
        return self._send_now is not None and self._send_now(new)

    async def write(self, dialect: ChoiceDialect, call: ChatExchange, stream: Stream) -> None:
        """Send the reply to `call`, as a stream of events or whole, as the request wants. `stream`: the engine's
        iterator over completions (whole reply), or over the tokens that `take` has not sent."""
        request = self.request
        members = [(prompt.id, member) for prompt in self.prompts for member in range(len(prompt.seeds))]
        texts = {member: CompletionText(self.model, request.options) for member in members}
        writers = {member: dialect.writer(request, place, text) for place, (member, text) in enumerate(texts.items())}
        head = dialect.head(request, self.name, self.created, self.model.name, whole=not request.stream)

        def parts_of(progress: Progress) -> list[Part]:
            return writers[progress.request, progress.member](progress)

        if not request.stream:
            whole = [part async for new in self._counted(stream) for progress in new for part in parts_of(progress)]
            whole.sort(key=itemgetter("index"))
            usage = usage_of(self.prompt_tokens, self.sampled)
            await call.reply(msgspec.json.encode({**head, "choices": whole, "usage": usage}))
            return
        encode = dialect.encoder(request, head)
        opening = [part for place in range(len(members)) for part in dialect.opening(place)]
        await call.write(encode(opening))
        plain = {
            member: dialect.text_encoder(request, head, place) if text.is_plain else None
            for place, (member, text) in enumerate(texts.items())
        }

        def event_of(new: NewToken) -> bytes:
            member = new.request, new.member
            if (in_event := plain[member]) is None:
                return encode(parts_of(new.progress()))
            text = texts[member].push(new.token)
            return in_event(text) if text else b""

        await self._stream(call, stream, lambda progress: encode(parts_of(progress)), event_of)
        await call.write(dialect.closing(request, head, usage_of(self.prompt_tokens, self.sampled)), last=True)

    async def _stream(
        self,
        call: ChatExchange,
        stream: Stream,
        events_of: Callable[[Progress], bytes],
        event_of: Callable[[NewToken], bytes],
    ) -> None:
        """Send events as their tokens are sampled: at once through `take`, or here if the client lags. `events_of`
        encodes tokens from `stream`, `event_of` one token that is sent at once."""
        write_now = call.write_now

        def send_now(new: NewToken) -> bool:
            if write_now is None or not write_now(partial(event_of, new)):
                return False
            self._count(1)
            return True

        self._send_now = send_now
        async for ready in self._counted(stream):
            self._send_now = None  # so that tokens sampled meanwhile are sent after these
            if events := b"".join(map(events_of, ready)):
                await call.write(events)
            self._send_now = send_now

    async def _counted(self, stream: Stream) -> Stream:
        async for new in stream:
            self._count(sum(progress.segment.length for progress in new))
            yield new
        self.last_token = time.monotonic() - self.began

    def _count(self, tokens: int) -> None:
        self.sampled += tokens
        self.first_token = self.first_token or time.monotonic() - self.began
