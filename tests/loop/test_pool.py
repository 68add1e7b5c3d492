"""Engines as one, with toy engines in real processes.

- Every answer comes from an engine that is up; one that breaks off gets nothing more until it is well again.
- An engine that dies is replaced and serves the newest version; one that dies too often ends the run with its name.
- A published version reaches every engine; `live` is the oldest that any of them serves.
- Every token has the name of the engine that wrote it.
"""

import asyncio
import itertools
import os
import random
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from stretto.core.engine import EngineHealth
from stretto.core.errors import DataError, EngineLied, EngineLost, Problem, RoleDied, RoleFailed, UnprovenWeights
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment
from stretto.core.tasks import run_beside
from stretto.engine.config import EngineConfig
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.pool import EnginePool
from tests.asynchronous import Test, run_by, until
from tests.launch.running import wait_until
from tests.launch.warm import children_of
from tests.loop.forking import ENGINE, toys
from tests.loop.simulated_guests import Machine, SimulatedClient, handle_of
from tests.loop.toy_engine import ANSWER, DIE, FREEZE, HANG_UP, LIE, STAY_SILENT, TURN_DEAF, TURN_MUTE, UNFINISHED

T = TypeVar("T")
Work = Callable[[EnginePool], Awaitable[T]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as path:
        (Path(path) / "newest").write_text("0")
        yield Path(path)


def played(folder: Path, work: Work[T], count: int = 2, say: Callable[[str], None] = print, **deadlines: float) -> T:
    """Start a fleet, supervise it while `work` goes on, stop it; nothing is left."""
    specs = [
        EngineSpec(
            name=f"engine-{number}",
            address=f"unix:{folder}/{number}.sock",
            model=str(folder / "newest"),
            mailbox="toy",
            mailbox_folder=str(folder),
            config=EngineConfig().model_dump_json(),
            threads=1,
            publication_seconds=deadlines.get("save", 20.0),
        )
        for number in range(count)
    ]
    server, before = toys(), engines()

    async def main() -> T:
        settings = DeadlinesConfig.model_validate({"start": 20.0, "answer": 5.0} | deadlines)
        fleet = EnginePool(specs, folder, settings, role=ENGINE, spawner=server, say=say)
        try:
            await fleet.start(0)
            return await run_beside(fleet.supervise(), work(fleet))
        finally:
            await fleet.stop(1)

    try:
        return asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        wait_until(lambda: engines() == before, "the end of the engines")  # a start that was cancelled ends by itself


def in_fleet(count: int = 2, **deadlines: float) -> Callable[[Test], Callable[..., None]]:
    """For a test beside a supervised fleet, whose reports are in `said`."""

    def run(work: Work[None], folder: Path, said: list[str]) -> None:
        played(folder, work, count, said.append, **deadlines)

    return run_by(run)


def engines() -> list[int]:
    """The processes of engines."""
    return sorted(children_of(toys().pid))


def request(name: str, what: int = ANSWER, answers: int = 2) -> GenerateRequest:
    seeds = tuple(range(answers))
    return GenerateRequest(id=name, prompt_token_ids=(what,), seeds=seeds, sampling=Sampling(max_tokens=4))


def begun_by_version_7() -> GenerateRequest:
    prefix = Segment.of(token_ids=(3,), behavior_logprobs=(-0.5,), versions=(7,))
    return msgspec.structs.replace(request("0", answers=1), prefixes=(prefix,))


async def answers(fleet: EnginePool, asked: GenerateRequest) -> list[Completion]:
    return [completion async for completion in fleet.generate(asked)]


@in_fleet()
async def test_groups_are_spread_over_the_engines(fleet: EnginePool) -> None:
    groups = await asyncio.gather(*(answers(fleet, request(str(number))) for number in range(8)))
    assert all([completion.token_ids for completion in group] == [(0,), (1,)] for group in groups)
    await fleet.poll()
    assert [round(fleet.counted(lambda health: health.generated)), *map(round, fleet.busy().values())] == [16, 1, 1]


@in_fleet()
async def test_begun_answers_wait_for_an_engine_that_serves_the_version_of_their_last_token(fleet: EnginePool) -> None:
    answering = asyncio.ensure_future(answers(fleet, begun_by_version_7()))
    await asyncio.sleep(0.3)
    early = answering.done()
    await fleet.reach(7)
    (completion,) = await answering
    assert (early, completion.versions[-1]) == (False, 7)


@in_fleet(count=1)
async def test_a_request_that_waits_for_a_version_is_given_up_with_the_others(fleet: EnginePool) -> None:
    answering = asyncio.ensure_future(answers(fleet, begun_by_version_7()))
    await asyncio.sleep(0.01)
    giving_up = asyncio.ensure_future(fleet.give_up(lambda id: False))
    await asyncio.sleep(0.1)
    early = giving_up.done()
    await fleet.reach(7)
    await asyncio.gather(giving_up, answering)
    assert not early


@in_fleet(count=1)
async def test_a_completion_names_the_engines_that_wrote_it_in_their_order(fleet: EnginePool) -> None:
    before = Segment.of((3, 4), (-0.5, -0.5), (0, 0)).written_by("a spot machine")
    asked = msgspec.structs.replace(request("0", answers=2), prefixes=(before, Segment()))
    moved, fresh = await answers(fleet, asked)
    assert moved.engines == (("a spot machine", 2), ("engine-0", 1))
    assert fresh.engines == (("engine-0", 1),)


@in_fleet()
async def test_pieces_are_tokens_with_the_name_of_the_engine_that_tells_them(fleet: EnginePool) -> None:
    waiting = [asyncio.ensure_future(answers(fleet, request(id, STAY_SILENT, answers=1))) for id in "ab"]
    await until(lambda: len(fleet.open) >= 2)
    found = await fleet.partials({"a": [0], "b": [0]})
    assert sorted(found) == ["a", "b"]
    told = sorted((piece for members in found.values() for piece in members.values()), key=lambda piece: piece.engines)
    assert told == [Segment.of((7,), (-0.1,), (0,), 1, engines=((name, 1),)) for name in ("engine-0", "engine-1")]
    for one in waiting:
        one.cancel()


@in_fleet()
async def test_a_published_version_reaches_every_engine(fleet: EnginePool) -> None:
    live: list[int] = []
    fleet.on_load = live.append
    loading = asyncio.ensure_future(fleet.keep_loaded())
    fleet.publish(7)
    await until(lambda: fleet.live >= 7)
    loading.cancel()
    await fleet.reach(9)
    (completion,) = await answers(fleet, request("0", answers=1))
    assert [live[0], live[-1], fleet.live, completion.versions[0]] == [0, 9, 9, 9]


@in_fleet()
async def test_when_the_engine_of_the_oldest_version_dies_others_are_live(fleet: EnginePool, folder: Path) -> None:
    newer, older = fleet._engines.values()
    await newer.reach(7)
    live: list[int] = []
    fleet.on_load = live.append
    (folder / "newest").write_text("broken")  # no replacement comes up
    older.process.kill()
    await until(lambda: 7 in live)


@in_fleet(count=1, start=0.01)
async def test_an_engine_may_wait_for_the_first_publication_longer_than_for_its_own_start(fleet: EnginePool) -> None:
    assert fleet.live == 0


@in_fleet(count=1)
async def test_an_engine_that_dies_is_replaced_by_the_newest(fleet: EnginePool, folder: Path, said: list[str]) -> None:
    await fleet.reach(3)
    (folder / "newest").write_text("4")  # published while it is dead
    with pytest.raises(EngineLost, match="engine-0 "):
        await answers(fleet, request("0", DIE))
    (completion,) = await answers(fleet, request("0", answers=1))
    await fleet.reach(4)
    await fleet.poll()
    assert fleet.busy() == {"engine-0": 1.0}
    assert completion.versions[0] == 4
    assert said == ["engine-0 ended with exit code 9: a new one is started"]


@in_fleet()
async def test_an_engine_that_comes_back_serves_what_was_published_while_it_started(fleet: EnginePool) -> None:
    with pytest.raises(EngineLost):
        await answers(fleet, request("0", DIE))
    live: list[int] = []
    fleet.on_load = live.append
    loading = asyncio.ensure_future(fleet.keep_loaded())
    fleet.publish(5)  # the replacement will have found version 0
    await joined(fleet, 2)
    groups = await asyncio.gather(*(answers(fleet, request(str(number))) for number in range(8)))
    loading.cancel()
    assert {completion.versions for group in groups for completion in group} == {(5,)}

    assert live[-1] == 5
    assert live == sorted(live)


async def joined(fleet: EnginePool, count: int) -> None:
    """Return when a number of engines can be looked at."""
    while True:
        await fleet.poll()
        if fleet.counted(lambda health: 1) == count:
            return
        await asyncio.sleep(0.01)


@in_fleet(count=1)
async def test_what_a_dead_engine_had_begun_is_wasted(fleet: EnginePool) -> None:
    await answers(fleet, request("0"))
    await fleet.poll()
    with pytest.raises(EngineLost):
        await answers(fleet, request("1", DIE))
    await joined(fleet, 2)  # the dead one, and the one in its place
    assert fleet.counted(lambda health: health.wasted) == UNFINISHED
    assert fleet.counted(lambda health: health.unfinished) == UNFINISHED


@in_fleet(count=1)
async def test_an_engine_that_does_not_reply_in_time_stays_as_it_was_looked_at(fleet: EnginePool) -> None:
    await fleet.poll()
    (process,) = engines()
    os.kill(process, signal.SIGSTOP)
    assert await fleet.poll(0.1) == []  # it would never reply
    os.kill(process, signal.SIGCONT)
    assert fleet.counted(lambda health: health.busy_seconds) == 1.0


class LateToReply(SimulatedClient):
    """Counts when it is asked, and replies when it may."""

    may: asyncio.Event

    async def health(self) -> EngineHealth:
        counted = await super().health()
        await self.may.wait()
        return counted

    async def spans(self) -> list[Span]:
        return [Span("another-role", "generate", 1.0, 2.0)]


async def test_the_last_counters_are_of_no_moment_before_they_are_asked_for() -> None:
    """At the end of a run: a question of before the last tokens may still be open."""
    client = LateToReply("engine-0", Machine(random.Random(1)), lambda *_: None, version=0)
    client.may = asyncio.Event()
    handle = handle_of(client)
    asked = handle.counters.poll()
    await asyncio.sleep(0)
    client.generated = 5
    same, last = handle.counters.poll(), handle.counters.poll(anew=True)
    client.may.set()
    await last
    assert same is asked
    assert handle.counters.total(lambda health: health.generated) == 5
    assert {span.role for span in handle.counters.drain_spans()} == {"engine-0"}  # whatever the engine calls itself


@in_fleet(count=1)
async def test_every_span_is_handed_out_once_however_impatient_the_polls_are(fleet: EnginePool) -> None:
    spans: list[Span] = []
    for _ in range(5):
        spans += await fleet.poll(0.02)
        await asyncio.sleep(0.1)  # they come meanwhile
    found = [span.start for span in [*spans, *await fleet.poll()]]
    assert found == list(range(1, len(found) + 1))


@in_fleet(count=1)
async def test_an_engine_that_is_slow_to_reply_is_heard_when_it_does(fleet: EnginePool) -> None:
    await answers(fleet, request("0"))
    (process,) = engines()
    os.kill(process, signal.SIGSTOP)
    await fleet.poll(0.05)
    before = fleet.counted(lambda health: health.generated)
    os.kill(process, signal.SIGCONT)
    await fleet.poll()  # the same question, and its answer
    assert [before, fleet.counted(lambda health: health.generated)] == [0, 2]


@in_fleet()
async def test_while_one_engine_is_away_the_other_answers_everything(fleet: EnginePool) -> None:
    with pytest.raises(EngineLost):
        await answers(fleet, request("0", DIE))
    assert len(await asyncio.gather(*(answers(fleet, request(str(number))) for number in range(20)))) == 20


def answers_after(folder: Path, what: int, **deadlines: float) -> list[str]:
    """What is said when the only engine misbehaves once, and has answered the next request."""
    said: list[str] = []

    async def work(fleet: EnginePool) -> int:
        with pytest.raises(EngineLost):
            await answers(fleet, request("0", what))
        return len(await answers(fleet, request("0")))

    assert played(folder, work, count=1, say=said.append, **deadlines) == 2
    return said


KILLED = "engine-0 was killed by SIGKILL: a new one is started"


def test_an_engine_that_hangs_up_and_is_well_gets_work_again(folder: Path) -> None:
    """The same, too: it has given up what it goes on with, behind a cut network say, before it gets anything."""
    assert answers_after(folder, HANG_UP) == []


def test_an_engine_that_nobody_can_reach_is_replaced_though_its_process_goes_on(folder: Path) -> None:
    assert answers_after(folder, TURN_DEAF, hung=0.3) == [KILLED]


def test_a_suspected_engine_that_takes_a_probe_and_says_nothing_is_replaced_once_it_is_hung(folder: Path) -> None:
    """Its heartbeats, one a second, go on."""
    assert answers_after(folder, TURN_MUTE, hung=1.5, answer=600.0) == [KILLED]


def test_an_engine_that_falls_silent_in_mid_answer_is_replaced(folder: Path) -> None:
    assert answers_after(folder, FREEZE, hung=1.5, answer=0.5) == [KILLED]


NEVER = 99  # the version that no toy loads
LATE = "the client of engine-0 waited 0.3 s for engine-0 to load version 99 and gave up"


@pytest.mark.parametrize("ordered", [EnginePool.publish, EnginePool.reach])
def test_an_engine_that_hangs_in_a_load_is_replaced(folder: Path, ordered: Callable[..., object]) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        (folder / "newest").write_text(str(NEVER))
        loading = asyncio.ensure_future(fleet.keep_loaded())
        reached = ordered(fleet, NEVER)
        await (reached if isinstance(reached, Awaitable) else until(lambda: fleet.live == NEVER))
        assert {one.versions for one in await answers(fleet, request("0"))} == {(NEVER,)}
        loading.cancel()

    played(folder, work, 1, said.append, load=0.3, hung=60.0)
    assert said == [f"engine-0 was killed by SIGKILL ({LATE}): a new one is started"]


def test_an_engine_that_never_loads_a_version_ends_the_run_with_its_name(folder: Path) -> None:
    with pytest.raises(RoleDied, match=f"engine-0 {LATE}, 3 times; see the end of "):
        played(folder, lambda fleet: fleet.reach(NEVER), count=1, load=0.3, hung=60.0, engine_restarts=2)


def test_an_engine_that_dies_too_often_ends_the_run_with_its_name(folder: Path) -> None:
    async def work(fleet: EnginePool) -> None:
        while True:
            with pytest.raises(EngineLost):
                await answers(fleet, request("0", DIE))

    with pytest.raises(RoleDied, match=r"engine-0 ended with exit code 9, 3 times; see the end of .*engine-0\.txt"):
        played(folder, work, count=1, engine_restarts=2)


async def never(fleet: EnginePool) -> None:
    raise AssertionError("it has not started")


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("broken", r"engine-\d ended with exit code 1 \(\w+: .*\); see the end of"),
        ("killed 4", r"engine-\d was killed by SIGKILL .*, 1 time"),
    ],
)
def test_an_engine_that_does_not_start_is_named(folder: Path, start: str, told: str) -> None:
    (folder / "newest").write_text(start)
    with pytest.raises(RoleDied, match=told):
        played(folder, never, engine_restarts=0)


def test_a_users_mistake_that_an_engine_finds_first_is_one(folder: Path) -> None:
    """The cause decides about exit code and message, not which role ends first."""
    (folder / "newest").write_text("mistaken")
    with pytest.raises(RoleFailed) as caught:
        played(folder, never)
    problems = [Problem(str(folder / "newest"), "lacks a weight", "mend it"), Problem("a: b", "another one")]
    assert (caught.value.exit_code, caught.value.role[:-1]) == (2, "engine-")
    assert caught.value.problem == str(DataError(problems))


def test_an_engine_that_is_killed_while_it_starts_is_replaced(folder: Path) -> None:
    said: list[str] = []
    (folder / "newest").write_text("killed 4")

    async def work(fleet: EnginePool) -> int:
        return fleet.live

    assert played(folder, work, count=1, say=said.append) == 4
    assert said == ["engine-0 was killed by SIGKILL (out of memory?): a new one is started"]


@in_fleet(count=1, start=1.0)
async def test_a_replacement_that_is_never_ready_is_replaced(fleet: EnginePool, folder: Path, said: list[str]) -> None:
    (folder / "newest").write_text("hangs 4")
    with pytest.raises(EngineLost):
        await answers(fleet, request("0", DIE))
    (completion,) = await answers(fleet, request("1", answers=1))
    assert completion.versions[0] == 4
    assert "engine-0 to be ready" in said[1]


def test_an_engine_that_stays_silent_is_named_after_its_deadline(folder: Path) -> None:
    with pytest.raises(EngineLost, match=r"the client of engine-0 waited 0\.2 s for the next completion to 0"):
        played(folder, lambda fleet: answers(fleet, request("0", STAY_SILENT)), count=1, answer=0.2)


@in_fleet(count=1)
async def test_an_engine_with_wrong_weights_serves_nothing_until_it_has_ended(fleet: EnginePool) -> None:
    """It answers all the time, and the order to kill it does not arrive at first: its machine is silent."""
    engine = fleet._engines["engine-0"]
    kill, pid = engine.process.kill, engine.process.pid  # type: ignore[attr-defined]
    engine.process.kill = lambda: None  # type: ignore[method-assign]
    fleet._distrust(UnprovenWeights("engine-0", "differs from the trainer", 1), final=False)
    late = asyncio.create_task(answers(fleet, request("late")))
    await asyncio.sleep(0.5)
    assert not late.done()
    engine.process.kill = kill  # type: ignore[method-assign]
    assert [completion.token_ids for completion in await late] == [(0,), (1,)]
    assert engine.process.pid != pid  # type: ignore[attr-defined]


def test_an_engine_that_lies_is_replaced_though_it_answers(folder: Path) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        engine = fleet._engines["engine-0"]
        pid = engine.process.pid  # type: ignore[attr-defined]
        for name in "ab":
            with pytest.raises(EngineLied, match="whose checksum does not fit"):
                await answers(fleet, request(name, LIE))
        assert [completion.token_ids for completion in await answers(fleet, request("c"))] == [(0,), (1,)]
        assert engine.process.pid != pid  # type: ignore[attr-defined]

    played(folder, work, 1, said.append)
    lies = [text for text in said if text.endswith(": it is replaced")]
    assert lies == [f"engine-0 sent tokens of '{name}' whose checksum does not fit: it is replaced" for name in "ab"]


@in_fleet()
async def test_an_engine_that_dies_while_it_leaves_is_let_go_and_the_others_go_on(fleet: EnginePool) -> None:
    engine, asked = fleet._engines["engine-1"], itertools.count()
    ended = engine.process.ended

    async def counted() -> str:
        assert next(asked) < 100, "a loop without an end, and nothing else gets a turn"
        return await ended()

    engine.process.ended = counted  # type: ignore[method-assign]
    engine.begin_leaving()
    os.kill(engine.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    await ended()
    assert [completion.token_ids for completion in await answers(fleet, request("a"))] == [(0,), (1,)]
    await fleet.drain(["engine-1"], "stretto scale")
    assert fleet.names == ["engine-0"]
