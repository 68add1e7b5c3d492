"""Whole runs on a virtual clock, in which everything goes wrong: ``python -m tests.faults.simulation SEED`` plays one.

The conductor, the controller, the buffer, the completions in flight and the ledger (a SQLite file) are the real ones,
in an event loop whose time jumps. Engines, rewards and the trainer are made up: slow, reordered, replying twice, dying
in mid-completion; and the conductor is killed, with everything it had not written. One seed is one schedule.

The weights of the made-up trainer are a checksum over every batch that led to them: so it shows whether a run that goes
on stands exactly where the one before stood.
"""

import asyncio
import random
import selectors
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import xxhash

from stretto.core.engine import Generate
from stretto.core.events import Span
from stretto.core.records import Batch, Prompt, Sampling, Trajectory, Update
from stretto.core.states import OPEN
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.conductor import Conductor
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.in_flight import InFlight, restore
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.rounds import Rounds
from stretto.loop.evaluation import Evaluations
from stretto.loop.records.recorder import Recorder
from stretto.loop.trainer_link import TrainerLink
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.pacing import Continuous, InRounds
from stretto.rollout.prompts import PromptStream
from stretto.rollout.single_turn import SingleTurn
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step, read_batches, read_unfinished
from stretto_report.audit.check import check_run
from stretto_report.audit.history import read_history
from tests.faults.engines import CompanyMatters, Engines
from tests.faults.schedule import Schedule
from tests.store.make import spelled

_VIRTUAL_SECONDS = 5_000.0


class Killed(BaseException):
    """The conductor is gone, in the middle of whatever it did."""


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: what would be waited for is added to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again: somebody waits without a deadline")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which a day takes as long as its decisions take."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def after(weights: int, batch: Batch) -> int:
    """The made-up weights: they depend on every byte of every batch, and on their order."""
    groups = [(g.id, g.prompt.token_ids, [(t.segments, t.verdict) for t in g.trajectories]) for g in batch.groups]
    content = msgspec.msgpack.encode((weights, batch.step, batch.oldest_trainable, groups))
    return xxhash.xxh3_64_intdigest(content)


@dataclass
class World:
    """What outlives a conductor: the file, the checkpoints, and the truth about which weights there ever were."""

    schedule: Schedule
    folder: Path
    checkpoints: dict[int, int] = field(default_factory=lambda: {0: 0})
    truth: dict[int, int] = field(default_factory=lambda: {0: 0})
    kills: int = 0

    def train(self, weights: int, batch: Batch) -> int:
        """One step; the same step must come to the same weights, however often it is done."""
        weights = after(weights, batch)
        expected = self.truth.setdefault(batch.step, weights)
        assert weights == expected, f"step {batch.step} was done again and came to other weights"
        return weights


@dataclass
class Toys:
    """Trainer, checkpointing, recorder and evaluation of one life of the conductor."""

    world: World
    chance: random.Random
    ledger: Ledger
    weights: int
    version: int
    refused: int = 0

    async def train(self, batch: Batch) -> Update:
        await asyncio.sleep(self.chance.expovariate(1 / self.world.schedule.step_seconds))
        assert batch.version == self.version
        self.weights, self.version = self.world.train(self.weights, batch), batch.step
        tokens = [v for g in batch.groups for t in g.trajectories for v in t.versions]
        trained = sum(version >= batch.oldest_trainable for version in tokens)
        return Update(batch.step, batch.step, trained, len(tokens) - trained, {})

    async def published(self, version: int) -> None:
        """Written beside the next step, which may end first."""
        await asyncio.sleep(self.chance.expovariate(1 / self.world.schedule.step_seconds))

    async def after(self, update: Update) -> None:
        if update.step % self.world.schedule.checkpoint_every == 0:
            await asyncio.sleep(self.chance.random() * 0.3)
            self.ledger.sync()
            self.world.checkpoints[update.step] = self.weights

    def judged(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None: ...

    def left_over(self, tokens: int) -> None: ...

    def taken(self, queues: Mapping[str, float], max_staleness: float | None = None) -> None: ...

    def updated(self, batch: Batch, update: Update) -> None:
        self.ledger.record_update(update)

    def spans(self, spans: Sequence[Span]) -> None: ...

    def polled(self) -> None:
        self.ledger.flush()

    def filtered(self, sentence: str) -> None: ...

    def gives_up(self) -> None: ...

    def check(self) -> None: ...

    async def poll(self, patience: float | None) -> list[Span]:
        return []


class _Evaluation(Toys):
    enough = False

    def after(self, update: Update) -> None: ...  # type: ignore[override]  # that of an evaluation is no coroutine

    def keeps(self, update: Update) -> bool:
        return False

    def due(self, update: Update) -> bool:
        return False


def play(seed: int, folder: Path) -> World:
    """The schedule of a seed; see `play_schedule`."""
    return play_schedule(Schedule.of(seed), folder)


def play_schedule(schedule: Schedule, folder: Path) -> World:
    """One schedule to its end, however often the conductor is killed on the way.

    Raises:
        AssertionError: a promise was broken.
    """
    world = World(schedule, folder)
    bound = "inf" if schedule.rollout.max_staleness == float("inf") else float(schedule.rollout.max_staleness)
    settings = schedule.rollout.model_dump() | {"max_staleness": bound}
    lines = (f"{key} = {_toml(value) if value != 'inf' else value}" for key, value in settings.items())
    (folder / "recipe.toml").write_text("[rollout]\n" + "\n".join(lines) + "\n")
    (folder / "policy").mkdir()
    while not _live(world):
        world.kills += 1
        _assert_kept(world)
    _assert_kept(world)
    return world


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _assert_kept(world: World) -> None:
    broken = {law: found for law, found in check_run(world.folder).breaches.items() if found}
    assert not broken, f"after {world.kills} kills: {broken}"


def _live(world: World) -> bool:
    """One life of the conductor; False: it was killed."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(asyncio.wait_for(_conduct(world), _VIRTUAL_SECONDS))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _conduct(world: World) -> bool:
    schedule, loop = world.schedule, asyncio.get_running_loop()
    chance = random.Random(schedule.seed * 1_000 + world.kills)
    path = world.folder / "ledger.sqlite"
    ledger = Ledger(path, StoreConfig(), clock=loop.time)
    version = last_step(path)
    known = max(step for step in world.checkpoints if step <= version)
    weights = world.checkpoints[known]
    for batch in read_batches(path, known, version):
        weights = world.train(weights, batch)
        if batch.step > ledger.last_update():
            ledger.record_update(Update(batch.step, batch.step, 0, 0, {}))
    state = ledger.get("standing", ControllerState) or ControllerState()
    prompts = [Prompt(id=str(i), token_ids=(i,), text="", answer="") for i in range(schedule.prompts)]
    stream = PromptStream(prompts, schedule.seed, state.position)
    pacing = (InRounds() if schedule.rounds else Continuous()).opens
    controller = Controller(schedule.rollout, stream, ledger, schedule.seed, version, pacing)
    restored = restore(controller, state, read_unfinished(path))
    ledger.watch("standing", controller.state)
    engines = (CompanyMatters if schedule.rounds else Engines)(schedule, chance, version)
    rounds = (
        Rounds(cast(Generate, engines.generate), lambda: controller.tickets, schedule.engines)
        if schedule.rounds
        else None
    )
    in_flight = InFlight(engines, ledger, restored) if rounds is None else InFlight(rounds, journal=None)
    workflow = SingleTurn(in_flight.generate, engines.score, spelled, Sampling(max_tokens=16))
    toys = Toys(world, chance, ledger, weights, version)
    conductor = Conductor(
        controller=controller,
        workflow=workflow if rounds is None else rounds.together(workflow),
        engines=cast(EnginePool, engines),
        trainer=cast(TrainerLink, toys),
        in_flight=in_flight,
        recorder=cast(Recorder, toys),
        checkpointing=cast(Checkpointing, toys),
        evaluation=cast(Evaluations, _Evaluation(world, chance, ledger, weights, version)),
        poll=toys.poll,
        progress=lambda: len(engines.writing),
        steps=schedule.steps,
        deadlines=DeadlinesConfig(),
    )
    life = chance.expovariate(schedule.kill_rate) if schedule.kill_rate and world.kills < 6 else 1e9
    run = asyncio.ensure_future(conductor.run())
    await asyncio.wait([run], timeout=life)
    if not run.done():
        ledger._connection.close()  # what it had not written is gone
        ledger._broken = None
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return False
    run.result()
    ledger.close()
    open_groups = {a.group for a in read_history(world.folder).trajectories if a.state in OPEN}
    assert len(open_groups) == controller.in_flight + controller.buffered, f"forgotten: some of {open_groups}"
    return True


def main(arguments: Sequence[str]) -> None:
    """Play the seeds ``FIRST`` or ``FIRST LAST``; the first that fails ends it with its seed."""
    first, last = int(arguments[0]), int(arguments[-1])
    kills = 0
    for seed in range(first, last + 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                kills += play(seed, Path(folder)).kills
            except BaseException:
                print(f"seed {seed} fails; once more: python -m tests.faults.simulation {seed}\n{Schedule.of(seed)}")
                raise
    print(f"{last - first + 1} schedules, {kills} kills of the conductor: every law was kept")


if __name__ == "__main__":
    main(sys.argv[1:])
