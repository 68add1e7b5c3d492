"""The conductor: the process that connects all components of a run. Components know neither it nor each other.

    loop           consumes              produces                waits for, woken by
    ─────────────────────────────────────────────────────────────────────────────────────────────────
    admission      room in the bound     groups in flight        finish, take, load
    groups (many)  a ticket              a judged group          the engine's frames, the verdicts
    training       a batch               a version               a finished group, then the trainer
    loading        a publication         a live version          publish (one loader per engine)
    journaling     tokens so far         the ledger's partials   a second, then the engines
    observing      counters, spans       the run folder's lines  a second

The data flow in a circle: admission ─► groups ─► training ─► loading ─► admission. `rollout.controller` decides what
these loops do; a loop waits for a slower loop only because the controller says so. `launch.assemble.roles` replaces
processes that die.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from stretto.core.deadlines import Watchdog, deadline
from stretto.core.engine import is_evaluation
from stretto.core.errors import EngineLost, RefusedRequest, several
from stretto.core.events import Span
from stretto.core.records import Batch, Trajectory
from stretto.core.tasks import cancel_and_wait
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluations
from stretto.loop.records.recorder import Recorder
from stretto.loop.trainer_link import TrainerLink
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.filters import most_often
from stretto.rollout.single_turn import GroupWorkflow

_POLL_SECONDS = 1.0
_KEEP_SECONDS = 5.0  # timeout for collecting partial tokens; a late engine is asked again in the next round

Result = TypeVar("Result")


@dataclass
class Conductor:
    """Runs the loops until the last step, the first failure, or a request to stop.

    Attributes:
        poll: returns the time spans of all roles since the last poll; its argument is the seconds to wait for replies
            (None: until all roles have replied).
        progress: returns a value that changes whenever a role has done some work; the watchdog compares it.
        steps: the version at which the run ends.
    """

    controller: Controller
    workflow: GroupWorkflow
    engines: EnginePool
    trainer: TrainerLink
    in_flight: InFlight
    recorder: Recorder
    checkpointing: Checkpointing
    evaluation: Evaluations
    poll: Callable[[float | None], Awaitable[list[Span]]]
    progress: Callable[[], object]
    steps: int
    deadlines: DeadlinesConfig

    def __post_init__(self) -> None:
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._finished = asyncio.Event()
        self._stopping = asyncio.Event()
        self._conducting = False
        self._evaluated = False  # an evaluation was running at the last reading of the engines' pressure
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._announcing: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the newest version
        self._announcing.set_result(None)
        self.engines.on_load, self.engines.bound = self._live_changed, lambda: self.controller.max_staleness

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def request_stop(self) -> None:
        """Make `run` stop after the step in progress, or after ``deadlines.stop`` seconds, whichever is sooner."""
        self._stopping.set()
        self._finished.set()

    async def run(self) -> None:
        """Train until the last step, until `evaluation.enough`, or until a stop is requested (`request_stop`).

        On return, the completions in flight are journaled and aborted. Raises the first failure of any loop.
        """
        journaling = asyncio.ensure_future(self._journaling())
        loops: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._training()),
            journaling,
            asyncio.ensure_future(self.engines.keep_loaded()),
            asyncio.ensure_future(self._observing()),
            self._failure,
        ]
        self._conducting = True
        self._admit(self.controller.tickets)  # groups that an earlier conductor had in flight
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                await loop
            await cancel_and_wait([journaling])
            await self._give_up()
        finally:
            self._conducting = False  # completions that end from now on, and engines that join, start nothing
            await cancel_and_wait([*loops, self._announcing, *self._groups.values()])

    async def _give_up(self) -> None:
        """Journal the completions in flight, which a resumed run continues, then abort them (not an evaluation's), so
        that the engines' counters account for every token. No engine is waited for beyond a second."""
        self._conducting = False
        await self.in_flight.keep(_POLL_SECONDS)
        await self._poll(_POLL_SECONDS)
        self.recorder.gives_up()
        self.in_flight.end()
        at_engines = {id.partition("/")[0] for id in self.engines.open}  # turns are named after their trajectory
        await cancel_and_wait([task for id, task in self._groups.items() if id not in at_engines])
        await self.engines.give_up(spared=is_evaluation)

    # ── admission and groups ────────────────────────────────────────────────────────────────────

    def _admit(self, restored: Sequence[Ticket] = ()) -> None:
        """Start the groups of the tickets `restored`, then as many new groups as the controller admits (none before
        `run`, or once the run is stopping)."""
        tickets = deque(restored)
        while tickets or (self._conducting and not self.stopping):
            ticket = tickets.popleft() if tickets else self.controller.admit()
            if ticket is None:
                return
            task = asyncio.create_task(self._generate(ticket), name=ticket.group_id)
            self._groups[ticket.group_id] = task
            task.add_done_callback(self._group_ended)

    def _live_changed(self, version: int) -> None:
        self.controller.load(version)
        self._admit()

    async def _generate(self, ticket: Ticket) -> None:
        trajectories: Sequence[Trajectory] = ()
        try:
            trajectories = await self.workflow(ticket)
        except EngineLost as loss:
            self.controller.lose(ticket, str(loss))
        except RefusedRequest as refusal:
            self.controller.fail(ticket, str(refusal))
        else:
            self.controller.finish(ticket, trajectories)
            self.recorder.judged(ticket.draw.prompt, trajectories)
            self.recorder.filtered(self.controller.without_a_batch())
        self._forget(ticket, trajectories)

    def _forget(self, ticket: Ticket, trajectories: Sequence[Trajectory] = ()) -> None:
        kept = sum(trajectory.sampled_length for trajectory in trajectories)
        self.recorder.left_over(self.in_flight.forget(ticket.group_id, kept))

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        del self._groups[task.get_name()]
        if task.cancelled():
            return
        try:
            task.result()
            self._admit()
        except Exception as error:  # nobody awaits the task or its callback: the run ends with what they raise
            if not self._failure.done():
                self._failure.set_exception(error)
        self._finished.set()

    # ── training ─────────────────────────────────────────────────────────────────────────────────

    async def _training(self) -> None:
        while self.controller.published < self.steps and not self.evaluation.enough:
            batch = await self._next_batch()
            if batch is None:
                return
            self._admit()
            self.recorder.taken(self.controller.queues, self.controller.max_staleness)
            update = await self._before_the_stop_ends(self.trainer.train(batch))
            if update is None:
                return
            self.controller.observe(update.step, update.metrics)
            self.controller.publish(update.version)
            self._announce(update.version)
            self._expire_overdue()
            if update.version == self.steps:
                await self._before_the_stop_ends(self._poll())  # the totals of the last step are those of the run
            self.recorder.updated(batch, update)
            await self.checkpointing.after(update)
            if self.evaluation.keeps(update):
                await self.checkpointing.save_policy(update.version)
            if update.version < self.steps:  # the last version is measured when training is over
                if self.evaluation.due(update):
                    await self._before_the_stop_ends(self._until_announced())
                self.evaluation.after(update)
        await self._before_the_stop_ends(self._until_announced())

    def _announce(self, version: int) -> None:
        """Publish `version` to the engines in the background, as soon as the trainer has written it."""
        self._announcing = asyncio.ensure_future(self._announced(version, self._announcing))
        self._announcing.add_done_callback(self._noted)

    async def _announced(self, version: int, before: asyncio.Future[None]) -> None:
        await before
        await self.trainer.published(version)
        self.engines.publish(version)

    async def _until_announced(self) -> None:
        async with deadline("trainer", f"version {self.controller.published} to be written", self.deadlines.step):
            await self._announcing

    def _noted(self, ended: asyncio.Future[None]) -> None:
        """End the run with the error of a publication, if it failed: no loop awaits its task."""
        if not ended.cancelled() and (error := ended.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch (`deadlines.batch`: else DeadlineExceeded); None if a stop is requested first."""
        version = self.controller.published
        async with deadline("trainer", f"a batch at version {version}", self.deadlines.batch, self._queues):
            while not self.stopping:
                if (batch := self.controller.take()) is not None:
                    return batch
                self._admit()  # `take` may have let groups expire, which leaves room
                self._finished.clear()
                await self._finished.wait()
        return None

    def _queues(self) -> str:
        queues = self.controller
        filtered = f"{queues.filtered} filtered{most_often(queues.reasons)}{self.engines.absence}"
        return f": {several(queues.in_flight, 'group')} in flight, {queues.buffered} buffered, {filtered}"

    def _expire_overdue(self) -> None:
        for ticket in self.controller.overdue():
            self._drop(ticket, self.controller.expire)
        self._admit()

    def _drop(self, ticket: Ticket, record: Callable[[Ticket], None]) -> None:
        if (task := self._groups.get(ticket.group_id)) is not None:  # else the group has failed, and the run ends
            task.cancel()
        record(ticket)
        self._forget(ticket)

    def withdraw(self, engine: str, version: int, reason: str) -> None:
        """Sample anew what is untrained and has tokens of `engine` and of `version`, and what that engine has now."""
        self.controller.withdraw(engine, version, reason)
        open = self.engines.engine(engine).open if self.engines.has(engine) else ()
        tainted = self.in_flight.tainted(engine, version, open)
        for ticket in [one for one in self.controller.tickets if one.group_id in tainted]:
            self._drop(ticket, lambda one: self.controller.lose(one, reason))
        self._admit()

    async def _before_the_stop_ends(self, order: Coroutine[Any, Any, Result]) -> Result | None:
        """Await `order` and return its result. After a requested stop it has `deadlines.stop` seconds; then it is
        cancelled, and None is returned. If this wait is cancelled, so is `order`."""
        task = asyncio.ensure_future(order)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait([task], timeout=self.deadlines.stop)
            return await task if task.done() else None
        finally:
            await cancel_and_wait([task, stop])

    # ── observing ────────────────────────────────────────────────────────────────────────────────

    async def _journaling(self) -> NoReturn:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self.in_flight.keep(_KEEP_SECONDS)

    async def _observing(self) -> None:
        watchdog = Watchdog(self._progress, self.deadlines.still)
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self._poll(_POLL_SECONDS)
            self._observe_pressure()
            self.evaluation.check()
            watchdog.check()

    def _observe_pressure(self) -> None:
        """With ``max_in_flight = "auto"``, report the load of the engines to the controller. Readings during an
        evaluation are dropped: the load then includes completions that the controller has not admitted."""
        if self.controller.config.max_in_flight != "auto":
            return
        now, before = self.engines.pressure(), self._evaluated
        self._evaluated = any(map(is_evaluation, self.engines.open))
        if now is not None and not (before or self._evaluated):
            self.controller.observe_pressure(now)
            self._admit()

    def _progress(self) -> object:
        controller = self.controller
        return controller.published, controller.live, controller.counted, controller.filtered, self.progress()

    async def _poll(self, patience: float | None = None) -> None:
        self.recorder.spans(await self.poll(patience))
        self.recorder.polled()
