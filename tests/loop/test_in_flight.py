"""What is written of answers in flight is journaled, and every token of it once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from stretto.core.records import Completion, GenerateRequest, Sampling, StopReason
from stretto.engine.wire import PartialTokens
from stretto.loop.engines.in_flight import InFlight
from stretto.store.ledger.rows import PartialRow

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

    async def written(self, known: Mapping[str, Sequence[int]], patience: float | None) -> list[PartialTokens]:
        await asyncio.sleep(0.01)
        return [
            PartialTokens(id, 0, ANSWER[count:], tuple(-0.5 for _ in ANSWER[count:]), tuple(0 for _ in ANSWER[count:]))
            for id, (count,) in known.items()
            if count < len(ANSWER)
        ]


class Journal:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def write_on(self, id: str, partial: PartialRow) -> None:
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
