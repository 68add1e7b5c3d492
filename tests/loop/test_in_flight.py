"""What is written of answers in flight is journaled, and every token of it once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from stretto.core.records import Completion, GenerateRequest, Partials, Sampling, Segment, StopReason
from stretto.loop.engines.in_flight import InFlight

ANSWER = tuple(range(100, 110))


class SlowToTell:
    """An engine that writes one answer for ever, and takes its time to tell how far it has come."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        await asyncio.get_running_loop().create_future()
        yield Completion(
            request=request.id,
            member=0,
            token_ids=(),
            behavior_logprobs=(),
            versions=(),
            stop_reason=StopReason.STOP,
        )

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        await asyncio.sleep(0.01)
        whole = Segment(ANSWER, tuple(-0.5 for _ in ANSWER), tuple(0 for _ in ANSWER))
        return {id: {0: whole.after(count)} for id, (count,) in known.items() if count < len(ANSWER)}


class Journal:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def journal(self, id: str, partial: Segment) -> None:
        self.tokens += partial.token_ids


def test_two_who_look_at_the_same_time_journal_a_token_once() -> None:
    journal = Journal()

    async def main() -> None:
        answers = InFlight(SlowToTell(), journal, {})
        request = GenerateRequest(id="7", prompt_token_ids=(1,), seeds=(0,), sampling=Sampling(max_tokens=20))
        answering = asyncio.ensure_future(anext(answers.generate(request)))
        await asyncio.sleep(0)
        await asyncio.gather(answers.keep(), answers.keep(1.0), answers.keep())
        answering.cancel()

    asyncio.run(main())
    assert journal.tokens == list(ANSWER)
