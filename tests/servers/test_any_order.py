"""The law of an engine over another server, in any order of submitting, sampling, delivering, updating and closing: the
stamp of every token is the version that sampled it, no token is lost or comes twice, what was told of unfinished
completions is part of the finished ones, and the counters balance."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stretto.core.canary import Loaded
from stretto.core.frames import Unframer
from stretto.core.records import Completion, GenerateRequest, Segment
from stretto.engine.backend import Stream
from stretto.engine.http.client import decoded
from tests.servers.toy import ToyServer, assert_law, engine_over, play, request, settle

MOST_OPEN = 3


# What is drawn depends on nothing that the machine does: its tasks take their turns by the clock.
class AnyOrder(RuleBasedStateMachine):
    """One engine, one server; every update is let on step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.server = ToyServer(steps=True)
        self.open: dict[str, tuple[GenerateRequest, Stream, Unframer]] = {}
        self.told: dict[str, dict[int, Segment]] = {}
        self.updates: list[asyncio.Task[Loaded]] = []
        self.names = iter(f"{first}{second}" for first in "abcdefghij" for second in "klmnopqrst")
        self.tokens: dict[str, int] = {}  # of ended completions
        self.version = self.received = self.given = 0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    @initialize(on_update=st.sampled_from(["recompute", "keep"]))
    def begin(self, on_update: Literal["recompute", "keep"]) -> None:
        async def begin() -> None:
            self.engine = engine_over(self.server, on_update)
            self.server.version = 0

        self.run(begin())

    @rule(completions=st.integers(1, 3), max_tokens=st.integers(1, 14))
    def submit(self, completions: int, max_tokens: int) -> None:
        if len(self.open) < MOST_OPEN:
            self._submit(request(next(self.names), completions, max_tokens))

    @rule(which=st.integers(0, MOST_OPEN))
    def go_on_behind_what_is_told(self, which: int) -> None:
        if not self.open:
            return
        name = sorted(self.open)[which % len(self.open)]
        wanted, _, _ = self.open[name]
        self._journal()
        told = self.told[name]
        self.close(name)
        if all(len(segment.token_ids) < wanted.sampling.max_tokens for segment in told.values()):
            prefixes = tuple(told.get(member, Segment()) for member in range(len(wanted.seeds)))
            again = request(name, len(wanted.seeds), wanted.sampling.max_tokens, prefixes=prefixes)
            self.given += sum(len(prefix.token_ids) for prefix in prefixes)
            self._submit(again)

    @rule(count=st.integers(1, 4), delivered=st.booleans())
    def sample(self, count: int, delivered: bool) -> None:
        self.server.sample(count)
        if delivered:
            self.deliver()

    @rule()
    def deliver_all(self) -> None:
        self.deliver()

    def deliver(self) -> None:
        self.server.deliver()
        self.run(settle())
        self._receive()

    @rule()
    def update(self) -> None:
        if len(self.updates) >= 2:
            return
        self.version += 1

        async def begin() -> None:
            self.updates.append(asyncio.create_task(self.engine.update(self.version)))
            await self._until_it_waits()

        self.run(begin())

    @rule(steps=st.integers(1, 8))
    def let_the_update_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.server.waiting:
                self.server.waiting.pop(0).set()
                self.run(self._until_it_waits())

    @rule(which=st.integers(0, MOST_OPEN))
    def close_one(self, which: int) -> None:
        if self.open:
            self.close(sorted(self.open)[which % len(self.open)])

    def close(self, name: str) -> None:
        self.engine.close(name)
        del self.open[name], self.told[name]
        self.tokens.pop(name, None)
        self.run(settle())

    @rule()
    def journal(self) -> None:
        self._journal()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.updates:
            if self.server.waiting:
                self.server.waiting.pop(0).set()
            self.run(self._until_it_waits())
        for _ in range(200):
            if not self.open:
                break
            self.run(play(self.server, count=2))
            self._receive()
        assert not self.open, "completions are lost"
        health = self.loop.run_until_complete(self.engine.health())
        assert (health.running, health.unfinished, health.version) == (0, 0, self.version)
        assert health.generated + self.given == self.received + health.wasted
        assert not self.server.running
        self.loop.close()

    async def _until_it_waits(self) -> None:
        """Until the updates can only go on by a step of the server; what an update that recomputes waits for comes."""
        while True:
            await settle()
            self.updates = [update for update in self.updates if not update.done() or update.result().version < 0]
            if self.server.waiting or not self.updates:
                return
            for running in self.server.running.values():
                if running.delivered:
                    running.deliver()
            await asyncio.sleep(0.0005)

    def _submit(self, wanted: GenerateRequest) -> None:
        async def submit() -> None:
            self.open[wanted.id] = wanted, self.engine.submit_all([wanted]), Unframer()
            self.told[wanted.id] = dict(enumerate(wanted.prefixes))
            await settle()

        self.run(submit())

    def _journal(self) -> None:
        """Ask for what is certain, as a conductor does, and hold it against the law."""
        counts = {
            name: [
                len(self.told[name][member].token_ids) if member in self.told[name] else 0
                for member in range(len(wanted.seeds))
            ]
            for name, (wanted, _, _) in self.open.items()
        }
        for name, members in self.engine.partials(counts).items():
            for member, segment in members.items():
                self.told[name][member] = self.told[name].get(member, Segment()) + segment
                assert_law(self.open[name][0].prompt_token_ids, self.told[name][member])

    def _receive(self) -> None:
        for name, (wanted, stream, unframer) in list(self.open.items()):
            assert not stream.broken
            if not stream.ready:
                continue
            for body in unframer.feed(self.loop.run_until_complete(stream.next())):
                self._check(wanted, decoded(body, Completion))
            if not stream.missing:
                self.received += self.tokens.pop(name)
                self.close(name)

    def _check(self, wanted: GenerateRequest, completion: Completion) -> None:
        assert_law(wanted.prompt_token_ids, completion)
        told = self.told[wanted.id].get(completion.member, Segment())
        known = len(told.token_ids)
        assert completion.token_ids[:known] == told.token_ids
        assert completion.versions[:known] == told.versions
        ended = completion.token_ids[-1] in wanted.sampling.stop_token_ids
        assert len(completion.token_ids) <= wanted.sampling.max_tokens
        assert ended or len(completion.token_ids) == wanted.sampling.max_tokens
        self.tokens[wanted.id] = self.tokens.get(wanted.id, 0) + len(completion.token_ids)


AnyOrder.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
