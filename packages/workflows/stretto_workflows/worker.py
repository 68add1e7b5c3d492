"""Process that runs workflows: ``python -m stretto_workflows.worker SPEC``.

Each trajectory has a thread with its own event loop, so that a trajectory that hangs does not block the others. Output
of the workflow goes to the log. An exception of the workflow fails its trajectory, with the exception as the reason.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stretto.core.errors import WireError, WorkflowError
from stretto.core.states import why_no_reward
from stretto.core.tasks import cancel_and_wait
from stretto.doors.loading import look_in
from stretto.processes.channel import ConductorGone, RoleEnd
from stretto.processes.heartbeat import begin_role, bound_memory
from stretto_workflows.conversation import Conversation, Workflow, message_of
from stretto_workflows.loading import load_workflow, needs_of
from stretto_workflows.orders import Orders
from stretto_workflows.task import Reward, WorkflowTask
from stretto_workflows.wire import (
    LARGEST_MESSAGE,
    Begin,
    GiveUp,
    MemberEnded,
    MemberGone,
    OrderDone,
    OrderRefused,
    RunCall,
    ToWorker,
    WorkflowRefused,
    WorkflowSpec,
)

_REASON_LIMIT = 300  # characters; an exception may carry a whole document
_NEEDED = "a number or a stretto.Reward is needed"
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)


class _MemberThread:
    """Thread of one trajectory, in which the workflow runs."""

    def __init__(
        self,
        run: int,
        task: WorkflowTask,
        workflow: Workflow,
        end: RoleEnd[ToWorker],
        over: Callable[[int], object],
    ) -> None:
        """Make the thread; `start` starts it. `run`: number of the trajectory on this worker. `end`: the worker's end
        of the channel. `over` is called with `run` when the trajectory has ended."""
        self._run, self._task, self._workflow, self._end, self._over = run, task, workflow, end, over
        self._work: asyncio.Task[float | Reward] | None = None
        self._given_up = self._told = False
        self._orders = Orders(run, end)

    def start(self) -> None:
        """Start the thread; returns at once. If the system has no room for a thread or its event loop, the trajectory
        fails."""
        try:
            self._loop = asyncio.new_event_loop()
            try:
                threading.Thread(target=self._main, name=f"workflow {self._run}", daemon=True).start()
            except RuntimeError:
                self._loop.close()
                raise
        except (RuntimeError, OSError) as error:  # the limit of memory, threads or open files
            self._over(self._run)
            self._tell(MemberEnded(self._run, failure=f"no thread could be started for it: {error}"))
            self._end.send(MemberGone(self._run))

    def deliver(self, message: OrderDone | OrderRefused | RunCall | GiveUp) -> None:
        """Pass a message of the conductor to this trajectory's event loop; called from the thread that reads the
        channel. A message for a trajectory that has ended is dropped."""
        try:
            self._loop.call_soon_threadsafe(self._take, message)
        except RuntimeError:  # its loop has ended meanwhile
            return

    def _take(self, message: OrderDone | OrderRefused | RunCall | GiveUp) -> None:
        if not isinstance(message, GiveUp):
            self._orders.take(message)
            return
        self._given_up = self._orders.over = True
        if self._work is not None:
            self._work.cancel()

    def _main(self) -> None:
        try:
            try:
                with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                    runner.run(self._until_told())
            except ConductorGone:
                raise
            # A tool may raise SystemExit, which ends the event loop of its trajectory.
            except BaseException as error:
                self._tell(MemberEnded(self._run, failure=f"the workflow raised {_described(error)}"[:_REASON_LIMIT]))
            self._over(self._run)
            self._end.send(MemberGone(self._run))
        except ConductorGone:
            return

    async def _until_told(self) -> None:
        """Run the workflow to its end, cancel the tasks that it has left, and send its result. The event loop ends
        later, if the workflow has left a thread behind."""
        ended = await self._ended()
        await cancel_and_wait([*(asyncio.all_tasks() - {asyncio.current_task()})])
        await asyncio.get_running_loop().shutdown_asyncgens()
        self._tell(ended)

    def _tell(self, ended: MemberEnded) -> None:
        """Send the result, once; a failure in its place if it is too long or cannot be encoded. Nothing if the
        conductor has given the trajectory up."""
        if self._told or self._given_up:
            return
        self._told = True
        try:
            self._end.send(ended)
        except WireError as error:
            self._end.send(MemberEnded(self._run, failure=f"the workflow returned too long a reward: {error}"))
        except (UnicodeEncodeError, OverflowError) as error:  # of its names, or of its turns' numbers
            failure = f"the workflow returned a reward that cannot be sent: {error}"
            self._end.send(MemberEnded(self._run, failure=failure))

    async def _ended(self) -> MemberEnded:
        """Run the workflow to its end, unless it was given up before it began. Any exception of the user's code,
        SystemExit included, becomes the reason of a failure. Raises ConductorGone if the conductor has ended."""
        if self._given_up:
            return MemberEnded(self._run)
        try:
            self._work = asyncio.ensure_future(self._workflow.run(self._task, Conversation(self._orders, self._task)))
            kind = type(self._workflow)
            return ended_with(self._run, await self._work, f"{kind.__module__}:{kind.__qualname__}")
        except BaseException as error:
            own = asyncio.current_task()
            if isinstance(error, ConductorGone) or (own is not None and own.cancelling()):
                raise  # the second: SystemExit, by which the event loop ends
            return MemberEnded(self._run, failure=f"the workflow raised {_described(error)}"[:_REASON_LIMIT])


def ended_with(run: int, value: object, name: str) -> MemberEnded:
    """Make the final message for the workflow `name` that returned `value`, a number or a `Reward`; a failure if it
    holds anything but numbers within the bounds of rewards. Those of a list `by_turn` get the keys -1, -2, …, for the
    first turn, the second, …. `run`: number of the trajectory.

    Raises:
        TypeError: a key of `by_turn` is not a whole number.
    """
    found = value if isinstance(value, Reward) else Reward(value)  # type: ignore[arg-type]  # looked at below
    # Rewards in the order of the turns have negative keys until their nodes are known.
    turns = (
        found.by_turn if isinstance(found.by_turn, Mapping) else {-1 - at: one for at, one in enumerate(found.by_turn)}
    )
    named = found.named or {}
    numbers: tuple[Any, ...] = (found.value, *turns.values(), *named.values())
    for number in numbers:
        plain = number.item() if getattr(number, "shape", None) == () else number  # a scalar of numpy or torch
        if reason := why_no_reward(plain):
            return MemberEnded(run, failure=f"the workflow {name} returned {reason}; {_NEEDED}")
    by_turn = {operator.index(node): float(reward) for node, reward in turns.items()}
    if isinstance(found.by_turn, Mapping) and (foreign := min(by_turn, default=0)) < 0:
        return MemberEnded(run, failure=f"the workflow gives a reward to turn {foreign}, which was not returned to it")
    return MemberEnded(run, float(found.value), by_turn, {str(name): float(part) for name, part in named.items()})


def _described(error: BaseException) -> str:
    text = message_of(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f" in {file}:{line}" for file, line in frames if not file.startswith("<") and not _is_ours(file)]
    kind = f"{type(error).__name__}{own[0] if own else ''}"
    whole = f"{kind}: {text}" if text else kind
    return whole.encode(errors="backslashreplace").decode()  # lone surrogates, which no message can hold


def _is_ours(file: str) -> bool:
    return "stretto_workflows/" in file


def serve(workflow: Workflow, end: RoleEnd[ToWorker]) -> None:
    """Run trajectories, each in a thread of its own, until the conductor closes the channel `end`."""
    members: dict[int, _MemberThread] = {}
    while (message := end.receive()) is not None:
        if isinstance(message, Begin):
            member = members[message.run] = _MemberThread(message.run, message.task, workflow, end, members.pop)
            member.start()
        elif (known := members.get(message.run)) is not None:
            known.deliver(message)


def main(arguments: list[str]) -> int:
    """Load the workflow, report to the conductor that it is ready or refused, and run trajectories until the conductor
    ends. `arguments`: a `WorkflowSpec` as JSON. Returns the exit code, 0 unless the workflow is refused."""
    spec = msgspec.json.decode(arguments[0], type=WorkflowSpec)
    begin_role()
    bound_memory(spec.memory)
    look_in(spec.path or "")
    end = RoleEnd(spec.descriptor, _TO_WORKER, LARGEST_MESSAGE)
    try:
        try:
            workflow = load_workflow(spec.function, spec.settings)
            ready = needs_of(workflow)
        except WorkflowError as error:
            end.send(WorkflowRefused(tuple(error.problems)))
            return error.exit_code
        end.send(ready)
        serve(workflow, end)
    except ConductorGone:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
