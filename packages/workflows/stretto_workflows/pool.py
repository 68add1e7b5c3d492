"""Worker processes that run workflows, the queue of trajectories for them, and groups: a workflow runs once for each
member, in its own session.

run(exchange) ─► a worker with room ─► trajectory
                     │ the worker dies or hangs
                     └─► it is replaced; its trajectories run again, and their recorded turns are replayed

It is not known which trajectory ended the process. So each of its trajectories is a suspect, and runs again alone in a
process, where innocent ones finish. Meanwhile new trajectories use only workers that are not empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from stretto.core.deadlines import waiting
from stretto.core.errors import RoleDied
from stretto.core.records import Prompt, Trajectory, trajectory_id
from stretto.core.tasks import NamedTasks, cancel_and_wait, first_of, gather_or_cancel
from stretto.processes.spawn import FRESH, Spawner, cut_log
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.processes.tree import kill_marked
from stretto.rollout.controller import Ticket
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig, WorkflowReady
from stretto_workflows.exchange import Exchange, Services
from stretto_workflows.failures import RecentFailures
from stretto_workflows.session import OpenSession
from stretto_workflows.task import task_of
from stretto_workflows.wire import RUN_MARK, MemberEnded
from stretto_workflows.worker_process import WorkerLost, WorkflowProcess

_LOSSES = 2  # deaths of its worker after which a trajectory runs again, each time alone; the next one fails it
_RESTARTS, _RESTARTS_SECONDS = 64, 600.0
_LOOK_SECONDS = 1.0


class WorkflowPool:
    """Pool of worker processes that run workflows; a context manager, which starts and closes it.

    Example::

        async with WorkflowPool(WorkflowConfig(function="multi_turn"), log) as pool:
            trajectory = await pool.run(Exchange(session, prompt, task, services))
    """

    def __init__(
        self,
        config: WorkflowConfig,
        log: Path,
        *,
        hung: float = 10.0,
        say: Callable[[str], None] = lambda sentence: None,
        spawner: Spawner = FRESH,
        run: str = "",
    ) -> None:
        """Make the pool; `start` starts its workers. `log`: file for their output. `hung`: seconds without a heartbeat
        after which a worker is killed. `say` is called with a sentence for each worker that is replaced. `spawner`:
        starts the processes. `run`: unique mark of the run on this machine, to find processes that a killed conductor
        of the run has left; "" for none."""
        self.config = config
        self._log, self._hung, self._say, self._spawner, self._run = log, hung, say, spawner, run
        self._workers: dict[str, WorkflowProcess] = {}
        self._alone: set[WorkflowProcess] = set()  # workers that run a suspect
        self._suspects = 0  # suspects that wait for a process
        self._changed = asyncio.Event()
        self._kept = NamedTasks()
        self._watch: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._failures = RecentFailures(config.max_failed, "workflow")
        self._restarts = RestartBudget(_RESTARTS, _RESTARTS_SECONDS)

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers."""
        return [pid for worker in self._workers.values() for pid in worker.pids]

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended, failed ones included."""
        return self._failures.ended

    async def start(self) -> None:
        """Kill processes that an earlier conductor of the run has left, and start all workers.

        Raises:
            WorkflowError: the workflow cannot be used; the message says why.
            RoleDied, DeadlineExceeded: a worker does not start. Those that did are ended.
        """
        if self._run:
            await asyncio.to_thread(kill_marked, f"{RUN_MARK}={self._run}")
        names = [f"workflow-{number}" for number in range(self.config.workers)]
        try:
            await gather_or_cancel(*(self._start(name) for name in names))
        except BaseException:
            await self.close()
            raise
        for name in names:
            self._kept.add(name, self._keep(name))
        self._kept.add("log", self._look())
        self._watch = asyncio.create_task(self._until_one_fails())

    async def close(self) -> None:
        """End all workers; pending calls of `run` raise RoleDied."""
        self._fail(RoleDied("workflow", "was closed"))
        if self._watch is not None:
            await cancel_and_wait([self._watch])
        await self._kept.close()
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._workers.clear()

    @property
    def ready(self) -> WorkflowReady:
        """Requirements that the workflow declared when it was loaded; only after `start`."""
        return next(iter(self._workers.values())).ready

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, exchange: Exchange) -> Trajectory:
        """Run the workflow for one trajectory, as soon as a worker has room. If the worker dies, it runs again, at most
        twice, each time alone on a worker. Returns the trajectory; its verdict is undecided, with the reason, if the
        workflow fails, or its worker died three times.

        Raises:
            WorkflowError: more than the share `workflow.max_failed` of the last trajectories failed.
            EngineLost: a turn was tried on several engines, and all were lost.
            RoleError: a worker cannot be restarted, workers have ended more than 64 times in ten minutes, the pool is
                closed, or the run could not serve an order.
        """
        how = ""
        for losses in range(1 + _LOSSES):
            worker = await (self._empty() if losses else self._free())
            try:
                ended = await worker.run(exchange)
                break
            except WorkerLost as loss:
                how = str(loss)
                exchange = exchange.again()
            finally:
                if not worker.lost.done():  # otherwise `_keep` still needs to know that a suspect was on it
                    self._alone.discard(worker)
                self._changed.set()
        else:
            if self._failure is not None:
                raise self._failure
            ended = MemberEnded(0, failure=f"its process ended {1 + _LOSSES} times: the last one {how}")
        trajectory = exchange.trajectory(ended)
        self._restarts.progressed()
        self._failures.count(trajectory)
        return trajectory

    async def _free(self) -> WorkflowProcess:
        """Wait for a worker with room; returns the one with the fewest trajectories. Empty workers are not chosen while
        a suspect waits for one."""
        return await self._chosen(lambda worker: worker.free and not (self._suspects and worker.empty))

    async def _empty(self) -> WorkflowProcess:
        """Wait for a worker without any trajectory, and reserve it for a suspect, a trajectory that runs again after
        its worker died."""
        self._suspects += 1
        try:
            worker = await self._chosen(lambda worker: worker.free and worker.empty)
            self._alone.add(worker)
            return worker
        finally:
            self._suspects -= 1
            self._changed.set()

    async def _chosen(self, fits: Callable[[WorkflowProcess], bool]) -> WorkflowProcess:
        """Wait for a worker for which `fits` is true, and which is not reserved for a suspect; returns the one with the
        fewest trajectories. No deadline: each trajectory has its own. Raises the error that has ended the pool."""
        with waiting("conductor", "a workflow process with room", self.config.deadline):
            while True:
                if self._failure is not None:
                    raise self._failure
                if free := [one for one in self._workers.values() if one not in self._alone and fits(one)]:
                    return min(free, key=lambda worker: worker.load)
                self._changed.clear()
                await self._changed.wait()

    async def _start(self, name: str) -> None:
        worker = WorkflowProcess(name, self.config, self._log, self._hung, self._spawner, self._run)
        try:
            await worker.start()
        except BaseException:
            await worker.stop()
            raise
        self._workers[name] = worker
        self._changed.set()

    async def _keep(self, name: str) -> NoReturn:
        """Supervise one worker: replace it when it has ended, or when it is `worn` and has no trajectory left. Raises
        RoleDied when workers have ended too often."""
        supervisor = Supervisor(name, lambda: self._start(name), self._restarts, self._say, str(self._log))
        while True:
            worker = self._workers[name]
            await first_of(worker.lost, worker.worn)
            while not worker.lost.done() and worker.load:
                await asyncio.sleep(_LOOK_SECONDS)  # its other trajectories end first
            how = worker.lost.result() if worker.lost.done() else "has a trajectory that does not end"
            await worker.stop()
            # A death with a suspect does not count: in the end the suspect fails, and `max_failed` bounds failures.
            await supervisor.replace(how, counted=worker not in self._alone)
            self._alone.discard(worker)

    async def _look(self) -> NoReturn:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            cut_log(self._log)
            self._changed.set()  # an abandoned trajectory may have ended meanwhile

    async def _until_one_fails(self) -> None:
        try:
            await self._kept.watch()
        except Exception as error:  # nobody awaits this task: callers that wait for a worker raise the error
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()


async def check_workflow(config: WorkflowConfig, log: Path) -> WorkflowReady:
    """Load the workflow in a worker process, where a module that hangs or exits does no harm, and end the process;
    returns the workflow's requirements. `log`: file for the output of the process.

    Raises:
        WorkflowError: the workflow cannot be used; the message says why.
        RoleDied, DeadlineExceeded: the worker ended or hung while importing it.
    """
    async with WorkflowPool(config.model_copy(update={"workers": 1}), log) as pool:
        return pool.ready


@dataclass(frozen=True)
class WorkflowGroups:
    """Runs the workflow for each member of a group (satisfies `rollout.single_turn.GroupWorkflow`).

    Attributes:
        pool: must have been started.
        open_session: opens the session that records the turns.
        questions: chats and further fields of the rows.
        services: the run's reward, renderings and limits, for the workflows.
    """

    pool: WorkflowPool
    open_session: OpenSession
    questions: QuestionDetails
    services: Services

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        """Run the workflow for all members at the same time; returns their trajectories, in order. An error of
        `WorkflowPool.run` cancels the others."""
        prompt = ticket.draw.prompt
        ids = [trajectory_id(ticket.group_id, member) for member in ticket.members]
        return await gather_or_cancel(
            *(
                self.member(id, prompt, *one, group_seed=ticket.seeds[0])
                for id, one in zip(ids, enumerate(ticket.seeds), strict=True)
            )
        )

    async def member(
        self, id: str, prompt: Prompt, member: int, seed: int, *, group_seed: int | None = None
    ) -> Trajectory:
        """Run the workflow for the member with this index in a group; returns its trajectory, undecided if the workflow
        fails. `id`, `seed`: of the trajectory. `group_seed`: seed that all members of the group share; None: `seed`.
        """
        session = self.open_session(id, prompt.token_ids, seed)
        task = task_of(self.questions, prompt, member, seed, seed if group_seed is None else group_seed)
        rendering = self.services.template if self.questions.is_chat(prompt) else None
        if rendering is not None and (arguments := self.questions.arguments(prompt)):
            rendering = rendering.given(arguments)
        return await self.pool.run(Exchange(session, prompt, task, self.services, rendering))
