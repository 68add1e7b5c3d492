"""The trainer's process as the conductor sees it: orders, each with a reply within its deadline.

A trainer that dies or hangs is replaced. The new one loads the last checkpoint, trains the later batches again from the
ledger, and then carries out the unfinished order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec

from stretto.core.canary import Agreement, Canary
from stretto.core.errors import CheckpointLost, RoleDied, RoleError, RoleFailed, WireError
from stretto.core.events import Span
from stretto.core.machine import on_gpus
from stretto.core.records import Batch, Update
from stretto.loop.config import DeadlinesConfig
from stretto.loop.learner.replies import TrainerReplies
from stretto.measures.goodput import AGAIN
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RoleProcess
from stretto.processes.run_role import Failed
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.store.folder.checkpoints import Checkpoint
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
)
from stretto.trainer.spec import TrainerSpec

TRAINER_ROLE = "stretto.trainer.roles.trainer"
_LAST_REPLY_SECONDS = 1.0
_SHORT = (
    "a new trainer fared no better: a smaller trainer.micro_batch_tokens, trainer.activation_checkpointing = true, "
    'trainer.optimizer_states = "host", or more trainer.ranks need less'
)

Reply = TypeVar("Reply", RanksAwaited, Ready, Trained, Copied, PolicySaved)


#: Starts the ranks of `RanksAwaited.spec` on other machines, for this trainer. When it returns, ranks of an earlier
#: trainer are gone or killed. Raises RoleDied: no machine takes one of them (named).
StartRanks = Callable[[RanksAwaited, TrainerSpec], Awaitable[None]]


class RunPast(Protocol):
    """The run's checkpoints and batches, to restore a trainer (`loop.learner.recovery.Recovery`); the loop knows no
    ledger."""

    def newest(self, version: int) -> Checkpoint | None: ...
    def batch(self, step: int) -> Batch: ...


class TrainerLink:
    """Sends the trainer one order at a time and waits for its reply."""

    def __init__(
        self,
        log: Path,
        deadlines: DeadlinesConfig,
        recovery: RunPast | None = None,
        role: str = TRAINER_ROLE,
        spawner: Spawner = FRESH,
        elsewhere: StartRanks | None = None,
    ) -> None:
        """`recovery` None: a trainer that dies is not replaced. `role`: module that its process runs; `elsewhere`:
        starts its ranks on other machines, if any."""
        self._log, self._role, self._spawner = log, role, spawner
        self._deadlines, self._recovery, self._elsewhere = deadlines, recovery, elsewhere
        self._spec: TrainerSpec | None = None
        self._version = 0  # newest version that the conductor knows
        restarts = RestartBudget(deadlines.trainer_restarts, deadlines.restart_window)
        self._supervisor = Supervisor(
            "trainer",
            self._begin_anew,
            restarts,
            lambda told: self._say(f"{told} at version {self._version}"),
            str(log),
            wanted=lambda: self._recovery is not None and not self._retired,
        )
        self._publishes = True
        self._published, self._announced = -1, asyncio.Event()  # newest version that engines can load
        self._short_at = -1  # version at which a process was out of memory
        self._orders_done = 0
        self._retired = False
        self._spans: list[Span] = []
        self._spanned = 0.0  # seconds
        self._began: float | None = None  # when the order under way was given
        self._turn = asyncio.Lock()
        self._say: Callable[[str], None] = lambda text: None
        self._canary_published: Callable[[Canary | None], None] = lambda canary: None
        self._canary_agreed: Callable[[Sequence[Agreement]], None] = lambda agreement: None
        self.replayed: list[Update] = []  # of steps repeated at the start of a resumed run
        self._new_process()

    def _new_process(self) -> None:
        self.process = RoleProcess("trainer", self._role, self._log, self._deadlines.hung, self._spawner)
        self._channel: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER, str(self._log))
        self._replies: TrainerReplies | None = None  # since its start
        self._abandoned = False  # an order was abandoned before its reply

    def report_to(self, say: Callable[[str], None]) -> None:
        """Set `say`: gets a log line for every replaced trainer."""
        self._say = say

    def tell_canaries(
        self, published: Callable[[Canary | None], None], agreed: Callable[[Sequence[Agreement]], None]
    ) -> None:
        """Set what gets the canary of each published version (after a replacement, again), and its agreement."""
        self._canary_published, self._canary_agreed = published, agreed

    async def start(self, spec: TrainerSpec, version: int = 0, *, publish: bool = True) -> None:
        """Start the process and bring it to `version`; returns when that is published, or trained if not `publish`.

        Raises:
            RoleDied: it died too often.
        """
        self._spec, self._version, self._publishes = spec, version, publish
        try:
            self.replayed = await self._begin()
        except RoleDied as death:
            self.replayed = await self._replace(death)

    async def _begin(self) -> list[Update]:
        """Start a process, bring it to the run's version and publish that; returns the steps it repeated."""
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
        """Tell the listener first: an engine that loads the version is asked for a proof of it."""
        self._canary_published(published.canary)
        if published.span is not None:
            self._spans.append(published.span)  # beside its orders, so no part of its busy seconds
        self._published = published.version
        self._announced.set()

    async def published(self, version: int) -> None:
        """Wait until `version`, trained by `train`, can be loaded by engines. No deadline: the next step waits for the
        trainer's writing, and has one; a replacement of a trainer that dies publishes it again."""
        while self._published < version:
            self._announced.clear()
            await self._announced.wait()

    async def _reach(self) -> list[Update]:
        """Start a process and bring it to the run's version: load the last checkpoint, train the later batches; returns
        these steps."""
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
        ready = await self._receive(Ready, "to be ready", self._deadlines.start)
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
        """Train on the batch; returns when that is done. If `publish`, the next version is copied by then, and written
        beside later orders (`published`)."""
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
        """Write the trainer's full state to `folder`; durable only once the store has committed the folder.

        `on_copied` is called when the trainer has a copy in memory: it takes orders again while the copy is written.

        Raises:
            CheckpointLost: the trainer ended before it was written; its replacement may be at a later step.
            RoleFailed: the folder cannot be written.
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
        """Write the policy to `folder` as a Hugging Face model."""
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
        """Send an order until a trainer, this one or a replacement, replies; returns the reply."""
        while True:
            try:
                return await self._ask(order, kind, awaited, seconds)
            except RoleDied as death:
                await self._replace(death)

    async def _replace(self, death: RoleDied) -> list[Update]:
        """Start a new trainer at the dead one's version and publish that again; returns the steps it repeated.

        Raises:
            RoleDied: it died too often, or cannot be replaced (any more).
        """
        return await self._supervisor.replace(death.how)

    async def _begin_anew(self) -> list[Update]:
        """As `_begin`, after cleaning up the previous process."""
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
        """Replace the trainer when it ends while no order is running; during an order the order's caller does.

        Raises:
            RoleDied: it died too often, or cannot be replaced.
        """
        while True:
            process = self.process
            how = await process.ended()
            await asyncio.sleep(_LAST_REPLY_SECONDS)  # a caller that waits for a reply gets the error first
            async with self._turn:
                if process is self.process and not self._retired:
                    await self._replace(await self._death(how))

    async def _death(self, how: str) -> RoleDied:
        """The reason it ended while nobody waited for a reply: a lost rank that it named, otherwise `how`.

        Raises:
            RoleFailed: its last message says that it cannot continue.
        """
        reply = None
        if self._replies is not None:
            with contextlib.suppress(RoleError):  # no message
                reply = await self._replies.next("to say why it ends", _LAST_REPLY_SECONDS)
        if isinstance(reply, Failed):
            return self._failure(reply)
        return RoleDied("trainer", reply.how if isinstance(reply, RankLost) else how, str(self.process.log))

    async def _receive(self, kind: type[Reply], awaited: str, seconds: float) -> Reply:
        self._abandoned = True
        try:
            assert self._replies is not None, "it has been started"
            reply = await self._replies.next(awaited, seconds)
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
        """The death of a trainer that was out of memory for the first time at this version.

        Raises:
            RoleFailed: it was so before, or cannot continue for another reason.
        """
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
        """Seconds of its finished spans plus the time since the current order was given."""
        return self._spanned + (time.monotonic() - self._began if self._began is not None else 0.0)

    @property
    def progress(self) -> tuple[int, int]:
        """Finished orders, and whole CPU seconds of its process. A hanging step changes neither, a long one does. (Its
        heartbeat alone needs hours for a CPU second.)"""
        return self._orders_done, int(self.process.cpu_seconds()) if self.process.running else 0

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    @property
    def ready(self) -> bool:
        """Whether the process is up and idle."""
        return self._channel.is_open and self.process.running and not self._turn.locked() and not self._abandoned

    def retire(self) -> None:
        """Do not replace a trainer that dies from now on: the run is about to end."""
        self._retired = True

    async def stop(self, grace: float) -> None:
        """Ask it to end; returns when it is gone. It is not replaced."""
        self.retire()
        if self.ready:
            with contextlib.suppress(RoleError):  # it is ending already; process.stop() waits for it
                await self._channel.send(Stop())
        self._channel.close()
        await self.process.stop(grace)
