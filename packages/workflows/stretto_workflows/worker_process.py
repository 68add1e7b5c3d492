"""Conductor's handle of a worker process that runs workflows: its trajectories, their time limits, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.deadlines import waiting
from stretto.core.errors import (
    UNREADABLE,
    CallInterrupted,
    DataError,
    DeadlineExceeded,
    RefusedRequest,
    RoleDied,
    WireError,
    WorkflowError,
)
from stretto.core.tasks import cancel_and_wait
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.tree import descendants, kill_marked
from stretto.rollout.workflow import WorkflowConfig, WorkflowReady
from stretto_verify.sandbox.cgroups import remove_groups_of
from stretto_workflows.exchange import Exchange, Forged
from stretto_workflows.wire import (
    LARGEST_MESSAGE,
    MARK,
    RUN_MARK,
    Begin,
    CallOrder,
    CallRan,
    FromWorker,
    GiveUp,
    MemberEnded,
    MemberGone,
    Order,
    OrderDone,
    OrderRefused,
    RunCall,
    ScoreOrder,
    ToWorker,
    TurnOrder,
    WorkflowRefused,
    WorkflowSpec,
)

ROLE = "stretto_workflows.worker"
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)
_MOST_AT_A_TIME = 256  # orders in progress of one trajectory; with more it fails
_MOST_STRAYS = 10_000  # messages for trajectories that have ended
_GONE_SECONDS = 5.0  # in which the code of an abandoned trajectory has to end


class WorkerLost(Exception):
    """Raised when the worker process has ended, and with it its trajectories; the text says how."""


class _OwnTime:
    """Time limit of a trajectory that pauses while it waits for the run (a turn or a score). The future `over` is done
    when the time is used up."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._left, self._served = seconds, 0
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._go_on()

    def _go_on(self) -> None:
        self._since = self._loop.time()
        self._timer = self._loop.call_later(max(0.0, self._left), self._end)

    def runs(self) -> bool:
        """Whether the clock runs: no pause, and time is left."""
        return self._timer is not None and not self.over.done()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: pause while the run serves an order. After the last of overlapping pauses the time runs
        again."""
        self._served += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left -= self._loop.time() - self._since
        try:
            yield
        finally:
            self._served -= 1
            if not self._served and not self.over.done():
                self._go_on()

    def close(self) -> None:
        """Stop for good, also if an order is served now."""
        self.over.cancel()
        if self._timer is not None:
            self._timer.cancel()


class _Member:
    """One trajectory on the worker.

    Attributes:
        run: its number on the worker.
        gone: whether the worker has reported that nothing of the trajectory runs any more.
        told: whether the worker has reported how the workflow ended.
        over: whether `run` has its result, so that no order is served any more.
        ended: done with the workflow's result or failure.
        broken: raises an error of the run that occurred while it served an order.
        calls: results that the worker still owes, by number of the order.
        orders: tasks that serve orders.
        serving: the same tasks, by number of the order.
        leaving: those of them that are cancelled and have not ended.
        nodes: turns that were sent to the worker, by number of the order.
    """

    def __init__(self, run: int, exchange: Exchange, seconds: float) -> None:
        self.run, self.exchange = run, exchange
        self.gone = self.told = self.over = False
        self.time = _OwnTime(seconds)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[MemberEnded] = loop.create_future()
        self.broken: asyncio.Future[None] = loop.create_future()
        self.calls: dict[int, asyncio.Future[bytes]] = {}
        self.orders: set[asyncio.Task[None]] = set()
        self.serving: dict[int, asyncio.Task[None]] = {}
        self.leaving: set[asyncio.Task[None]] = set()
        self.nodes: dict[int, int] = {}

    def give_up(self, order: int) -> None:
        """Cancel an order whose result the workflow no longer wants. A turn that has ended counts as not returned."""
        if (node := self.nodes.pop(order, None)) is not None:
            self.exchange.take_back(node)
        elif (task := self.serving.get(order)) is not None:
            task.cancel()
            self.leaving.add(task)
            task.add_done_callback(self.leaving.discard)

    def end(self, ended: MemberEnded) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)

    def fail(self, reason: str) -> None:
        self.end(MemberEnded(self.run, failure=reason))

    def break_off(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
            self.broken.exception()  # marks it as retrieved, since the trajectory may have ended


class WorkflowProcess:
    """Handle of one worker process. It is used for one process only; the pool makes a new one to replace it.

    Attributes:
        lost: future, done with how the process ended.
        worn: future, done when an abandoned trajectory goes on in the process, which then takes no more trajectories.
        ready: requirements that the workflow declared when it was loaded.
    """

    ready = WorkflowReady()

    def __init__(
        self, name: str, config: WorkflowConfig, log: Path, hung: float, spawner: Spawner = FRESH, run: str = ""
    ) -> None:
        """Make the handle, without starting the process. `hung`: seconds without a heartbeat after which the process is
        killed. `run`: unique mark of the run, or ""."""
        self.name = name
        self._config, self._log = config, log
        self._process = RoleProcess(name, ROLE, log, hung, spawner)
        self._channel: ConductorEnd[FromWorker] = ConductorEnd(name, _FROM_WORKER, str(log), LARGEST_MESSAGE)
        self._members: dict[int, _Member] = {}
        self._given_up: dict[int, asyncio.TimerHandle] = {}
        self._left_behind: dict[int, asyncio.TimerHandle] = {}  # of trajectories that ended and may have left threads
        self._runs = self._strays = 0
        self._ending = False
        self._reading: asyncio.Task[None] | None = None
        self._pid: int | None = None
        self._marks = {MARK: uuid.uuid4().hex} | ({RUN_MARK: run} if run else {})
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.worn: asyncio.Future[None] = loop.create_future()

    @property
    def pids(self) -> list[int]:
        """The process's id, in a list; empty if the process is not running."""
        return self._process.pids

    @property
    def load(self) -> int:
        """Number of trajectories on the worker, without abandoned ones."""
        return len(self._members)

    @property
    def empty(self) -> bool:
        """Whether the worker has no trajectory, not even an abandoned one that may still be running."""
        return not self._members and not self._given_up

    @property
    def free(self) -> bool:
        """Whether the worker takes another trajectory: it runs, is not `worn`, and has fewer than
        `workflow.concurrency`."""
        return not (self.worn.done() or self._ending or self.lost.done()) and self.load < self._config.concurrency

    async def start(self) -> None:
        """Start the process and wait until it has loaded the workflow. Whatever it raises, `stop` must follow.

        Raises:
            WorkflowError: the workflow cannot be used; the message says why.
            RoleDied, DeadlineExceeded: the process does not start.
        """
        descriptor = self._channel.far.fileno()
        settings = msgspec.json.encode(self._config.settings).decode()
        memory = int(self._config.memory_gib * (1 << 30))
        spec = WorkflowSpec(self._config.function, settings, descriptor, memory, self._config.path)
        await self._process.start(spec, 1, (descriptor,), self._marks)
        self._pid = self._process.pid
        await self._channel.open(self._process.ended)
        said = await self._channel.receive(f"to import {self._config.function}", self._config.start_timeout)
        if isinstance(said, WorkflowRefused):
            raise WorkflowError(said.problems)
        if not isinstance(said, WorkflowReady):
            raise RoleDied(self.name, "sent another message before it was ready", str(self._log))
        self.ready = said
        self._reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Kill the process and its descendants, and remove the cgroups of their sandboxes. Calls of `run` raise
        WorkerLost."""
        if self._reading is not None:
            await cancel_and_wait([self._reading])
        if not self.lost.done():
            self.lost.set_result("was stopped")
        for timer in (*self._given_up.values(), *self._left_behind.values()):
            timer.cancel()
        self._channel.close()
        if self._pid is not None and self._process.running:  # descendants in sessions of their own would survive
            for pid in descendants(self._pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        await self._process.stop(0.0)
        if self._pid is not None:
            await asyncio.to_thread(kill_marked, f"{MARK}={self._marks[MARK]}")
            await asyncio.to_thread(remove_groups_of, self._pid)  # of the sandboxes of its tools

    async def run(self, exchange: Exchange) -> MemberEnded:
        """Run the workflow for one trajectory; returns its result, or its failure. It fails if it takes more than
        `workflow.deadline` seconds, apart from waits for turns and scores, has more than 256 orders in progress, or
        forges a message. If it is still at work on return, the worker is ordered to abandon it.

        Raises:
            WorkerLost: the process has ended.
            Exception: any error of the run while it served an order, such as EngineLost.
        """
        self._runs += 1
        member = self._members[self._runs] = _Member(self._runs, exchange, self._config.deadline)
        try:
            try:
                await self._send(Begin(member.run, exchange.task))
            except (OverflowError, UnicodeEncodeError, RecursionError) as error:  # of the row's fields
                member.gone = True  # it has not begun
                member.fail(f"its task cannot be sent to the workflow: {type(error).__name__}: {error}")
                return member.ended.result()
            ends: list[asyncio.Future[Any]] = [member.ended, member.broken, member.time.over, self.lost]
            awaited = f"the workflow of {exchange.session.id}"
            with waiting("conductor", awaited, self._config.deadline, member.time.runs):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if member.broken.done():
                member.broken.result()
            if not member.ended.done() and self.lost.done():
                raise WorkerLost(self.lost.result())
            member.fail(f"the workflow took more than {self._config.deadline:g} s of its own")
            return member.ended.result()
        finally:
            member.over = True
            member.time.close()
            try:
                await cancel_and_wait([*member.orders])
            finally:
                del self._members[member.run]
                self._part_with(member)
            if member.run in self._given_up:
                with contextlib.suppress(WorkerLost):
                    await self._send(GiveUp(member.run))

    def _part_with(self, member: _Member) -> None:
        """Resolve `worn` later, unless the worker reports before that nothing of this trajectory runs any more: after
        five seconds if the trajectory was abandoned, else after `workflow.deadline`, for threads that it left
        behind."""
        if member.gone or self.lost.done():
            return
        left, seconds = (self._left_behind, self._config.deadline) if member.told else (self._given_up, _GONE_SECONDS)
        left[member.run] = asyncio.get_running_loop().call_later(seconds, self._wear_out)

    def _wear_out(self) -> None:
        if not self.worn.done():
            self.worn.set_result(None)

    async def _send(self, message: ToWorker) -> None:
        try:
            await self._channel.send(message)
        except (RoleDied, DeadlineExceeded) as loss:
            raise WorkerLost(str(loss)) from None

    async def _read(self) -> None:
        """Read messages until the process has ended, and then set `lost` to how it did; kill it for a malformed
        message. No deadline, since the pool ends it."""
        how = ""
        try:
            while True:
                self._take(await self._channel.next())
        except RoleDied:
            self._ending = True
            how = await self._process.last_words()
        except (WireError, *UNREADABLE):
            how = "was killed because user code wrote into its messages"
            self._process.kill()
        self.lost.set_result(how)

    def _take(self, message: FromWorker) -> None:
        """Handle one message of the worker: settle a result or a call, cancel or begin an order; drop it if its
        trajectory has ended. Raises WireError for too many of these, and for what a correct worker does not send."""
        if isinstance(message, WorkflowReady | WorkflowRefused):
            raise WireError(f"{self.name} said that it is ready a second time")
        member = self._members.get(message.run)
        if isinstance(message, MemberGone) and self._forget(message.run):
            return
        if isinstance(message, MemberEnded) and message.run in self._given_up:
            return  # it was under way when the trajectory was given up
        if member is None or (member.over and not isinstance(message, MemberEnded)):
            self._strays += 1
            if self._strays > _MOST_STRAYS:
                raise WireError(f"{self.name} sent too many messages for trajectories that have ended")
        elif isinstance(message, MemberEnded):
            member.told = True
            member.end(message)
        elif isinstance(message, CallRan):
            if (call := member.calls.pop(message.order, None)) is not None and not call.done():
                call.set_result(message.answer)
        elif isinstance(message, GiveUp):
            member.give_up(message.order)
        elif isinstance(message, TurnOrder | ScoreOrder | CallOrder):
            self._begin(member, message)

    def _forget(self, run: int) -> bool:
        """Note that nothing of a trajectory runs any more; returns False if it is unknown."""
        if (timer := self._given_up.pop(run, None) or self._left_behind.pop(run, None)) is not None:
            timer.cancel()
            return True
        if (member := self._members.get(run)) is not None:
            member.gone = True
        return member is not None

    def _begin(self, member: _Member, order: Order) -> None:
        if len(member.orders) >= _MOST_AT_A_TIME:
            member.fail(f"the workflow has more than {_MOST_AT_A_TIME} requests in progress")
            return
        task = member.serving[order.order] = asyncio.create_task(self._serve(member, order))
        member.orders.add(task)
        task.add_done_callback(member.orders.discard)
        task.add_done_callback(lambda _: member.serving.pop(order.order, None))

    async def _serve(self, member: _Member, order: Order) -> None:
        reply: OrderDone | OrderRefused
        try:
            reply = await self._served(member, order)
        except RefusedRequest as refusal:
            reply = OrderRefused(order.run, order.order, refusal.field, refusal.found, refusal.allowed)
        except DataError as mistake:  # an error in the workflow's messages
            [problem, *_] = mistake.problems
            reply = OrderRefused(order.run, order.order, problem.place, problem.found, problem.remedy)
        except (CallInterrupted, Forged) as end:
            member.fail(str(end))
            return
        except WorkerLost:  # `run` raises it
            return
        except Exception as error:  # a lost engine or reward worker, a bug: raised where the group is awaited
            member.break_off(error)
            return
        if isinstance(reply, OrderDone) and reply.reply is not None:
            member.nodes[order.order] = reply.reply.node
        with contextlib.suppress(WorkerLost):
            await self._send(reply)

    async def _served(self, member: _Member, order: Order) -> OrderDone:
        if isinstance(order, CallOrder):
            return await member.exchange.call(order, lambda: self._called(member, order.order))
        with member.time.paused():
            if isinstance(order, TurnOrder):
                if member.leaving:  # a turn that is given up counts for the limits until its sampler has ended
                    await asyncio.wait([*member.leaving])
                return await member.exchange.turn(order)
            return await member.exchange.score(order)

    async def _called(self, member: _Member, order: int) -> bytes:
        """Ask the worker to make a call, and wait for its result. This time counts for the trajectory's limit."""
        call: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        member.calls[order] = call
        await self._send(RunCall(member.run, order))
        return await call
