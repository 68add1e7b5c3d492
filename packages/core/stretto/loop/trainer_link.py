"""The conductor's connection to the trainer's process: orders, each with a reply within a deadline.

A trainer that dies or hangs is replaced. The replacement loads the last checkpoint, trains the later batches again from
the ledger, and then carries out the unfinished order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from stretto.core.canary import Agreement, Canary
from stretto.core.errors import CheckpointLost, RoleDied, RoleError, RoleFailed, WireError
from stretto.core.events import Span
from stretto.core.machine import on_gpus
from stretto.core.records import Batch, Update
from stretto.loop.config import DeadlinesConfig
from stretto.loop.trainer_replies import TrainerReplies
from stretto.processes.channel import ConductorEnd, Failed
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.store.totals import AGAIN
from stretto.trainer.messages import (
    FROM_TRAINER,
    Copied,
    FromTrainer,
    PolicySaved,
    Publish,
    Published,
    RankLost,
    RanksAwaited,
    Ready,
    SaveCheckpoint,
    SavePolicy,
    Stop,
    ToTrainer,
    Train,
    Trained,
    TrainerSpec,
)

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.loop.recovery import Recovery

TRAINER_ROLE = "stretto.trainer.roles.trainer"
_LAST_REPLY_SECONDS = 1.0
_SHORT = (
    "a new trainer fared no better: a smaller trainer.micro_batch_tokens, trainer.activation_checkpointing = true, "
    'trainer.optimizer_states = "host", or more trainer.ranks need less'
)

Reply = TypeVar("Reply", RanksAwaited, Ready, Trained, Copied, PolicySaved)

#: Starts the trainer's ranks on other machines, by (the trainer's request for them, its spec). When it returns,
#: ranks of an earlier trainer process are gone or killed. Raises RoleDied, with the rank, if no machine takes one.
StartRanks = Callable[[RanksAwaited, TrainerSpec], Awaitable[None]]


class TrainerLink:
    """Sends the trainer's process one order at a time and waits for its reply; replaces a process that dies, if it has
    a `recovery`."""

    def __init__(
        self,
        log: Path,
        deadlines: DeadlinesConfig,
        recovery: Recovery | None = None,
        role: str = TRAINER_ROLE,
        spawner: Spawner = FRESH,
        elsewhere: StartRanks | None = None,
        say: Callable[[str], None] = lambda text: None,
        canary_published: Callable[[Canary | None], None] = lambda canary: None,
        canary_agreed: Callable[[Sequence[Agreement]], None] = lambda agreement: None,
    ) -> None:
        """Create the link; `start` starts the process.

        Args:
            log: log file of the process.
            recovery: checkpoints and batches to restore a replacement; None: a trainer that dies is not replaced.
            role: module that the process runs.
            spawner: starts the process.
            elsewhere: starts the trainer's ranks on other machines; None: it has no ranks there.
            say: gets a log line for every replaced trainer.
            canary_published: gets the canary of each published version (None: it has none); after a replacement once
                more.
            canary_agreed: gets, after each step, the comparisons of recomputed and sampled log-probabilities by engine.
        """
        self._log, self._role, self._spawner = log, role, spawner
        self._deadlines, self._recovery, self._elsewhere = deadlines, recovery, elsewhere
        self._spec: TrainerSpec | None = None
        self._version = 0  # version after the last finished step
        restarts = RestartBudget(deadlines.trainer_restarts, deadlines.restart_window)
        self._supervisor = Supervisor(
            "trainer",
            self._begin_anew,
            restarts,
            lambda told: say(f"{told} at version {self._version}"),
            str(log),
            wanted=lambda: self._recovery is not None and not self._retired,
        )
        self._publishes = True
        self._published, self._announced = -1, asyncio.Event()  # newest version that engines can load
        self._short_at = -1  # version at which a process last ran out of memory
        self._orders_done = 0
        self._retired = False
        self._spans: list[Span] = []
        self._spanned = 0.0  # seconds
        self._began: float | None = None  # `time.monotonic` when the current order was given
        self._turn = asyncio.Lock()
        self._canary_published, self._canary_agreed = canary_published, canary_agreed
        self.replayed: list[Update] = []  # updates of the steps that were trained again at the start
        self._new_process()

    def _new_process(self) -> None:
        self.process = RoleProcess("trainer", self._role, self._log, self._deadlines.hung, self._spawner)
        self._channel: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER, str(self._log))
        self._replies: TrainerReplies | None = None  # None before the start
        self._abandoned = False  # a caller was cancelled before the reply to its order

    async def start(self, spec: TrainerSpec, version: int = 0, *, publish: bool = True) -> None:
        """Start the trainer and bring it to `version`, from the last checkpoint and the later batches. Returns when
        `version` is published, or, if not `publish`, when it is trained; the attribute `replayed` then has the updates
        of the steps that were trained again. A process that dies meanwhile is replaced, unless the link has no
        `recovery`.

        Raises:
            RoleDied: the trainer died more often than `deadlines.trainer_restarts` allows, or once without `recovery`.
            RoleFailed: the trainer reports that it cannot continue.
            DeadlineExceeded: a reply took longer than `deadlines.start`, `step` or `save`.
        """
        self._spec, self._version, self._publishes = spec, version, publish
        try:
            self.replayed = await self._begin()
        except RoleDied as death:
            self.replayed = await self._supervisor.replace(death.how)

    async def _begin(self) -> list[Update]:
        """Start a process, bring it to the run's version and publish that version, if `start` was to; returns the
        updates of the steps that were trained again. Raises RoleDied if the process ends meanwhile, DeadlineExceeded if
        an order takes longer than its deadline, RoleFailed if the trainer cannot continue."""
        updates = await self._reach()
        if self._publishes:
            await self._ask(Publish(), Copied, f"to copy version {self._version}", self._deadlines.save)
            assert self._replies is not None, "it has replied"
            try:
                await self._replies.published(self._version, self._deadlines.save)
            except RoleDied:
                raise await self._death(await self.process.last_words()) from None
        return updates

    def _noted(self, published: Published) -> None:
        """Handle the trainer's notice that a version can be loaded. The canary is passed on first, since engines that
        load the version are checked with it."""
        self._canary_published(published.canary)
        self._keep(published.before)
        if published.span is not None:
            self._spans.append(published.span)  # not in its busy seconds: the writing overlaps with orders
        self._published = published.version
        self._announced.set()

    async def published(self, version: int) -> None:
        """Wait until engines can load `version`, which `train` has trained with `publish`; returns at once if they can.

        There is no deadline here: the trainer's next step waits for the writing, and has a deadline. A replacement of a
        trainer that dies publishes the version again.
        """
        while self._published < version:
            self._announced.clear()
            await self._announced.wait()

    async def _reach(self) -> list[Update]:
        """Start a process and its ranks elsewhere, let it load the last checkpoint, and train the later batches again;
        returns their updates. Without `recovery` it loads the checkpoint of the spec, and the list is empty. Raises
        RoleDied if the process ends, or after `retire`; RoleFailed and DeadlineExceeded as `_begin`."""
        assert self._spec is not None, "start() comes first"
        folder, recovery = self._spec.checkpoint, self._recovery
        if recovery is not None and (newest := await asyncio.to_thread(recovery.newest, self._version)) is not None:
            folder = str(newest.path)
        descriptor = self._channel.far.fileno()
        spec = msgspec.structs.replace(
            self._spec,
            descriptor=descriptor,
            checkpoint=folder,
            log=str(self._log),
            hung=self._deadlines.hung,
            collective=max(self._deadlines.start, self._deadlines.step, self._deadlines.save),
            assembly=self._deadlines.start / 2,  # report missing ranks before the trainer's own timeout
        )
        if self._retired:
            raise RoleDied("trainer", "is not started again: the run ends")
        await self.process.start(spec, spec.threads, (descriptor,), on_gpus(spec.gpus))
        await self._channel.open(self.process.ended)
        self._replies = TrainerReplies(self._channel, self._noted)
        if self._elsewhere is not None:
            awaited = await self._receive(RanksAwaited, "to say where its ranks join", self._deadlines.start)
            await self._elsewhere(awaited, spec)
        ready = await self._receive(Ready, "to be ready", self._deadlines.start, self._loaded)
        updates: list[Update] = []
        if recovery is None:
            return updates
        for step in range(ready.version + 1, self._version + 1):
            order = Train(batch=await asyncio.to_thread(recovery.batch, step), publish=False)
            trained = await self._ask(order, Trained, f"to do step {step} again", self._deadlines.step)
            self._keep([msgspec.structs.replace(span, name=AGAIN) for span in trained.spans])
            updates.append(trained.update)
        return updates

    async def train(self, batch: Batch, *, publish: bool = True) -> Update:
        """Train on the batch; returns the update when the step is done.

        If `publish`, the new weights are copied before the trainer reads its next order, and written while it carries
        that out; `published` waits for the writing. A trainer that dies is replaced, and the batch trained again.

        Raises:
            RoleDied: the trainer died more often than `deadlines.trainer_restarts` allows, or is not replaced.
            RoleFailed: the trainer reports that it cannot continue.
            DeadlineExceeded: the step took longer than `deadlines.step`.
        """
        async with self._order():
            trained = await self._until_done(
                Train(batch=batch, publish=publish), Trained, f"to finish step {batch.step}", self._deadlines.step
            )
            self._keep(trained.spans)
            self._canary_agreed(trained.agreement)
            self._version = trained.update.version
            self._supervisor.restarts.progressed()
        return trained.update

    async def save_checkpoint(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        """Write the trainer's full state to `folder`; returns when it is written, not yet synced to disk.

        `on_copied` is called when the trainer has a copy in memory. From then on it takes other orders. A trainer that
        dies before is replaced, and copies its state again.

        Raises:
            CheckpointLost: the trainer ended before the copy was written; its replacement may be at a later step.
            RoleDied: the trainer died too often (as for `train`) before it had a copy, or is not replaced.
            RoleFailed: the folder cannot be written.
            DeadlineExceeded: the copy, or its writing, took longer than `deadlines.save`.
        """
        async with self._order():
            order, seconds = SaveCheckpoint(folder=str(folder)), self._deadlines.save
            copied = await self._until_done(order, Copied, f"to copy its state for {folder.name}", seconds)
            self._keep([copied.span])
            replies = self._replies
        on_copied()
        assert replies is not None, "it has replied"
        try:
            await replies.saved(order.folder, seconds)
        except RoleDied as death:
            raise CheckpointLost(folder.name, str(death)) from None

    async def save_policy(self, folder: Path) -> None:
        """Write the policy to `folder` as a Hugging Face model; returns when it is written. Raises RoleDied if the
        trainer dies too often, RoleFailed if it reports an error, DeadlineExceeded after `deadlines.save`."""
        async with self._order():
            order, awaited = SavePolicy(folder=str(folder)), f"to write policy {folder.name}"
            saved = await self._until_done(order, PolicySaved, awaited, self._deadlines.save)
            self._keep([saved.span])

    @contextlib.asynccontextmanager
    async def _order(self) -> AsyncIterator[None]:
        async with self._turn:
            self._began = time.monotonic()
            try:
                yield
            finally:
                self._began = None

    async def _until_done(self, order: ToTrainer, kind: type[Reply], awaited: str, seconds: float) -> Reply:
        """Send `order`, again to each replacement if the trainer dies, until there is a reply; returns the reply.

        `kind`: expected type of the reply. `seconds`: deadline of each try; `awaited` names the wait in its error.
        Raises RoleDied if the trainer may not be replaced again.
        """
        while True:
            try:
                return await self._ask(order, kind, awaited, seconds)
            except RoleDied as death:
                await self._supervisor.replace(death.how)

    async def _begin_anew(self) -> list[Update]:
        """End the previous process, if it still runs, and `_begin` with a new one at the same version. Returns and
        raises as `_begin`."""
        self._channel.close()
        await self.process.stop(0.0)
        self._new_process()
        return await self._begin()

    async def _ask(self, order: ToTrainer, kind: type[Reply], awaited: str, seconds: float) -> Reply:
        try:
            await self._channel.send(order)
        except RoleDied:
            raise await self._death(await self.process.last_words()) from None
        return await self._receive(kind, awaited, seconds)

    async def supervise(self) -> NoReturn:
        """Replace the trainer when it ends between two orders, until an error ends the run. When it ends during an
        order, the method that sent the order replaces it. Raises RoleDied, RoleFailed or DeadlineExceeded."""
        while True:
            process = self.process
            how = await process.ended()
            await asyncio.sleep(_LAST_REPLY_SECONDS)  # a caller that waits for a reply gets the error first
            async with self._turn:
                if process is self.process and not self._retired:
                    await self._supervisor.replace((await self._death(how)).how)

    async def _death(self, how: str) -> RoleDied:
        """Return the error of a trainer whose process ended (`how`: "was killed by SIGKILL") with no order open. Waits
        a second for its last message: `Failed` is handled by `_failure`, which may raise RoleFailed; if it names a rank
        that was lost, this is the reason. Without such a message, `how` is."""
        reply = None
        if self._replies is not None:
            with contextlib.suppress(RoleError):  # no message
                reply = await self._replies.next("to say why it ends", _LAST_REPLY_SECONDS)
        if isinstance(reply, Failed):
            return self._failure(reply)
        return RoleDied("trainer", reply.how if isinstance(reply, RankLost) else how, str(self.process.log))

    async def _loaded(self) -> object:
        return self.process.loaded()

    async def _receive(
        self, kind: type[Reply], awaited: str, seconds: float, progress: Callable[[], Awaitable[object]] | None = None
    ) -> Reply:
        self._abandoned = True
        try:
            assert self._replies is not None, "it has been started"
            reply = await self._replies.next(awaited, seconds, progress)
        except RoleDied:
            raise RoleDied("trainer", await self.process.last_words(), str(self.process.log)) from None
        self._abandoned = False
        self._orders_done += 1
        if isinstance(reply, Failed):
            raise self._failure(reply)
        if isinstance(reply, RankLost):
            raise RoleDied("trainer", reply.how, str(self.process.log))
        if not isinstance(reply, kind):
            raise WireError(f"trainer replied {type(reply).__name__} in place of {kind.__name__}")
        return reply

    def _failure(self, failed: Failed) -> RoleDied:
        """Return the error of a trainer that can be replaced (`failed.again`: it ran out of memory), the first time at
        this version. Raises RoleFailed the second time, and for any other failure."""
        if not failed.again:
            raise RoleFailed("trainer", failed.problem, failed.exit_code)
        if self._short_at == self._version:
            raise RoleFailed("trainer", f"{failed.problem}; {_SHORT}", failed.exit_code)
        self._short_at = self._version
        return RoleDied("trainer", f"stopped: {failed.problem}", str(self._log))

    def _keep(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._spans.append(span)
            self._spanned += span.end - span.start

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the trainer worked: its finished spans, plus the time since the current order was given."""
        return self._spanned + (time.monotonic() - self._began if self._began is not None else 0.0)

    @property
    def progress(self) -> tuple[int, int]:
        """Number of finished orders, and whole CPU seconds of the trainer's process (0 while none runs); for the
        watchdog. A long step changes the CPU seconds, a hanging one does not: the heartbeat alone takes hours for a CPU
        second."""
        return self._orders_done, int(self.process.cpu_seconds()) if self.process.running else 0

    def drain_spans(self) -> list[Span]:
        """Return the trainer's spans since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    @property
    def ready(self) -> bool:
        """Whether the process is up and waits for an order."""
        return self._channel.is_open and self.process.running and not self._turn.locked() and not self._abandoned

    def retire(self) -> None:
        """Do not replace a trainer that dies from now on: the run is about to end."""
        self._retired = True

    async def stop(self, grace: float) -> None:
        """Ask the trainer to end, if no order is open, and return when its process is gone; it is not replaced.
        `grace`: seconds between SIGTERM and SIGKILL."""
        self.retire()
        if self.ready:
            with contextlib.suppress(RoleError):  # the process is ending already; process.stop() waits for it
                await self._channel.send(Stop())
        self._channel.close()
        await self.process.stop(grace)
