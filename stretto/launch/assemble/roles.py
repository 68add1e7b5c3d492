"""The processes of a run: started together, replaced when they die, and put away whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stretto.core.errors import described
from stretto.core.events import Span
from stretto.core.tasks import gather_or_cancel
from stretto.launch.assemble.specs import Endpoints, engine_specs, in_rounds, socket_folder, trainer_spec
from stretto.launch.preflight.plan import Plan, digest
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.router import ExclusiveRouter, Router
from stretto.loop.learner.link import TrainerLink
from stretto.loop.learner.recovery import Recovery
from stretto.loop.records.recorder import Work
from stretto.processes.spawn import Spawner
from stretto.processes.stopping import StopSignal
from stretto.rewards.service.pool import RewardPool
from stretto.store import lock
from stretto.store.files import identity
from stretto.store.folder.run_folder import RunFolder
from stretto.weights.shared_memory import SHARED, own, remove, remove_abandoned, shared_folder

_SOCKETS = ".sockets"  # names the folder that the roles of a run meet in
_STOP_GRACE = 1.0
_LAST_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Roles:
    """The processes of a run, as those who work with them see them."""

    fleet: EnginePool
    trainer: TrainerLink
    rewards: RewardPool

    async def look(self, patience: float | None = None) -> list[Span]:
        """Ask the engines how they are (`work` counts that), each for `patience` seconds at most; what everybody did
        since the last look."""
        return [*await self.fleet.look(patience), *self.trainer.drain_spans(), *self.rewards.drain_spans()]

    async def look_unless(self, stopped: StopSignal) -> list[Span]:
        """`look`; but a requested stop waits no longer than a second for an engine that does not reply."""
        spans = None if stopped.requested else await stopped.unless(self.look())
        return await self.look(_LAST_LOOK_SECONDS) if spans is None else spans

    async def supervise(self) -> NoReturn:
        """Replace who dies or hangs. One task does it for as long as the roles work: a replacement that is cancelled
        half-way leaves a role that nobody brings up any more.

        Raises:
            RoleDied: somebody has died too often.
        """
        await gather_or_cancel(self.fleet.supervise(), self.trainer.supervise())
        raise AssertionError("a watcher never ends by itself")

    def progress(self) -> object:
        """Changes whenever a role gets anything done; engines as they were looked at last."""
        work = self.work()
        return work.generated, work.recomputed, self.fleet.busy(), self.rewards.busy_seconds, self.trainer.progress

    def work(self) -> Work:
        """What everybody has done so far; engines as they were looked at last."""
        busy = self.fleet.busy() | {
            "trainer": self.trainer.busy_seconds,
            "rewards": self.rewards.busy_seconds / self.rewards.workers,
            "conductor": time.process_time(),
        }
        return Work(
            generated=round(self.fleet.counted(lambda health: health.generated)),
            recomputed=round(self.fleet.counted(lambda health: health.recomputed)),
            stopped=round(self.fleet.counted(lambda health: health.wasted)),
            unfinished=round(self.fleet.counted(lambda health: health.unfinished)),
            busy=busy,
        )


@asynccontextmanager
async def roles(
    plan: Plan,
    folder: RunFolder,
    version: int,
    saved_step: int,
    stopped: StopSignal,
    report: Callable[[str], None],
    starter: Spawner,
) -> AsyncIterator[Roles]:
    """Start every role, unless a stop is requested meanwhile; whatever happens, none of them, no socket and no shared
    memory is left afterwards.

    Args:
        version: where the run stands; the trainer gets there from the checkpoint of step `saved_step`.
        report: told what a reader of the run should know: who was replaced, what a reward says of itself, who did not
            end as it should.
    """
    recipe = plan.recipe
    mailbox = mailbox_name(folder)
    _sweep(folder, mailbox)
    remove_abandoned(SHARED)
    sockets = socket_folder()
    owned = lock.acquire(sockets)  # until this process ends: whoever finds the name elsewhere leaves them to us
    folder.write(_SOCKETS, f"{sockets}\n")
    mailbox_folder = shared_folder(plan.base.parameters * 4, sockets)
    recorded = version == 0 or folder.kernels.exists()  # not in what an earlier stretto began
    kernels = folder.kernels if recorded else None
    meeting = Endpoints(mailbox=mailbox, mailbox_folder=mailbox_folder, sockets=sockets, kernels=kernels)
    model = folder.policy(0)
    lineage = Recovery(folder, recipe.store.keep_checkpoints)
    trainer = TrainerLink(folder.role_log("trainer"), recipe.deadlines, lineage, starter=starter)
    fleet = EnginePool(
        engine_specs(plan, model, meeting),
        folder.logs,
        recipe.deadlines,
        load_interval=recipe.engine.load_interval,
        router=ExclusiveRouter() if in_rounds(recipe) else Router(),
        starter=starter,
    )

    def changed(sentence: str) -> None:
        report(sentence)
        try:
            record_facts(folder, rewards.facts)
        except OSError as error:  # whoever reads it later should know; the run goes on without it
            report(f"not recorded: {described(error)}")

    rewards = RewardPool(
        recipe.rewards,
        log=folder.role_log("rewards"),
        on_change=changed,
        hung=recipe.deadlines.hung,
        rows=plan.rows,
    )
    trainer.report_to(report)
    fleet.report_to(report)
    mailbox_owned = own(mailbox, mailbox_folder)
    # Steps that are done again may take longer than an engine waits for its first weights.
    weights = partial(trainer.start, trainer_spec(plan, model, meeting), version)
    engines = partial(fleet.start, version)
    ways = (weights(), engines()) if version == saved_step else (_in_turn(weights, engines),)
    try:
        await stopped.unless(gather_or_cancel(rewards.start(), *ways))
        record_facts(folder, rewards.facts)
        yield Roles(fleet, trainer, rewards)
    finally:
        try:
            await end_all(report, fleet.stop(_STOP_GRACE), trainer.stop(_STOP_GRACE), rewards.close())
        finally:  # also when a second signal cuts the wait short; the kernel ends the roles then
            remove(meeting.mailbox, meeting.mailbox_folder)
            os.close(mailbox_owned)
            shutil.rmtree(sockets, ignore_errors=True)
            os.close(owned)
            if folder.is_ours():
                (folder.path / _SOCKETS).unlink(missing_ok=True)


def _sweep(folder: RunFolder, mailbox: str) -> None:
    """Put away what a run that was killed has left outside of its folder: what roles make there, and nothing else,
    wherever the file says that it lies. In a copy of a run folder the file names the sockets of the original: if that
    is running, they stay."""
    remove(mailbox, SHARED)
    with contextlib.suppress(OSError):  # there is nothing, or it is not ours: the next run has a place of its own
        sockets = Path((folder.path / _SOCKETS).read_text().strip())
        if lock.is_held(sockets):
            return
        remove(mailbox, sockets)
        for path in sockets.glob("engine-*.sock"):
            if path.is_socket():
                path.unlink()
        if [path.name for path in sockets.iterdir()] == [lock.NAME]:
            (sockets / lock.NAME).unlink()
        sockets.rmdir()


def mailbox_name(folder: RunFolder) -> str:
    """Under which a run publishes in shared memory: that of its folder's lock, which no other living run has, wherever
    the folder is moved or copied to."""
    return digest(identity(folder.path / lock.NAME))


def record_facts(folder: RunFolder, facts: Mapping[str, str]) -> None:
    """What a reward says about itself, such as the level of its sandbox: ``rewards.json``."""
    if facts:
        folder.write("rewards.json", msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n")


async def end_all(report: Callable[[str], None], *ends: Coroutine[Any, Any, None]) -> None:
    """Wait for all of them; what one fails of is told, and keeps none of the others."""
    for end in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(end, BaseException):
            report(f"while the roles were ended: {end}")


async def _in_turn(*starts: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for start in starts:
        await start()
