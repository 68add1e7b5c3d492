"""Promises about trajectories that end their process: each of them fails, and no other one does, however they are mixed
and however many processes there are; what has lost a process is alone in the next one, and waits for no newcomer."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.records import Outcome
from stretto.rollout.workflow import WorkflowConfig
from stretto_workflows.exchange import Exchange
from stretto_workflows.pool import WorkflowPool
from stretto_workflows.wire import MemberEnded
from stretto_workflows.worker_process import WorkerLost, WorkflowProcess
from tests.workflows.benches import OWN, Bench, MakeBench, asks


class SimulatedProcess(WorkflowProcess):
    """Takes rounds of the event loop for its trajectories; a culprit ends it, with all that are on it.

    Attributes:
        before: those that have lost a process.
        together: those of them that were in company later, and in how much.
        begun: all, as often as they began.
    """

    culprits: frozenset[int] = frozenset()
    rounds: random.Random = random.Random(0)
    before: set[int] = set()  # noqa: RUF012  # of each example its own, set below
    together: list[tuple[int, int]] = []  # noqa: RUF012
    begun: list[int] = []  # noqa: RUF012

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def stop(self) -> None:
        self._channel.close()

    async def run(self, exchange: Exchange) -> MemberEnded:
        member = exchange.task.member
        self.begun.append(member)
        self._members[member] = None  # type: ignore[assignment]  # only counted
        for one in self._members:
            if one in self.before and len(self._members) > 1:
                self.together.append((one, len(self._members)))
        try:
            for _ in range(self.rounds.randrange(1, 6)):
                await asyncio.sleep(0)
                if self.lost.done():
                    self.before.add(member)
                    raise WorkerLost("ended")
            if member in self.culprits:
                self.before.add(member)
                self.lost.set_result("ended")
                raise WorkerLost("ended")
            await exchange.turn(asks("1+1="))
            return MemberEnded(0, 1.0)
        finally:
            del self._members[member]


class SimulatedPool(WorkflowPool):
    kind: type[SimulatedProcess]

    async def _start(self, name: str) -> None:
        worker = self.kind(name, self.config, self._log, 10.0)
        await worker.start()
        self._workers[name] = worker
        self._changed.set()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 24), st.sets(st.integers(0, 23)), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32))
def test_in_any_mix_every_culprit_fails_and_every_innocent_completes(
    members: int, culprits: set[int], workers: int, concurrency: int, seed: int
) -> None:
    found, process = ended(members, culprits, workers, concurrency, seed)
    assert found == [Outcome.UNDECIDED if one in culprits else Outcome.RIGHT for one in range(members)]
    assert process.together == [], "a suspect is alone"


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_what_has_lost_its_process_does_not_wait_for_those_that_come_after_it(concurrency: int) -> None:
    """One process, which newcomers would keep busy: those that were on it when it ended are the next in it."""
    _, process = ended(30, {0}, 1, concurrency, 1)
    last = max(place for place, member in enumerate(process.begun) if member in process.before)
    assert len(set(process.begun[:last])) <= concurrency < len(set(process.begun))


def ended(
    members: int, culprits: set[int], workers: int, concurrency: int, seed: int
) -> tuple[list[Outcome], type[SimulatedProcess]]:
    """Run all members at once; returns how each ended, and their kind of process."""

    class Process(SimulatedProcess):
        pass

    Process.culprits, Process.rounds = frozenset(culprits), random.Random(seed)
    Process.before, Process.together, Process.begun = set(), [], []
    config = WorkflowConfig(function=f"{OWN}:Dies", workers=workers, concurrency=concurrency, max_failed=1.0)
    bench = Bench(config, Path("/dev/null"))

    async def run() -> list[Outcome]:
        pool = SimulatedPool(config, bench.log)
        pool.kind = Process
        async with pool:
            runs = (pool.run(bench.exchange(member)) for member in range(members))
            return [one.verdict.outcome for one in await asyncio.wait_for(asyncio.gather(*runs), 60)]

    return asyncio.run(run()), Process


def test_real_processes_lose_their_culprits_alone(bench: MakeBench) -> None:
    made = bench("Mixed", {"culprits": [1, 4]}, workers=2, max_failed=1.0, members=10)
    reasons = [trajectory.verdict.reason for trajectory in made.run()]
    assert [bool(reason) for reason in reasons] == [member in (1, 4) for member in range(10)], reasons
    assert {reasons[1], reasons[4]} == {"its process ended 3 times: the last one ended with exit code 3"}
