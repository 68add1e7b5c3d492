"""Engines join, are drained, vanish, die, lag and are cut off in any order, on a clock that jumps.

- Every completion of every group comes once and whole, continued token by token wherever it went.
- No group goes to an engine that leaves or has left, or that serves an older version than was live at its admission.
- The live version is never older than what was published `lag` seconds ago, whichever engine has not loaded it.
- An engine that has died comes back, though versions are published faster than any engine loads them.
- Departures do not count against a group: none fails of them.
- What engines have generated stays counted when they have left, and is never less than before.
One seed is one story: ``python -m tests.loop.test_comings_and_goings SEED`` plays it."""

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLost
from stretto.core.records import GenerateRequest, Sampling, Segment
from stretto.core.tasks import cancel_and_wait, first_of
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.processes.supervisor import RestartBudget
from tests.asynchronous import Test, run_by, until
from tests.faults.simulation import VirtualLoop
from tests.loop.simulated_guests import Machine, SimulatedClient, SimulatedProcess, length

LAG, SLACK = 20.0, 10.0  # who looks may be held up by a journal that waits for an engine
SECONDS = 120.0
DEADLINES = DeadlinesConfig(start=60.0, answer=100.0, load=60.0, hung=8.0, engine_restarts=1000)


class Journal:
    """What a ledger would keep."""

    def __init__(self) -> None:
        self.pieces: dict[str, Segment] = {}

    def journal(self, id: str, piece: Segment, node: int = 0) -> None:
        self.pieces[id] = self.pieces.get(id, Segment()) + piece

    def retract(self, id: str, count: int, node: int = 0) -> None:
        raise AssertionError("no engine of this story has a server that lies")


class Story:
    """A run without a trainer: versions are published by the clock."""

    def __init__(self, seed: int, kills: bool) -> None:
        self.chance, self.kills = random.Random(seed), kills
        self.said: list[str] = []
        self.pool = EnginePool([], Path("/dev/null"), DEADLINES, lag=LAG, say=self.said.append)
        self.pool.bound, self.pool.on_load = lambda: 3, self.load
        self.journal = Journal()
        self.in_flight = InFlight(self.pool, self.journal)
        self.pool.keep = lambda: self.in_flight.keep(5.0)
        self.machines: dict[str, Machine] = {}
        self.published: list[tuple[float, int]] = []  # when, which
        self.live = -1  # as a controller has it
        self.admitted: dict[str, int] = {}
        self.began: list[str] = []  # engine of each request
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.out: set[str] = set()  # engines that leave, or have left
        self.generated = 0.0
        self.numbers = itertools.count()

    def join(self, fresh: bool = False) -> None:
        """An engine joins, with some version; if `fresh`, not with the newest one."""
        name = f"engine-{next(self.numbers)}"
        machine = self.machines[name] = Machine(self.chance)
        process = SimulatedProcess(machine, lambda: self.chance.randint(0, max(0, self.pool.published - fresh)))
        client = process.client = SimulatedClient(name, machine, self.begins)
        spec = EngineSpec(name, "", "", "", "", "{}", 1, 0.0)
        budget = RestartBudget(DEADLINES.engine_restarts, 1.0)
        self.pool.join(EngineHandle(spec, process, client, DEADLINES, budget, self.pool.changed, self.pool.proving))

    def load(self, version: int) -> None:
        self.live = max(self.live, version)

    def begins(self, name: str, request: GenerateRequest, version: int) -> None:
        assert name not in self.out, f"{request.id} went to {name}, which leaves"
        assert version >= self.admitted[request.id], f"{request.id} went to {name}, which is too old"
        self.began.append(name)

    def present(self) -> list[str]:
        return [name for name in self.pool.names if name not in self.out]

    async def leave(self, name: str) -> None:
        """Its machine is gone; the conductor notices a moment later."""
        self.machines[name].gone.set()
        handle = self.pool._engines.get(name)
        if handle is not None:
            handle.client.break_off()
        await asyncio.sleep(self.chance.random() * 0.4)
        self.out.add(name)
        await self.pool.leave(name, "its machine has gone")

    async def drain(self, name: str) -> None:
        self.out.add(name)
        await self.pool.drain([name], "asked to")

    async def cut(self, name: str) -> None:
        """A partition, which heals before the lease is over or does not."""
        self.machines[name].reached.clear()
        await asyncio.sleep(self.chance.choice((4.0, 12.0)))
        if self.chance.random() < 0.5:
            self.machines[name].reached.set()
        else:
            await self.leave(name)

    async def happenings(self) -> None:
        tasks = set()
        while self.now < SECONDS:
            await asyncio.sleep(self.chance.expovariate(1 / 4.0))
            present = self.present()
            what = self.chance.choice(("join", "leave", "drain", "cut", "slow", "quick", "kill"))
            if what == "join" or len(present) < 2:
                if len(present) < 6:
                    self.join()
                continue
            name = self.chance.choice(present)
            match what:
                case "leave" | "drain" | "cut":
                    tasks.add(asyncio.create_task(getattr(self, what)(name)))
                case "slow":
                    self.machines[name].pull_seconds = 1.5 * LAG
                case "quick":
                    self.machines[name].pull_seconds = 0.1
                case "kill" if self.kills and name in self.pool._engines:
                    self.pool._engines[name].process.kill()
        for machine in self.machines.values():
            machine.reached.set()
        self.join()
        await asyncio.gather(*tasks)

    async def group(self, number: int, seeds: tuple[int, ...] = ()) -> None:
        request = GenerateRequest(
            id=f"0.{number}.0",
            prompt_token_ids=(1,),
            seeds=seeds or tuple(self.chance.randrange(1000) for _ in range(3)),
            sampling=Sampling(max_tokens=16),
        )
        self.admitted[request.id] = self.live
        try:
            came = [completion async for completion in self.in_flight.generate(request)]
        except EngineLost:
            self.failed.add(request.id)
            return
        finally:
            self.in_flight.forget(request.id)
        assert [completion.member for completion in came] == [0, 1, 2]
        for completion, seed in zip(came, request.seeds, strict=True):
            assert completion.token_ids == tuple(range(length(seed))), "a token is lost, or came twice"
            assert list(completion.versions) == sorted(completion.versions)
            assert completion.versions[0] >= self.admitted[request.id]
        self.done.add(request.id)

    async def groups(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for number in itertools.count():
            if self.now >= SECONDS:
                break
            await until(lambda: not (self.pool.live < 0 or len([task for task in tasks if not task.done()]) >= 8), 0.1)
            tasks.add(asyncio.create_task(self.group(number)))
            await asyncio.sleep(self.chance.random() * 0.3)
        await asyncio.gather(*tasks)

    async def publishing(self) -> None:
        for version in itertools.count(1):
            await asyncio.sleep(self.chance.expovariate(1 / 5.0))
            self.published.append((self.now, version))
            self.pool.publish(version)

    async def looking(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.pool.poll(1.0)
            await self.in_flight.keep(1.0)
            live = self.pool.live
            due = [version for when, version in self.published if when < self.now - LAG - SLACK]
            assert live < 0 or live >= max(due, default=0), f"version {live} is live, and {due[-1]} is due"
            generated = self.pool.counted(lambda health: health.generated)
            assert generated >= self.generated
            assert self.pool.counted(spent) <= generated
            self.generated = generated

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def play(self) -> None:
        self.pool.publish(0)
        self.join()
        beside = [asyncio.create_task(work) for work in (self.publishing(), self.looking(), self.pool.supervise())]
        beside.append(asyncio.create_task(self.pool.keep_loaded()))
        story = asyncio.gather(self.happenings(), self.groups())
        try:
            await first_of(story, *beside)
            for task in beside:
                if task.done():
                    task.result()
            await story
        finally:
            await cancel_and_wait([story, *beside])
        assert len(self.done) + len(self.failed) == len(self.admitted) > 50
        if not self.kills:
            assert self.failed == set(), "a departure has cost a group"


def spent(health: EngineHealth) -> float:
    return health.wasted + health.unfinished


def told(seed: int, kills: bool, work: Callable[[Story], Awaitable[object]]) -> Story:
    """A story on the clock that jumps."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        story = Story(seed, kills)

        async def main() -> None:
            await asyncio.wait_for(work(story), 10_000)

        runner.run(main())
        return story


def play(seed: int) -> Story:
    return told(seed, seed % 2 == 0, Story.play)


def in_story(kills: bool = False) -> Callable[[Test], Callable[..., None]]:
    """For a test that plays a story of its own."""
    return run_by(lambda work: told(7, kills, work))


@asynccontextmanager
async def begun(story: Story, engines: int = 1) -> AsyncIterator[None]:
    """The engines of the story are supervised, and serve version 0."""
    supervising = asyncio.create_task(story.pool.supervise())
    story.pool.publish(0)
    for _ in range(engines):
        story.join()
    await story.pool.until_up(60)
    yield
    supervising.cancel()


@asynccontextmanager
async def guested(story: Story) -> AsyncIterator[None]:
    """Beside an engine that loads at once, a guest joins that loads for 15 s."""
    async with begun(story):
        loading = asyncio.create_task(story.pool.keep_loaded())
        story.pool.publish(1)
        story.join(fresh=True)
        story.machines["engine-1"].pull_seconds = 15.0
        yield
        loading.cancel()


@in_story(kills=True)
async def test_an_engine_comes_back_though_all_load_more_slowly_than_the_trainer_publishes(story: Story) -> None:
    async with begun(story, engines=2):
        loading = asyncio.create_task(story.pool.keep_loaded())
        for machine in story.machines.values():
            machine.pull_seconds = 15.0
        lost = story.pool._engines["engine-0"]
        served = set[int | None]()
        for second in range(200):
            if second == 40:
                lost.process.kill()
            if story.pool.published < story.pool.live + 2:  # as far as the bound lets a trainer go
                story.pool.publish(story.pool.published + 1)
            await asyncio.sleep(1.0)
            served |= {lost.version} if second > 40 and lost.takes else set()
        loading.cancel()
    assert len(served) > 4


@pytest.mark.parametrize(("bound", "helps"), [(2, False), (3, True)])
@in_story()
async def test_a_guest_that_loads_for_a_step_and_a_half_gets_the_groups_that_can_wait_for_it(
    story: Story, bound: int, helps: bool
) -> None:
    """Beside an engine that loads at once; at version 21 its loads break down."""
    story.pool.bound = lambda: bound
    async with guested(story):
        groups: dict[int, asyncio.Task[None]] = {}
        for step in range(2, 30):
            story.machines["engine-1"].pull_seconds = 15.0 if step < 21 else 1000.0
            story.pool.publish(step)
            late = [number for number, group in groups.items() if number // 4 + bound < step and not group.done()]
            assert late == [], "a group is not there when it is due"
            await asyncio.sleep(1.0)
            assert story.pool.live == step, "the guest holds up admission"
            groups |= {n: asyncio.create_task(story.group(n, seeds=(5, 7, 8))) for n in range(4 * step, 4 * step + 4)}
            for _ in range(9):
                await asyncio.sleep(1.0)
                await story.pool.poll(1.0)
        await asyncio.gather(*groups.values())
    told = "has not loaded version 21 in 20 s" if helps else "loads a version in 15 s, and 1 newer one came meanwhile"
    advice = "" if helps else " (with rollout.max_staleness = 3 it would help)"
    assert (story.began.count("engine-1") > 6) is helps
    assert f"engine-1 {told}{advice}: no groups until it has caught up" in story.said


@pytest.mark.parametrize(("last", "slow"), [(8, 0), (9, 0), (11, 8)])  # the load of version `slow` is late
@in_story()
async def test_a_guest_in_wait_is_not_late_and_loads_if_no_version_comes(story: Story, last: int, slow: int) -> None:
    story.pool.bound = lambda: 8
    async with guested(story):
        for step in range(2, last + 1):
            story.machines["engine-1"].pull_seconds = 39.0 if step == slow else 15.0
            story.pool.publish(step)
            for _ in range(10 if step < last else 90):
                await asyncio.gather(asyncio.sleep(1.0), story.pool.poll(1.0))
    assert story.pool.engine("engine-1").version == last
    assert any("has not loaded" in line for line in story.said) is bool(slow)


@in_story()
async def test_scores_are_of_no_older_version_than_was_live_when_they_were_asked_for(story: Story) -> None:
    async def scored() -> float:
        live, before = story.pool.live, story.now
        assert await story.pool.score([(1, 2)]) >= [(live,)]
        return story.now - before

    scores = list[asyncio.Task[float]]()
    async with guested(story), asyncio.TaskGroup() as tasks:
        for step in range(2, 20):
            story.pool.publish(step)
            tasks.create_task(story.group(step, seeds=(5, 7, 8)))  # so that the guest has less to do
            await asyncio.sleep(0.5)
            scores += [tasks.create_task(scored())]
            await asyncio.sleep(9.5)
    assert max(task.result() for task in scores) > 10


@pytest.mark.parametrize("second", [1, 4, 7])
@in_story(kills=True)
async def test_a_guest_that_is_behind_gets_no_newer_groups_though_all_others_are_down(
    story: Story, second: int
) -> None:
    """It has promised a version, or starts, while the only other engine dies."""
    async with guested(story):
        groups = list[asyncio.Task[None]]()
        for step in range(2, 20):
            story.pool.publish(step)
            for tick in range(10):
                await asyncio.sleep(0.5)
                if tick == second:
                    story.pool._engines["engine-0"].process.kill()
                await asyncio.sleep(0.5)
                groups.append(asyncio.create_task(story.group(len(groups), seeds=(5, 7, 8))))
        await asyncio.gather(*groups)
    assert story.began.count("engine-1") > 6


@in_story(kills=True)
async def test_a_group_with_newer_tokens_than_a_guest_promises_is_not_sent_there_again_and_again(story: Story) -> None:
    """One engine loads at once and dies, one loads for less than a step, the guest for a step and a half."""
    sent, start = itertools.count(), story.pool._router.start

    def counted(*words: Any) -> str | None:
        assert next(sent) < 5000, "a group goes round and round while no time passes"
        return start(*words)

    async with begun(story, engines=2):
        await until(lambda: len(story.pool._router.up) == 2, 0.1)
        story.pool._router.start = counted  # type: ignore[assignment, method-assign]
        loading = asyncio.create_task(story.pool.keep_loaded())
        story.pool.publish(1)
        story.join(fresh=True)
        groups = list[asyncio.Task[None]]()
        for step in range(2, 20):
            story.machines["engine-1"].pull_seconds, story.machines["engine-2"].pull_seconds = 4.0, 15.0
            story.pool.publish(step)
            for second in range(10):
                await asyncio.sleep(0.5)
                await story.in_flight.keep(1.0)
                if second == 1 and step > 5:
                    story.pool._engines["engine-0"].process.kill()
                await asyncio.sleep(0.5)
                numbers = len(groups), len(groups) + 1
                groups += [asyncio.create_task(story.group(number, seeds=(5, 7, 8))) for number in numbers]
        await asyncio.gather(*groups)
        loading.cancel()
    assert story.began.count("engine-2") > 6


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))])
def test_the_laws_hold_however_engines_come_and_go(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("how", ["leave", "drain"])
@in_story()
async def test_a_group_whose_engines_depart_six_times_comes_whole(story: Story, how: str) -> None:
    async with begun(story):
        group = asyncio.create_task(story.group(0, seeds=(8, 8, 8)))
        for _ in range(6):
            await asyncio.sleep(0.3)  # a token or two
            (name,) = story.present()
            assert story.pool.open == {"0.0.0"}
            story.join()
            await getattr(story, how)(name)
            await until(lambda: story.pool.open or group.done(), 0.05)
        await group
    assert story.done == {"0.0.0"}


@in_story()
async def test_what_a_drained_engine_had_sampled_is_journaled_before_it_leaves(story: Story) -> None:
    """Nobody has asked for it before: the journal is written once a second, and this is half of one."""
    async with begun(story):
        group = asyncio.create_task(story.group(0, seeds=(8, 8, 8)))
        await asyncio.sleep(0.5)
        client = story.pool._engines["engine-0"].client
        assert isinstance(client, SimulatedClient)
        sampled = [len(piece.token_ids) for piece in client.sampled["0.0.0"]]
        assert (sum(sampled) > 0, story.journal.pieces) == (True, {})
        story.join()
        await story.drain("engine-0")
        kept = [len(story.journal.pieces.get(f"0.0.0/{member}", Segment()).token_ids) for member in range(3)]
        assert all(ours >= theirs for ours, theirs in zip(kept, sampled, strict=True)), (kept, sampled)
        await group


@in_story(kills=True)
async def test_an_engine_that_is_killed_as_its_machine_is_reached_again_samples_nothing_more(story: Story) -> None:
    """Of the engines of these stories: a token of no version would be nobody's fault but theirs."""
    async with begun(story):
        (machine,) = story.machines.values()
        group = asyncio.create_task(story.group(0, seeds=(0, 9, 18)))  # of one token each
        await asyncio.sleep(0)
        machine.reached.clear()
        await asyncio.sleep(5.0)
        story.pool._engines["engine-0"].process.kill()
        machine.reached.set()
        await group
    assert story.done == {"0.0.0"}


@in_story()
async def test_a_run_without_engines_says_which_one_left_last_and_why(story: Story) -> None:
    assert story.pool.absence == "; no engine serves"
    async with begun(story, engines=2):
        assert story.pool.absence == ""
        for name in ("engine-1", "engine-0"):
            await story.leave(name)
        assert story.pool.absence == "; no engine serves, engine-0 has left: its machine has gone"


@in_story()
async def test_a_guest_that_joined_before_the_start_is_started_once_and_its_loss_ends_no_run(story: Story) -> None:
    """As after a resume with steps to do again: the gate is open while the trainer does them."""
    story.join()
    process = story.pool._engines["engine-0"].process
    await asyncio.sleep(0)  # it is being started
    starting = asyncio.create_task(story.pool.start(0))
    await asyncio.sleep(0)
    await story.leave("engine-0")
    await starting
    assert story.pool.names == []
    assert isinstance(process, SimulatedProcess)
    assert process.starts == 1
    await story.pool.stop(1.0)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
        played = play(number)
        print(number, len(played.done), len(played.failed), len(played.out), flush=True)
