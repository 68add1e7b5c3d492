"""The conductor: the one process that knows all players. None of them knows it, or another.

    loop           consumes              produces                waits for, woken by
    ─────────────────────────────────────────────────────────────────────────────────────────────────
    admission      room (equation 3)     groups in flight        finish, take, load
    answer (many)  a ticket              a judged group          the engine's frames, the verdicts
    training       a batch               a version               a finished group, then the trainer
    loading        a publication         a live version          publish (one loader per engine)
    journaling     tokens so far         the ledger's partials   a second, then the engines
    observing      counters, spans       the run folder's lines  a second

The data goes round: admission ─► answer ─► training ─► loading ─► admission. Nothing in the circle waits for a slower
part of it except through `rollout.controller`, whose decisions these loops carry out. Whoever dies on the way is
replaced beside all this (`launch.assemble.roles`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from stretto.core.deadlines import waiting
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest
from stretto.core.events import Span
from stretto.core.records import Batch
from stretto.launch.recipe.sections import DeadlinesConfig
from stretto.loop.checkpointing import Checkpointing, PeriodicEvaluation
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.loop.learner.link import TrainerLink
from stretto.loop.records.recorder import Recorder
from stretto.loop.watchdog import Watchdog
from stretto.processes.stopping import cancel_and_wait
from stretto.rollout.controller import Controller, Ticket
from stretto.worlds.single_turn import Workflow

_LOOK_SECONDS = 1.0
_SILENT_BATCHES = 4  # so many batches' worth of filtered groups, and none for a batch, are said aloud

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Components:
    """Everyone the conductor conducts; `look` tells what all of them have done since it was asked last, and waits so
    many seconds for it (None: until all have replied)."""

    controller: Controller
    workflow: Workflow
    fleet: EnginePool
    trainer: TrainerLink
    look: Callable[[float | None], Awaitable[list[Span]]]
    recorder: Recorder
    keeper: Checkpointing
    examiner: PeriodicEvaluation
    answers: InFlight
    progress: Callable[[], object]  # changes whenever a role gets anything done


class Conductor:
    """Runs the loops until the last step, the first failure, or a request to stop."""

    def __init__(self, players: Components, steps: int, deadlines: DeadlinesConfig) -> None:
        self._controller = players.controller
        self._workflow = players.workflow
        self._fleet = players.fleet
        self._trainer = players.trainer
        self._look_around = players.look
        self._in_flight = players.answers
        self._progress = players.progress
        self._recorder = players.recorder
        self._keeper = players.keeper
        self._examiner = players.examiner
        self._steps = steps
        self._deadlines = deadlines
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._finished = asyncio.Event()
        self._stopping = asyncio.Event()
        self._conducting = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fleet.listen(self._load)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def request_stop(self) -> None:
        """End after the step in progress, or after ``deadlines.stop`` seconds."""
        self._stopping.set()
        self._finished.set()

    async def run(self) -> None:
        """Returns after the last step, or at a step's end after `request_stop`. The first failure is raised."""
        journaling = asyncio.ensure_future(self._journaling())
        loops: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._training()),
            journaling,
            asyncio.ensure_future(self._fleet.keep_loaded()),
            asyncio.ensure_future(self._observing()),
            self._failure,
        ]
        self._conducting = True
        for ticket in self._controller.tickets:  # those that an earlier conductor had in flight
            self._start(ticket)
        self._admit()
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                await loop
            await cancel_and_wait([journaling])
            await self._give_up()
        finally:
            self._conducting = False  # answers that end from now on, and engines that join, start nothing
            await cancel_and_wait([*loops, *self._answers.values()])

    async def _give_up(self) -> None:
        """Write down how far the answers in flight have come, for the run may go on one day; then let the engines give
        them up, so that every token is accounted for by the one who counts it."""
        self._conducting = False
        await self._in_flight.keep(_LOOK_SECONDS)
        self._in_flight.end()
        at_engines = self._fleet.open
        await cancel_and_wait([task for id, task in self._answers.items() if id not in at_engines])
        await self._fleet.give_up()

    # ── admission and answers ────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        while self._conducting and not self.stopping and (ticket := self._controller.admit()) is not None:
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        task = asyncio.create_task(self._answer(ticket), name=ticket.group_id)
        self._answers[ticket.group_id] = task
        task.add_done_callback(self._answered)

    def _load(self, version: int) -> None:
        self._controller.load(version)
        self._admit()

    async def _answer(self, ticket: Ticket) -> None:
        try:
            trajectories = await self._workflow(ticket)
        except EngineLost as loss:
            self._controller.lose(ticket, str(loss))
        except RefusedRequest as refusal:
            self._controller.fail(ticket, str(refusal))
        else:
            before = self._controller.filtered
            self._controller.finish(ticket, trajectories)
            self._recorder.answered(ticket.draw.prompt, trajectories)
            filtered = self._controller.filtered
            batches, rest = divmod(filtered, _SILENT_BATCHES * self._controller.config.batch_size)
            if filtered > before and not rest and batches.bit_count() == 1:  # at twice as many each time
                self._recorder.filtered(filtered)
        self._in_flight.forget(ticket.group_id)

    def _answered(self, task: asyncio.Task[None]) -> None:
        del self._answers[task.get_name()]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)
        self._finished.set()
        self._admit()

    # ── training ─────────────────────────────────────────────────────────────────────────────────

    async def _training(self) -> None:
        while self._controller.published < self._steps:
            batch = await self._next_batch()
            if batch is None:
                return
            self._admit()
            self._recorder.taken(batch, self._controller.in_flight, self._controller.buffered)
            update = await self._before_the_stop_ends(self._trainer.train(batch))
            if update is None:
                return
            self._controller.publish(update.version)
            self._fleet.publish(update.version)
            self._expire_overdue()
            if update.version == self._steps:
                # The totals of the last step are those of the run.
                await self._before_the_stop_ends(self._look())
            self._recorder.updated(batch, update)
            await self._keeper.after(update)
            if update.version < self._steps:  # the last version is measured when training is over
                self._examiner.after(update)

    async def _next_batch(self) -> Batch | None:
        """The next batch; None when the run is to stop."""
        version = self._controller.published
        try:
            with waiting("trainer", f"a batch at version {version}", self._deadlines.batch):
                async with asyncio.timeout(self._deadlines.batch):
                    return await self._batch_unless_stopping()
        except TimeoutError:
            queues = self._controller
            state = f"{queues.in_flight} groups in flight, {queues.buffered} buffered, {queues.filtered} filtered"
            raise DeadlineExceeded("trainer", f"a batch at version {version}: {state}", self._deadlines.batch) from None

    async def _batch_unless_stopping(self) -> Batch | None:
        while not self.stopping:
            batch = self._controller.take()
            if batch is not None:
                return batch
            self._admit()  # what `take` expired has left room
            self._finished.clear()
            await self._finished.wait()
        return None

    def _expire_overdue(self) -> None:
        for ticket in self._controller.overdue():
            self._answers[ticket.group_id].cancel()
            self._in_flight.forget(ticket.group_id)
            self._controller.expire(ticket)
        self._admit()

    async def _before_the_stop_ends(self, order: Coroutine[Any, Any, Answer]) -> Answer | None:
        """The order's answer; None if a requested stop cannot wait for it any longer."""
        task = asyncio.ensure_future(order)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait([task], timeout=self._deadlines.stop)
            return await task if task.done() else None
        finally:
            await cancel_and_wait([task, stop])

    # ── observing ────────────────────────────────────────────────────────────────────────────────

    async def _journaling(self) -> NoReturn:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._in_flight.keep()

    async def _observing(self) -> None:
        watchdog = Watchdog(self._what_has_moved, self._deadlines.still)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._look(_LOOK_SECONDS)
            self._examiner.check()
            watchdog.look()

    def _what_has_moved(self) -> object:
        controller = self._controller
        return controller.published, controller.live, controller.counted, controller.filtered, self._progress()

    async def _look(self, patience: float | None = None) -> None:
        self._recorder.spans(await self._look_around(patience))
        self._recorder.looked()
