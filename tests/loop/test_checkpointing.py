"""What is kept beside the ledger, and what a run writes about itself.

- Of each checkpoint there is a policy; one that a kill has cost is written when the run goes on.
- The update goes on as soon as the trainer has written a checkpoint; the next one waits until it is on disk; what it
  fails of is told.
- An evaluation that is under way when the run ends is put away.
- Clocks and counters: the reinforcement clock stands at the last update, evaluations are not for training, a role is
  busy between nothing and all of the time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest

from stretto.core.errors import CheckpointLost, RoleDied, StoreError
from stretto.core.records import (
    Batch,
    Completion,
    Group,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Update,
    Verdict,
)
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.config import DeadlinesConfig
from stretto.loop.evaluation import PeriodicEvaluation
from stretto.loop.learner.link import TrainerLink
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.records.totals import RunClock, Work
from stretto.rollout.controller import Controller
from stretto.store.folder.checkpoints import Checkpoints
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import inspect_run
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import read_metrics
from stretto.store.totals import Totals
from stretto.trainer.config import TrainerConfig

PROMPT = Prompt(id="17", token_ids=(5,), text="3+8=", answer="11")
UPDATE = Update(step=1, version=1, trained_tokens=2, masked_tokens=0, metrics={})


def batch() -> Batch:
    completion = Completion(
        "0.17.0",
        0,
        Segment.of(token_ids=(1, 2), behavior_logprobs=(-0.1, -0.2), versions=(0, 0), stop_reason=StopReason.STOP),
    )
    verdict = Verdict(outcome=Outcome.RIGHT, reward=1.0)
    trajectory = Trajectory(id="0.17.0/0", segments=(completion.segment,), verdict=verdict, text="11")
    return Batch(
        step=1, version=0, groups=(Group(id="0.17.0", prompt=PROMPT, admitted_version=0, trajectories=(trajectory,)),)
    )


class Counters:
    """What the roles have done; a test sets it."""

    def __init__(self) -> None:
        self.work = Work()

    def __call__(self) -> Work:
        return self.work


class Desk:
    """A recorder with its folder and its ledger."""

    def __init__(self, folder: RunFolder, ledger: Ledger) -> None:
        self.folder, self.ledger, self.counters = folder, ledger, Counters()
        earlier = Totals(max_staleness=None)
        clock = RunClock(earlier, time.monotonic())
        self.recorder = Recorder(folder, ledger, SilentReporter(), self.counters, 1, earlier, clock)

    def one_step(self) -> None:
        (group,) = batch().groups
        self.ledger.issue(group.id, PROMPT, 1, 0)
        self.ledger.buffer(group)
        self.ledger.commit_batch(batch())
        self.recorder.updated(batch(), UPDATE)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with RunFolder.create(tmp_path / "run") as folder, closing(Ledger(folder.ledger, StoreConfig())) as ledger:
        yield Desk(folder, ledger)


def evaluation(tokens: int = 8) -> Evaluation:
    return Evaluation(version=1, prompts=4, right=3, undecided=0, tokens=tokens)


def test_the_last_evaluation_is_dated_by_the_last_update(desk: Desk) -> None:
    desk.recorder.rl_begins()
    time.sleep(0.01)
    desk.one_step()
    time.sleep(0.05)
    desk.recorder.rl_ends()
    desk.recorder.evaluated(evaluation(), 1)
    desk.recorder.conclude()
    (step,), (measured,) = read_metrics(desk.folder.metrics)
    desk.ledger.flush()
    assert 0.01 <= step.rl_seconds == measured.rl_seconds == inspect_run(desk.folder.path).rl_seconds


def test_tokens_of_an_evaluation_are_never_counted_as_generated_for_training(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.counters.work = Work(generated=100)
    desk.recorder.polled()
    assert desk.recorder.totals().generated == 100
    tokens = Segment.of((7,) * 20, stop_reason=StopReason.STOP)
    evaluated = Completion("evaluation.1", 0, tokens)
    desk.recorder.evaluation_sampled(evaluated)  # sampled after that poll: not among the 100
    assert desk.recorder.totals().generated == 100
    desk.counters.work = Work(generated=130)
    desk.recorder.polled()
    assert desk.recorder.totals().generated == 110  # while it goes on, and if it is cut short
    desk.recorder.evaluated(evaluation(tokens=20), 1)
    assert desk.recorder.totals().generated == 110


def test_tokens_of_answers_that_were_stopped_at_the_end_are_wasted(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.counters.work = Work(generated=2)
    desk.one_step()
    desk.counters.work = Work(generated=9, stopped=7)  # the answers in flight were cut off
    desk.recorder.rl_ends()
    desk.recorder.conclude()
    desk.ledger.flush()
    tokens = inspect_run(desk.folder.path).tokens
    assert (tokens.generated, tokens.trained, tokens.wasted) == (9, 2, 7)


def test_a_role_is_busy_between_nothing_and_all_of_the_time(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.counters.work = Work(busy={"trainer": 100.0, "engine-0": 0.0})
    desk.recorder.polled()
    desk.counters.work = Work(busy={"trainer": 99.9, "engine-0": 0.0})
    desk.one_step()
    desk.recorder.polled()
    (step,), _ = read_metrics(desk.folder.metrics)
    assert step.busy == {"trainer": 1.0, "engine-0": 0.0}


class ToyTrainer:
    """Writes empty policies and checkpoints."""

    def __init__(self, dies: int = 0) -> None:
        """`dies`: as often, before a checkpoint is written."""
        self.saved: list[str] = []
        self.dies = dies

    async def save_policy(self, folder: Path) -> None:
        self.saved.append(folder.name)
        folder.mkdir()

    async def save_checkpoint(self, folder: Path, on_copied: Callable[[], None]) -> None:
        self.saved.append(folder.name)
        on_copied()
        if self.dies:
            self.dies -= 1
            raise CheckpointLost(folder.name, "trainer was killed")


@dataclass
class Published:
    """All that checkpointing asks of a controller."""

    published: int = 4


class SlowDisk(Checkpoints):
    """A disk on which nothing is before `let` is set; a full one, if it is told so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let, self.full = threading.Event(), False

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        def slowly(folder: Path) -> None:
            write(folder)
            assert self.let.wait(10)
            if self.full:
                raise OSError(28, "No space left on device")

        return super().save(step, slowly)


def checkpointing_of(
    desk: Desk, trainer: ToyTrainer, controller: Published, checkpoints: Checkpoints | None = None
) -> Checkpointing:
    return Checkpointing(
        desk.folder,
        checkpoints or Checkpoints(desk.folder.checkpoints),
        TrainerConfig(keep_versions=1, checkpoint_every=2),
        cast(TrainerLink, trainer),
        cast(Controller, controller),
        desk.ledger,
        DeadlinesConfig(),
    )


def updated(step: int) -> Update:
    return msgspec.structs.replace(UPDATE, step=step, version=step)


def test_the_update_goes_on_while_a_checkpoint_is_on_its_way_to_disk(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    trainer, controller, disk = ToyTrainer(), Published(2), SlowDisk(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, trainer, controller, disk)

    async def keep() -> None:
        await checkpointing.after(updated(2))  # the disk does not let anything through yet
        assert trainer.saved == [".step-000002.part", "v000002"]
        assert (checkpointing.saved_step, disk.steps()) == (0, [])
        controller.published = 4
        following = asyncio.create_task(checkpointing.after(updated(4)))
        await asyncio.sleep(0.05)
        assert len(trainer.saved) == 2, "one checkpoint at a time"
        disk.let.set()
        await following
        await checkpointing.save_checkpoint()
        assert (checkpointing.saved_step, disk.steps()) == (4, [2, 4])

    asyncio.run(keep())


def test_a_checkpoint_that_does_not_come_to_disk_ends_the_run_at_the_next_step(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    trainer, controller, disk = ToyTrainer(), Published(2), SlowDisk(desk.folder.checkpoints)
    checkpointing, disk.full = checkpointing_of(desk, trainer, controller, disk), True

    async def keep() -> None:
        await checkpointing.after(updated(2))
        disk.let.set()
        await asyncio.sleep(0.2)
        with pytest.raises(StoreError, match=r"step-000002: the checkpoint cannot be written: No space left on device"):
            await checkpointing.after(updated(3))
        assert checkpointing.saved_step == 0

    asyncio.run(keep())


def test_a_step_whose_checkpoint_is_lost_with_the_trainer_has_none_and_the_next_one_has(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    trainer, controller, disk = ToyTrainer(dies=1), Published(2), Checkpoints(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, trainer, controller, disk)

    async def keep() -> None:
        await checkpointing.after(updated(2))
        await checkpointing.end()
        assert (checkpointing.saved_step, disk.steps()) == (0, [])
        controller.published = 3
        await checkpointing.after(updated(3))  # which would have none of its own
        await checkpointing.end()
        assert (checkpointing.saved_step, disk.steps()) == (3, [3])

    asyncio.run(keep())


def test_a_trainer_that_dies_of_every_checkpoint_ends_the_run(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    often = DeadlinesConfig().trainer_restarts
    checkpointing = checkpointing_of(desk, ToyTrainer(dies=99), Published(2))

    async def keep() -> None:
        for step in range(2, 2 + often):
            await checkpointing.after(updated(step))
            await checkpointing.end()
        await checkpointing.after(updated(2 + often))
        with pytest.raises(CheckpointLost, match=r"was not written: trainer was killed"):
            await checkpointing.end()

    asyncio.run(keep())


def test_the_last_checkpoint_is_written_by_the_trainer_that_takes_the_place_of_a_dead_one(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    trainer, disk = ToyTrainer(dies=2), Checkpoints(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, trainer, Published(3), disk)
    asyncio.run(checkpointing.save_checkpoint())
    assert (checkpointing.saved_step, disk.steps()) == (3, [3])


def test_a_checkpoint_on_its_way_is_put_away_when_the_run_ends(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    disk = SlowDisk(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, ToyTrainer(), Published(2), disk)

    async def keep() -> None:
        await checkpointing.after(updated(2))
        await checkpointing.close()
        assert checkpointing.saved_step == 0
        disk.let.set()  # its thread ends by itself

    asyncio.run(keep())


def test_a_policy_that_is_missing_is_written_when_the_run_goes_on(desk: Desk) -> None:
    desk.folder.policy(0).mkdir()
    trainer = ToyTrainer()
    checkpointing = checkpointing_of(desk, trainer, Published(4))

    async def twice() -> None:
        await checkpointing.save_policy(4)
        await checkpointing.save_policy(4)

    asyncio.run(twice())
    assert trainer.saved == ["v000004"]


def test_an_evaluation_under_way_is_put_away(desk: Desk) -> None:
    cut_off: list[bool] = []

    async def lasting() -> Evaluation:
        try:
            await asyncio.sleep(60)
        finally:
            cut_off.append(True)
        return evaluation()

    async def broken() -> Evaluation:
        raise RoleDied("rewards", "was closed")

    async def main() -> list[str]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        for evaluate in (lasting, broken):
            evaluating = PeriodicEvaluation(evaluate, desk.recorder, every=1)
            evaluating.after(UPDATE)
            await asyncio.sleep(0.01)
            await evaluating.close()
            del evaluating
        return complaints

    assert asyncio.run(main()) == []
    assert cut_off == [True]


def test_an_order_under_way_counts_as_work(tmp_path: Path) -> None:
    start = time.monotonic()

    async def main() -> AsyncIterator[float]:
        link = TrainerLink(tmp_path / "log.txt", DeadlinesConfig())
        yield link.busy_seconds
        async with link._order():
            await asyncio.sleep(0.02)
            yield link.busy_seconds
        yield link.busy_seconds
        link._channel.close()

    async def collected() -> list[float]:
        return [seconds async for seconds in main()]

    before, under_way, after = asyncio.run(collected())
    assert (before, after) == (0.0, 0.0)
    assert 0.02 <= under_way <= time.monotonic() - start
