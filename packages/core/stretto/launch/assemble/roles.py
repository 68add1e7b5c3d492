"""The role processes of a run: starting them together, replacing those that die, and ending all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stretto.core.canary import CANARY, CanaryRecord
from stretto.core.errors import described
from stretto.core.events import Span
from stretto.core.tasks import gather_or_cancel, run_beside
from stretto.launch.assemble.beside import Conversing, MachineParts, Machines, machines_of, workflow_pool
from stretto.launch.assemble.specs import CONTROL, WEIGHTS_KEY, Endpoints, engine_specs, trainer_spec
from stretto.launch.preflight.base import digest
from stretto.launch.preflight.plan import Plan
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.proving import Proving
from stretto.loop.engines.router import Router
from stretto.loop.records.totals import Tenure, Work
from stretto.loop.recovery import Recovery
from stretto.loop.trainer_link import TrainerLink
from stretto.processes.spawn import Spawner
from stretto.processes.stopping import StopSignal
from stretto.processes.tree import own_resident_bytes, resident_bytes, spent_seconds
from stretto.rewards.service.pool import RewardPool
from stretto.store import lock
from stretto.store.files import identity
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.weights.folder import SHARED, own, remove, remove_abandoned, shared_folder

_SOCKETS = ".sockets"  # file in the run folder with the path of the folder of its sockets
_STOP_GRACE = 1.0
_LAST_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Roles:
    """All roles of a running run, as `running_roles` starts them. `workflows`: None for single turns."""

    engines: EnginePool
    trainer: TrainerLink
    rewards: RewardPool
    machines: Machines
    workflows: Conversing | None = None  # None: single turns

    async def poll(self, patience: float | None = None) -> list[Span]:
        """Fetch the time spans of all roles since the last poll, and update the engines' counters, from which `work`,
        `progress` and `resident` are computed. An engine that does not reply within `patience` seconds (None:
        `deadlines.answer`) keeps its last counters."""
        of_engines = await self.engines.poll(patience)
        return [
            *of_engines,
            *self.trainer.drain_spans(),
            *self.rewards.drain_spans(),
            *self.machines.drain_spans(),
        ]

    async def poll_unless(self, stop: StopSignal) -> list[Span]:
        """Fetch the time spans of all roles, as `poll` does, but wait at most another second for an engine once a stop
        is requested."""
        spans = None if stop.requested else await stop.unless(self.poll())
        return await self.poll(_LAST_POLL_SECONDS) if spans is None else spans

    async def supervise(self) -> NoReturn:
        """Replace roles that die or hang, until an error ends the run.

        To be run in one task as long as the roles run: cancelling it during a replacement leaves a role without a
        process.

        Raises:
            RoleDied: a role has used up its restart budget; or another error of `EnginePool.supervise`.
        """
        await gather_or_cancel(self.engines.supervise(), self.trainer.supervise(), self.machines.supervise())
        raise AssertionError("a watcher never ends by itself")

    def progress(self) -> object:
        """Return a value that changes whenever a role has done some work; for engines, as of the last poll."""
        work = self.work()
        ended = 0 if self.workflows is None else self.workflows.ended
        roles = self.rewards.busy_seconds, self.trainer.progress, ended
        return work.generated, work.recomputed, self.engines.busy(), *roles

    def work(self) -> Work:
        """Return the tokens and busy seconds of all roles so far; for engines, as of the last poll. The seconds of the
        reward workers are their mean, those of the conductor CPU time."""
        busy = self.engines.busy() | {
            "trainer": self.trainer.busy_seconds,
            "rewards": self.rewards.busy_seconds / self.rewards.workers,
            "conductor": time.process_time(),
        }
        return Work(
            generated=round(self.engines.counted(lambda health: health.generated)),
            recomputed=round(self.engines.counted(lambda health: health.recomputed)),
            stopped=round(self.engines.counted(lambda health: health.wasted)),
            busy=busy,
            generated_by=self.engines.generated(),
            left=self.engines.left,
        )

    def spent(self) -> dict[str, dict[int, float]]:
        """Return the CPU seconds so far by role and process id, of roles on this machine, each with its descendant
        processes, and of the conductor alone."""
        pids = self.engines.pids() | self._pids()
        found = {role: {pid: spent_seconds(pid) for pid in theirs} for role, theirs in pids.items()}
        return found | {"conductor": {os.getpid(): time.process_time()}}

    def _pids(self) -> dict[str, Sequence[int]]:
        pids: dict[str, Sequence[int]] = {"trainer": self.trainer.process.pids, "rewards": self.rewards.pids}
        if self.workflows is not None and self.workflows.pids is not None:
            pids["workflow"] = self.workflows.pids
        return pids

    def resident(self) -> dict[str, int]:
        """Return the resident memory in bytes by role, descendant processes included; for engines, as of the last
        poll."""
        found = {role: sum(map(resident_bytes, theirs)) for role, theirs in self._pids().items()}
        return self.engines.resident() | found | {"conductor": own_resident_bytes()}


def kept_proving(ledger: Ledger, version: int) -> Proving:
    """Return the canary checks of a run, restored from its ledger, which stores their record at each flush from now on.
    `version`: version at which this process of the run starts; a run without a record is checked from there on."""
    proving = Proving()
    proving.restore(ledger.get(CANARY, CanaryRecord) or CanaryRecord(since=version))
    ledger.watch(CANARY, lambda: proving.record)
    return proving


@asynccontextmanager
async def running_roles(
    *,
    plan: Plan,
    folder: RunFolder,
    version: int,
    saved_step: int,
    tenure: Tenure,
    stop: StopSignal,
    report: Callable[[str], None],
    spawner: Spawner,
    proving: Proving,
) -> AsyncIterator[Roles]:
    """Context manager: start every role, and end all of them after the block: then no process, socket or shared memory
    is left.

    If a stop is requested while the roles start, the block begins at once, with roles that may not run: the caller
    looks at `stop.requested`.

    Args:
        version: current version of the run; the trainer reaches it from the checkpoint of step `saved_step` (0: from
            version 0 of the policy).
        tenure: identifies this conductor among all conductors of the run.
        report: gets log lines: replaced roles, facts of a reward, roles that failed while they were ended.
        spawner: starts the processes.
        proving: the canary checks.

    Raises:
        StrettoError: a role cannot be started, or no engine is ready within `cluster.wait` seconds.
    """
    recipe = plan.recipe
    with _endpoints(plan, folder, version) as endpoints:
        model, deadlines = folder.policy(0), recipe.deadlines
        engines = EnginePool(
            engine_specs(recipe, model, endpoints),
            folder.logs,
            deadlines,
            role=recipe.engine.role,
            load_interval=recipe.engine.load_interval,
            router=Router(exclusive=recipe.in_rounds),
            spawner=spawner,
            lag=recipe.cluster.lag,
            kind=recipe.engine.kind,
            patience=recipe.cluster.wait if recipe.cluster.placer != "local" else 0.0,
            proving=proving,
            say=report,
        )
        machines = machines_of(MachineParts(plan, folder, endpoints, engines, report, spawner, tenure))
        elsewhere = machines.ranks if recipe.trainer.remote_ranks else None
        trainer = TrainerLink(
            folder.role_log("trainer"),
            deadlines,
            Recovery(folder, recipe.store.keep_checkpoints),
            spawner=spawner,
            elsewhere=elsewhere,
            say=report,
            canary_published=proving.published,
            canary_agreed=proving.agreed,
        )
        rewards = _reward_pool(plan, folder, report)
        workflows = workflow_pool(plan, folder.role_log("workflow"), report, folder)
        asked = (rewards.start,) if workflows is None else (rewards.start, workflows.start)
        proving.expect(report)
        # If the trainer repeats steps, engines start after it: an engine may not wait that long for its first weights.
        train = partial(trainer.start, trainer_spec(plan, model, endpoints, folder.tokens), version)
        serve = partial(engines.start, version)
        finished = False
        try:
            starts = (train, serve) if version == saved_step else (partial(_in_turn, train, serve),)
            await stop.unless(_up(machines, engines, recipe.cluster.wait, *asked, *starts))
            record_facts(folder, rewards.facts)
            yield Roles(engines, trainer, rewards, machines, workflows)
            finished = not stop.requested
        finally:
            why = "the run has ended" if finished else "the run was stopped, and may go on"
            of_workflows = () if workflows is None else (workflows.close(),)
            await end_all(report, engines.stop(_STOP_GRACE), trainer.stop(_STOP_GRACE), rewards.close(), *of_workflows)
            await end_all(report, machines.close(why, again=not finished))


@contextmanager
def _endpoints(plan: Plan, folder: RunFolder, version: int) -> Iterator[Endpoints]:
    """Context manager: the endpoints of a run whose present process begins at `version`. What a killed process of the
    run left is removed first, and shared memory that killed processes of other runs left. The exit removes sockets and
    shared memory, also after a second signal."""
    mailbox = mailbox_name(folder)
    _sweep(folder, mailbox)
    remove_abandoned(SHARED)
    with contextlib.ExitStack() as undo:
        sockets, held = lock.temporary_folder()
        undo.callback(lock.let_go, sockets, held)
        undo.callback(_forget_sockets, folder)
        folder.write(_SOCKETS, f"{sockets}\n")
        mailbox_folder = shared_folder(plan.base.parameters * 4, sockets)
        undo.callback(os.close, own(mailbox, mailbox_folder))
        undo.callback(remove, mailbox, mailbox_folder)
        undo.callback(folder.free_reserve)
        recorded = version == 0 or folder.kernels.exists()  # runs of earlier versions of stretto have no such file
        yield Endpoints(mailbox, mailbox_folder, sockets, folder.kernels if recorded else None, plan.seats)


def _forget_sockets(folder: RunFolder) -> None:
    """Remove the note of the sockets' folder, unless another process has the run folder by now."""
    if folder.is_ours():
        (folder.path / _SOCKETS).unlink(missing_ok=True)


def _reward_pool(plan: Plan, folder: RunFolder, report: Callable[[str], None]) -> RewardPool:
    """Return the reward workers of a run, not yet started. A change of their facts is reported and recorded."""

    def changed(sentence: str) -> None:
        report(sentence)
        try:
            record_facts(folder, rewards.facts)
        except OSError as error:  # the run goes on without it
            report(f"not recorded: {described(error)}")

    log, hung = folder.role_log("rewards"), plan.recipe.deadlines.hung
    rewards = RewardPool(plan.recipe.rewards, log=log, on_change=changed, hung=hung, rows=plan.rows)
    return rewards


def _sweep(folder: RunFolder, mailbox: str) -> None:
    """Remove the sockets and the shared memory `mailbox` that a killed process of this run left outside of its folder.

    In a copy of a run folder, a file names the sockets of the original run; while that run goes on, they stay.
    """
    remove(mailbox, SHARED)
    with contextlib.suppress(OSError):  # no sockets, or of another user: each run creates a new folder anyway
        sockets = Path((folder.path / _SOCKETS).read_text(encoding="utf-8").strip())
        if lock.is_held(sockets, lock.TEMPORARY):
            return
        remove(mailbox, sockets)
        for path in (*sockets.glob("engine-*.sock"), sockets / CONTROL):
            if path.is_socket():
                path.unlink()
        (sockets / WEIGHTS_KEY).unlink(missing_ok=True)
        if [path.name for path in sockets.iterdir()] == [lock.TEMPORARY]:
            (sockets / lock.TEMPORARY).unlink()
        sockets.rmdir()


def mailbox_name(folder: RunFolder) -> str:
    """Return the name of the run's shared memory, which is unique among running runs. It is derived from the inode of
    the folder's lock file: it stays if the folder is moved, and a copy gets another."""
    return digest(identity(folder.path / lock.NAME))


def record_facts(folder: RunFolder, facts: Mapping[str, str]) -> None:
    """Write the facts that reward workers tell, such as the level of their sandbox, to ``rewards.json``. Does nothing
    without facts."""
    if facts:
        folder.write("rewards.json", msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n")


async def end_all(report: Callable[[str], None], *ends: Coroutine[Any, Any, None]) -> None:
    """Await all coroutines at the same time, also if some fail; each error becomes a log line through `report`."""
    for end in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(end, BaseException):
            report(f"while the roles were ended: {end}")


async def _up(
    machines: Machines, engines: EnginePool, patience: float, *starts: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Let machines join, start all roles, and wait until an engine takes requests. Raises StrettoError if a role cannot
    be started, a service fails meanwhile, or no engine is ready within `patience` seconds."""

    async def up() -> None:
        await machines.open()
        await gather_or_cancel(*(start() for start in starts))
        await engines.until_up(patience)

    await run_beside(machines.supervise(), up())


async def _in_turn(*starts: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call and await the `starts`, one after the other."""
    for start in starts:
        await start()
