"""What is kept beside the ledger, and what a run writes about itself.

- Of each checkpoint there is a policy; one that a kill has cost is written when the run goes on.
- The update goes on as soon as the trainer has written a checkpoint; the next one waits until it is on disk; what it
  fails of is told.
- An evaluation that is under way when the run ends is put away.
- Clocks and counters: the reinforcement clock stands at the last update, evaluations are not for training, a role is
  busy between nothing and all of the time.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest

from stretto.core.errors import CheckpointLost, RoleDied, RunFolderError, StoreError
from stretto.core.records import Completion, Segment, StopReason, Update
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.config import DeadlinesConfig
from stretto.loop.evaluation import PeriodicEvaluation
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.totals import Work
from stretto.loop.trainer_link import TrainerLink
from stretto.rollout.controller import Controller
from stretto.store.checkpoints import Checkpoints
from stretto.store.lock import is_held
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import read_metrics
from stretto.trainer.config import TrainerConfig
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import wait_until
from tests.loop.desk import UPDATE, Desk


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


def test_an_accuracy_without_one_verdict_is_unknown_on_record(desk: Desk) -> None:
    unknown = Evaluation(version=0, prompts=4, right=0, undecided=4, tokens=8)
    for step in (0, 1):
        desk.recorder.evaluated(unknown, step)
    assert (desk.recorder.initial_accuracy, desk.recorder.final_accuracy) == (None, None)
    assert str(unknown) == "accuracy –: 0 of 4 right, 4 undecided"
    assert '"accuracy":null' in unknown.as_json()


def test_tokens_of_an_evaluation_are_never_counted_as_generated_for_training(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=100)
    desk.recorder.polled()
    assert desk.recorder.totals().generated == 100
    evaluated = Completion("evaluation.1", 0, Segment.of((7,) * 20, stop_reason=StopReason.STOP))
    desk.recorder.evaluation_sampled(evaluated)  # sampled after that poll: not among the 100
    assert desk.recorder.totals().generated == 100
    desk.work = Work(generated=130)
    desk.recorder.polled()
    assert desk.recorder.totals().generated == 110  # while it goes on, and if it is cut short
    desk.recorder.evaluated(evaluation(tokens=20), 1)
    assert desk.recorder.totals().generated == 110


def test_tokens_of_answers_that_were_stopped_at_the_end_are_wasted(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=2)
    desk.one_step()
    desk.work = Work(generated=9, stopped=7)  # the answers in flight were cut off
    tokens = desk.concluded().tokens
    assert (tokens.generated, tokens.trained, tokens.wasted) == (9, 2, 7)


def test_a_role_is_busy_between_nothing_and_all_of_the_time(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(busy={"trainer": 100.0, "engine-0": 0.0})
    desk.recorder.polled()
    desk.work = Work(busy={"trainer": 99.9, "engine-0": 0.0})
    desk.one_step()
    desk.recorder.polled()
    (step,), _ = read_metrics(desk.folder.metrics)
    assert step.busy == {"trainer": 1.0, "engine-0": 0.0}


def test_an_engine_that_has_left_is_none_that_is_idle(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(busy={"engine-0": 100.0, "engine-1": 100.0}, left={"engine-1"})
    desk.recorder.polled()
    desk.one_step()
    (step,), _ = read_metrics(desk.folder.metrics)
    assert step.busy == {"engine-0": 1.0}


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
    desk: Desk, trainer: ToyTrainer, published: int, disk: Checkpoints | None = None, save: float = 600.0
) -> Checkpointing:
    """Of a run that has published this version, and has a first policy."""
    desk.folder.policy(0).mkdir()
    return Checkpointing(
        desk.folder,
        disk or Checkpoints(desk.folder.checkpoints),
        TrainerConfig(keep_versions=1, checkpoint_every=2),
        cast(TrainerLink, trainer),
        cast(Controller, Published(published)),
        desk.ledger,
        DeadlinesConfig(save=save),
    )


def updated(step: int) -> Update:
    return msgspec.structs.replace(UPDATE, step=step, version=step)


async def test_the_update_goes_on_while_a_checkpoint_is_on_its_way_to_disk(desk: Desk) -> None:
    trainer, disk = ToyTrainer(), SlowDisk(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, trainer, 2, disk)

    await checkpointing.after(updated(2))  # the disk does not let anything through yet
    assert trainer.saved == [".step-000002.part", "v000002"]
    assert (checkpointing.saved_step, disk.steps()) == (0, [])
    cast(Published, checkpointing._controller).published = 4
    following = asyncio.create_task(checkpointing.after(updated(4)))
    await asyncio.sleep(0.05)
    assert len(trainer.saved) == 2, "one checkpoint at a time"
    disk.let.set()
    await following
    await checkpointing.save_checkpoint()
    assert (checkpointing.saved_step, disk.steps()) == (4, [2, 4])


async def test_a_checkpoint_that_does_not_come_to_disk_ends_the_run_at_the_next_step(desk: Desk) -> None:
    disk = SlowDisk(desk.folder.checkpoints)
    checkpointing, disk.full = checkpointing_of(desk, ToyTrainer(), 2, disk), True

    await checkpointing.after(updated(2))
    disk.let.set()
    await asyncio.sleep(0.2)
    with pytest.raises(StoreError, match=r"step-000002: the checkpoint cannot be written: No space left on device"):
        await checkpointing.after(updated(3))
    assert checkpointing.saved_step == 0


async def test_a_step_whose_checkpoint_is_lost_with_the_trainer_has_none_and_the_next_one_has(desk: Desk) -> None:
    disk = Checkpoints(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, ToyTrainer(dies=1), 2, disk)

    await checkpointing.after(updated(2))
    await checkpointing.end()
    assert (checkpointing.saved_step, disk.steps()) == (0, [])
    cast(Published, checkpointing._controller).published = 3
    await checkpointing.after(updated(3))  # which would have none of its own
    await checkpointing.end()
    assert (checkpointing.saved_step, disk.steps()) == (3, [3])


async def test_a_trainer_that_dies_of_every_checkpoint_ends_the_run(desk: Desk) -> None:
    often = DeadlinesConfig().trainer_restarts
    checkpointing = checkpointing_of(desk, ToyTrainer(dies=99), 2)

    for step in range(2, 2 + often):
        await checkpointing.after(updated(step))
        await checkpointing.end()
    await checkpointing.after(updated(2 + often))
    with pytest.raises(CheckpointLost, match=r"was not written: trainer was killed"):
        await checkpointing.end()


def test_the_last_checkpoint_is_written_by_the_trainer_that_takes_the_place_of_a_dead_one(desk: Desk) -> None:
    disk = Checkpoints(desk.folder.checkpoints)
    checkpointing = checkpointing_of(desk, ToyTrainer(dies=2), 3, disk)
    asyncio.run(checkpointing.save_checkpoint())
    assert (checkpointing.saved_step, disk.steps()) == (3, [3])


async def test_a_checkpoint_on_its_way_is_awaited_when_the_run_ends(desk: Desk) -> None:
    disk, told = SlowDisk(desk.folder.checkpoints), list[str]()
    checkpointing = checkpointing_of(desk, ToyTrainer(), 2, disk)

    await checkpointing.after(updated(2))
    asyncio.get_running_loop().call_later(0.1, disk.let.set)
    await checkpointing.close(told.append)
    assert (checkpointing.saved_step, disk.steps()) == (0, [2])
    assert told == ["waits for the checkpoint of step 2 to be on disk, for 600 s at most"]


@pytest.mark.parametrize(("save", "left_by"), [(0.2, None), (600.0, asyncio.CancelledError)], ids=["end", "cut short"])
def test_a_disk_that_holds_a_checkpoint_up_holds_up_the_end_of_a_run_for_a_deadline_at_most(
    desk: Desk, save: float, left_by: type[BaseException] | None
) -> None:
    disk, began = SlowDisk(desk.folder.checkpoints), time.monotonic()
    checkpointing = checkpointing_of(desk, ToyTrainer(), 2, disk, save)

    async def run() -> None:
        await checkpointing.after(updated(2))
        await checkpointing.close(print, left_by)

    asyncio.run(run())
    assert time.monotonic() - began < 5
    assert disk.steps() == []
    desk.ledger.close()
    desk.folder.release()
    with pytest.raises(RunFolderError, match="is in use by process"):  # the thread would write into the next one's
        RunFolder.resume(desk.folder.path)
    disk.let.set()
    wait_until(lambda: not is_held(desk.folder.path), "the end of the thread")
    assert disk.steps() == [2]
    RunFolder.resume(desk.folder.path).release()


async def test_a_policy_that_is_missing_is_written_when_the_run_goes_on(desk: Desk) -> None:
    trainer = ToyTrainer()
    checkpointing = checkpointing_of(desk, trainer, 4)

    await checkpointing.save_policy(4)
    await checkpointing.save_policy(4)
    assert trainer.saved == ["v000004"]


async def test_the_newest_policy_stays_though_its_number_has_a_digit_more(desk: Desk) -> None:
    checkpointing = checkpointing_of(desk, ToyTrainer(), 1_000_000)
    for version in (999_998, 1_000_000):
        await checkpointing.save_policy(version)
    assert sorted(path.name for path in desk.folder.policies.iterdir()) == ["v000000", "v1000000"]


async def test_an_evaluation_under_way_is_put_away(desk: Desk) -> None:
    cut_off: list[bool] = []

    async def lasting() -> Evaluation:
        try:
            await asyncio.sleep(60)
        finally:
            cut_off.append(True)
        return evaluation()

    async def broken() -> Evaluation:
        raise RoleDied("rewards", "was closed")

    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    for evaluate in (lasting, broken):
        evaluating = PeriodicEvaluation(evaluate, desk.recorder, every=1)
        evaluating.after(UPDATE)
        await asyncio.sleep(0.01)
        await evaluating.close()
        del evaluating
    assert complaints == []
    assert cut_off == [True]


async def test_an_order_under_way_counts_as_work(tmp_path: Path) -> None:
    link, start = TrainerLink(tmp_path / "log.txt", DeadlinesConfig()), time.monotonic()
    assert link.busy_seconds == 0.0
    async with link._order():
        await asyncio.sleep(0.02)
        assert 0.019 <= link.busy_seconds <= time.monotonic() - start  # timers may be a millisecond early
    assert link.busy_seconds == 0.0
    link._channel.close()
