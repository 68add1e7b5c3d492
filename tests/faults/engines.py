"""The engines and rewards of a simulated run: slow, reordered, replying twice, dying in mid-completion."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import xxhash

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Outcome, Partials, Segment, StopReason, Verdict
from tests.faults.schedule import Schedule


@dataclass
class Engines:
    """Some engines, which die and come back; every token takes its time and has the version of its moment."""

    schedule: Schedule
    chance: random.Random
    version: int
    on_load: Callable[[int], None] = print
    published: asyncio.Event = field(default_factory=asyncio.Event)
    writing: dict[str, list[tuple[list[int], list[int]]]] = field(default_factory=dict)

    def listen(self, on_load: Callable[[int], None]) -> None:
        self.on_load = on_load

    def publish(self, version: int) -> None:
        self.version = version
        self.published.set()

    async def keep_loaded(self) -> NoReturn:
        while True:
            await self.published.wait()
            self.published.clear()
            await asyncio.sleep(self.chance.random() * 0.2)
            self.on_load(self.version)

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        prefixes = request.prefixes or (Segment(),) * len(request.seeds)
        partials = [(list(some.token_ids), list(some.versions)) for some in prefixes]
        self.writing[request.id] = partials
        try:
            order = list(range(len(partials)))
            self.chance.shuffle(order)
            for member in order:
                for _ in range(self.chance.randint(1, 3)):
                    await self.a_moment()
                    partials[member][0].append(len(partials[member][0]))
                    partials[member][1].append(self.version)
                completion = _completion(request, member, *partials[member])
                yield completion
                if self.chance.random() < self.schedule.twice_rate:
                    yield completion
        finally:
            self.writing.pop(request.id, None)

    async def a_moment(self) -> None:
        """What a token takes; the engine may not survive it."""
        await asyncio.sleep(self.chance.expovariate(3 / self.schedule.answer_seconds))
        if self.chance.random() < self.schedule.loss_rate / 3:
            raise EngineLost("engine-0", "was killed")

    open = frozenset[str]()
    absence = ""

    async def give_up(self, spared: Callable[[str], bool]) -> None: ...

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        await asyncio.sleep(self.chance.random() * 0.1)
        found: Partials = {}
        for id, counts in known.items():
            for member, (tokens, versions) in enumerate(self.writing.get(id, ())):
                if member < len(counts) and len(tokens) > counts[member]:
                    new = slice(counts[member], None)
                    logprobs = tuple(-0.5 for _ in tokens[new])
                    piece = Segment.of(tuple(tokens[new]), logprobs, tuple(versions[new]))
                    found.setdefault(id, {})[member] = piece
        return found

    async def score(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        await asyncio.sleep(self.chance.random() * 0.2)
        return [self._verdict(self.chance) for _ in completions]

    def _verdict(self, chance: random.Random) -> Verdict:
        if chance.random() < self.schedule.undecided_rate:
            return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason="timeout")
        right = chance.random() < 0.5
        return Verdict(outcome=Outcome.RIGHT if right else Outcome.WRONG, reward=float(right))


class CompanyMatters(Engines):
    """Engines whose tokens tell what was computed together with them, and rewards that depend on the answer alone:
    nothing but its moment is left to chance."""

    async def generate(self, *requests: GenerateRequest, least: int = 0) -> AsyncIterator[Completion]:
        company = xxhash.xxh3_64_intdigest(repr([(request.id, request.seeds) for request in requests]).encode())
        wanted = [(request, member) for request in requests for member in range(len(request.seeds))]
        self.chance.shuffle(wanted)
        for request, member in wanted:
            own = random.Random(f"{company} {request.seeds[member]} {self.version}")
            tokens = [own.randrange(1 << 30) for _ in range(own.randint(1, 3))]
            await self.a_moment()
            yield _completion(request, member, tokens, [self.version] * len(tokens))

    async def score(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        await asyncio.sleep(self.chance.random() * 0.2)
        return [self._verdict(random.Random(text)) for text in completions]


def _completion(request: GenerateRequest, member: int, tokens: list[int], versions: list[int]) -> Completion:
    return Completion(
        request.id,
        member,
        Segment.of(
            token_ids=tuple(tokens),
            behavior_logprobs=tuple(-0.5 for _ in tokens),
            versions=tuple(versions),
            stop_reason=StopReason.STOP,
        ),
    )
