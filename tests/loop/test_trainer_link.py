"""The trainer as the conductor sees it, with toy trainers in real processes.

- One that dies or hangs is replaced, whatever it was doing, while it takes up the batches of its predecessor too.
- Once it is told to stop, no other one is started, whatever dies and whatever waits for a reply.
- It makes progress while it answers or computes; a step that hangs is no progress.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from stretto.core.errors import CheckpointLost, RoleDied, RoleFailed
from stretto.core.records import Batch, Sampling
from stretto.loop.config import DeadlinesConfig
from stretto.loop.recovery import Recovery
from stretto.loop.trainer_link import TrainerLink
from stretto.processes.spawn import Spawner
from stretto.store.run_folder import RunFolder
from stretto.trainer.messages import TrainerSpec
from stretto_app.forking import server as fork_server
from tests.asynchronous import Test, run_by, until
from tests.launch.running import children, wait_until
from tests.launch.warm import children_of
from tests.loop.forking import TRAINER, toys

T = TypeVar("T")
BATCH = Batch(step=1, version=0, groups=(), oldest_trainable=0)
NEXT = Batch(step=2, version=1, groups=(), oldest_trainable=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that wait for a reply have a tenth of a second to get the error first."""
    monkeypatch.setattr("stretto.loop.trainer_link._LAST_REPLY_SECONDS", 0.1)


def played(
    folder: Path,
    parts: list[str],
    work: Callable[[TrainerLink], Awaitable[T]],
    say: Callable[[str], None] = print,
    spawner: Spawner | None = None,
    **deadlines: float,
) -> T:
    """Start a trainer that plays the first of the parts (see `toy_trainer`), whose replacements play the others."""
    (folder / "script").write_text("\n".join(parts))
    spec = TrainerSpec(str(folder / "script"), "toy", str(folder), "{}", "{}", Sampling(max_tokens=4), threads=1)
    server = toys()
    before, played = children(), children_of(server.pid)

    async def main(run: RunFolder) -> T:
        settings = DeadlinesConfig.model_validate({"start": 20.0, "step": 20.0} | deadlines)
        past, spawns = Recovery(run, 2), spawner or server
        link = TrainerLink(folder / "log.txt", settings, past, role=TRAINER, spawner=spawns, say=say)
        try:
            await link.start(spec)
            return await work(link)
        finally:
            await link.stop(0.1)

    try:
        with RunFolder.create(folder / "run") as run:
            return asyncio.run(asyncio.wait_for(main(run), 60))
    finally:
        assert set(children()) <= set(before)  # a spawner that hangs is ended too
        wait_until(lambda: children_of(server.pid) == played, "the end of the trainers")


def linked(parts: list[str], **deadlines: float) -> Callable[[Test], Callable[..., None]]:
    """For a test with a link to a trainer that plays these parts; its reports are in `said`."""

    def run(work: Callable[[TrainerLink], Awaitable[None]], tmp_path: Path, said: list[str]) -> None:
        played(tmp_path, parts, work, said.append, None, **deadlines)

    return run_by(run)


def still_to_play(folder: Path) -> list[str]:
    return (folder / "script").read_text().splitlines()


def replaced(folder: Path, parts: list[str], spawner: Spawner | None = None, hung: float = 10.0) -> list[str]:
    """What is said of a first step that the last of these trainers does."""
    said: list[str] = []
    done = played(folder, parts, lambda link: link.train(BATCH), said.append, spawner, hung=hung)
    assert (done.step, still_to_play(folder)) == (1, [])
    return said


DIED = "trainer ended with exit code 9: a new one is started at version 0"
KILLED = "trainer was killed by SIGKILL (out of memory?): a new one is started at version 0"


@pytest.mark.parametrize(
    ("parts", "said"), [(["dies", "works"], [DIED]), (["is killed", "is killed", "works"], [KILLED] * 2)]
)
def test_a_trainer_that_dies_in_a_step_or_before_it_is_ready_is_replaced(
    tmp_path: Path, parts: list[str], said: list[str]
) -> None:
    assert replaced(tmp_path, parts) == said


def test_a_dead_trainer_is_replaced_while_a_fork_server_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer that it did not fork is one with an interpreter of its own; its end of the wire lies in the server's
    queue as well."""
    monkeypatch.setattr(fork_server, "_STALL_SECONDS", 0.3)
    server = fork_server.ForkServer([])
    try:
        os.kill(server.pid, signal.SIGSTOP)
        assert replaced(tmp_path, ["dies", "works"], server) == [DIED]
    finally:
        server.close()


def test_a_replacement_that_hangs_before_it_is_ready_is_replaced_as_well(tmp_path: Path) -> None:
    _, hung = replaced(tmp_path, ["dies", "hangs", "works"], hung=1.5)
    assert "sent no heartbeat for 2 s and was killed" in hung


@linked(["lags"])
async def test_steps_go_on_while_a_version_is_written(link: TrainerLink) -> None:
    await link.published(0)
    await link.train(BATCH)
    first = asyncio.create_task(link.published(1))
    await asyncio.sleep(0.05)
    early = first.done()
    second = await link.train(NEXT)
    await asyncio.wait_for(asyncio.gather(first, link.published(2)), 5)
    assert (early, first.done(), second.version == 2) == (False, True, True)


@linked(["lags"])
async def test_a_version_that_is_written_is_forgotten_once_there_is_a_newer_one(link: TrainerLink) -> None:
    for batch in (BATCH, NEXT):
        await link.train(batch)
    await link.published(2)
    assert set(cast(Any, link)._replies._writing) <= {"version 2"}


def test_a_version_that_a_dead_trainer_had_not_written_is_written_by_its_replacement(tmp_path: Path) -> None:
    class WithoutCheckpoint:
        def newest(self, version: int) -> None:
            assert version == 1

        def batch(self, step: int) -> Batch:
            raise AssertionError(step)

    async def work(link: TrainerLink) -> tuple[bool, int]:
        cast(Any, link)._recovery = WithoutCheckpoint()  # there is no ledger
        await link.train(BATCH)
        waiting = asyncio.create_task(link.published(1))
        await asyncio.sleep(0.05)
        early = waiting.done()
        await asyncio.gather(link.train(NEXT), waiting)
        await link.published(2)
        return early, len(still_to_play(tmp_path))

    assert played(tmp_path, ["keeps", "goes on"], work) == (False, 0)


def test_a_version_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    async def in_the_next_step(link: TrainerLink) -> None:
        await link.train(BATCH)
        await link.train(NEXT)

    async def without_one(link: TrainerLink) -> None:
        await link.train(BATCH)
        await asyncio.wait_for(link.supervise(), 10)

    for work in (in_the_next_step, without_one):
        with pytest.raises(RoleFailed, match="version 1 cannot be published: no space left"):
            played(tmp_path, ["fails"], work)
        shutil.rmtree(tmp_path / "run")


@linked(["writes"])
async def test_steps_go_on_while_a_checkpoint_is_written(link: TrainerLink, tmp_path: Path) -> None:
    copied = asyncio.Event()
    saving = asyncio.create_task(link.save_checkpoint(tmp_path / "step-000001", copied.set))
    await copied.wait()
    await asyncio.sleep(0.05)
    early = saving.done()
    update = await link.train(BATCH)  # the toy writes when it has this order, and says so before it answers
    await saving
    assert (early, update.step) == (False, 1)


@linked(["writes nothing", "works"])
async def test_a_checkpoint_whose_trainer_dies_is_lost_and_the_run_goes_on(link: TrainerLink, tmp_path: Path) -> None:
    with pytest.raises(CheckpointLost, match="the checkpoint step-000001 was not written: trainer"):
        await link.save_checkpoint(tmp_path / "step-000001")
    await link.save_checkpoint(tmp_path / "step-000001")
    assert (await link.train(BATCH)).step == 1


@linked(["cannot write"])
async def test_a_checkpoint_that_cannot_be_written_is_an_error_with_a_code(link: TrainerLink, tmp_path: Path) -> None:
    with pytest.raises(RoleFailed, match="trainer: no space left") as caught:
        await link.save_checkpoint(tmp_path / "step-000001")
    assert caught.value.exit_code == 1


def test_a_trainer_that_dies_too_often_before_it_is_ready_ends_the_run(tmp_path: Path) -> None:
    async def work(link: TrainerLink) -> None:
        raise AssertionError("it has not started")

    with pytest.raises(RoleDied, match=r"trainer was killed by SIGKILL"):
        played(tmp_path, ["is killed", "is killed", "works"], work, trainer_restarts=1)
    assert still_to_play(tmp_path) == ["works"]


@linked(["works", "works"])
async def test_a_trainer_that_ends_while_nobody_wants_anything_is_replaced(link: TrainerLink, tmp_path: Path) -> None:
    watch = asyncio.create_task(link.supervise())
    link.process.kill()
    await until(lambda: not still_to_play(tmp_path))
    update = await link.train(BATCH)
    watch.cancel()
    assert update.step == 1


@pytest.mark.parametrize("idle", [True, False])
@linked(["loses", "works"])
async def test_a_trainer_that_ends_with_one_of_its_ranks_names_it(
    link: TrainerLink, tmp_path: Path, idle: bool, said: list[str]
) -> None:
    watch = asyncio.create_task(link.supervise())
    await until(lambda: not (idle and still_to_play(tmp_path)))
    update = await link.train(BATCH)
    watch.cancel()
    assert update.step == 1
    assert said == ["trainer lost rank 1, which was killed by SIGKILL: a new one is started at version 0"]


@pytest.mark.parametrize("part", ["sleeps", "computes"])
def test_an_order_that_outlives_the_stop_starts_no_other_trainer(tmp_path: Path, part: str) -> None:
    async def work(link: TrainerLink) -> None:
        order = asyncio.create_task(link.train(BATCH))
        await asyncio.sleep(0.05)
        await link.stop(0.1)
        with pytest.raises(RoleDied):
            await order

    played(tmp_path, [part, "works"], work)
    assert still_to_play(tmp_path) == ["works"]


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.1, 0.3])
@linked(["dies", *["lingers"] * 3])
async def test_a_stop_in_the_middle_of_a_replacement_leaves_no_process(link: TrainerLink, moment: float) -> None:
    order = asyncio.create_task(link.train(BATCH))
    await until(lambda: not link.process.running, 0)
    await asyncio.sleep(moment)
    await link.stop(0.1)
    with pytest.raises(RoleDied):
        await order
    assert not link.process.running


def test_a_step_that_hangs_is_no_progress_and_one_that_computes_is(tmp_path: Path) -> None:
    async def moved(link: TrainerLink, seconds: float) -> bool:
        order = asyncio.create_task(link.train(BATCH))
        await asyncio.sleep(0.1)
        before, until = link.progress, time.monotonic() + seconds
        while link.progress == before and time.monotonic() < until:
            await asyncio.sleep(0.02)
        order.cancel()
        return link.progress != before

    assert not played(tmp_path, ["sleeps"], lambda link: moved(link, 1.2))  # it sends a heartbeat meanwhile
    (tmp_path / "other").mkdir()
    assert played(tmp_path / "other", ["computes"], lambda link: moved(link, 30))
