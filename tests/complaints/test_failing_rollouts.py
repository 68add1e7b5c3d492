"""What users suffered: sandboxes, processes and folders of rollouts that failed stay, until the machine is full of them
(tinker-cookbook#943, SkyRL#9).

Promise: of rollouts that fail, by hundreds and in every way, and are tried again until `rollout.max_attempts`, no
process, no descriptor, no folder and no control group is left; not after the run, nor while it goes on."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto.core.forest import Tokens
from stretto.core.records import Outcome, State
from stretto.processes.tree import descendants
from stretto.rollout.controller import Controller
from stretto.rollout.workflow import QuestionDetails, WorkflowConfig
from stretto_workflows.pool import WorkflowGroups, WorkflowPool
from stretto_workflows.session import MemoryRecord, Session
from tests.launch.running import children
from tests.rollout.test_controller import controller
from tests.workflows.benches import Bench

HERE = Path(__file__).parent
MEMBERS, TOGETHER = 10, 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def groups() -> list[str]:
    """The control groups of sandboxes whose process, which their name tells, has ended. Living ones may be of a test
    beside this one."""
    found = (path for path in Path("/sys/fs/cgroup").rglob("stretto-*") if path.is_dir())
    return sorted(str(path) for path in found if not Path("/proc", path.name.split("-")[1]).exists())


@pytest.fixture
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for scratch files, which is empty at the end; and no process, descriptor or group is new then."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = children(), descriptors(os.getpid()), groups()
    yield scratch
    assert (children(), descriptors(os.getpid()), groups()) == before
    assert list(scratch.iterdir()) == []


async def collected(groups: WorkflowGroups, control: Controller, rollouts: int, seen: Callable[[], None]) -> list[str]:
    """The names of groups that are admitted, fail and are tried again, some at a time, until there were enough."""
    names: list[str] = []
    while len(names) * MEMBERS < rollouts:
        tickets = [ticket for _ in range(TOGETHER) if (ticket := control.admit()) is not None]
        for ticket, trajectories in zip(tickets, await asyncio.gather(*map(groups, tickets)), strict=True):
            assert {one.verdict.outcome for one in trajectories} == {Outcome.UNDECIDED}
            control.finish(ticket, trajectories)
            names.append(ticket.group_id)
        seen()
    return names


@pytest.mark.parametrize("rollouts", [200, pytest.param(500, marks=pytest.mark.long)])
def test_hundreds_of_failing_trajectories_that_are_tried_again_leave_nothing(
    nothing_is_left: Path, tmp_path: Path, rollouts: int
) -> None:
    """A tenth of them in a program in the sandbox."""
    config = WorkflowConfig(function="failing_workflow:Fails", path=str(HERE), concurrency=32, max_failed=1.0)
    control, accounts = controller(batch_size=TOGETHER, group_size=MEMBERS, max_failures_in_a_row=rollouts)
    bench = Bench(config, tmp_path / "workflow.txt")
    seen: list[tuple[int, int, int]] = []

    def open_session(id: str, tokens: Tokens, seed: int) -> Session:
        record = MemoryRecord()
        return Session(id, tokens, seed, bench.model.sampler(record), record, record.segments, record.calls)

    async def run() -> list[str]:
        async with WorkflowPool(config, bench.log) as pool:

            def see() -> None:
                (pid,) = pool.pids
                seen.append((descriptors(pid), len(descendants(pid)), descriptors(os.getpid())))

            return await collected(
                WorkflowGroups(pool, open_session, QuestionDetails(), bench.services), control, rollouts, see
            )

    attempts = Counter(int(name.rpartition(".")[2]) for name in asyncio.run(asyncio.wait_for(run(), 300)))
    assert set(attempts) == set(range(3)), "rollout.max_attempts"
    assert accounts.balance[State.FAILED] == attempts.total() * MEMBERS >= rollouts
    first, *_, last = seen
    assert last <= tuple(number + 8 for number in first), seen  # eight: what the collector has not come to yet
    assert last[1] == 0, "a program of a sandbox, or its sandbox, is left while the run goes on"
