"""What a reward has started ends with its worker: in sessions of its own, and when its parent has exited.

A child that a reward has forked never judges for the worker, and the ends of children are known under any supervisor.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.core.records import Outcome
from stretto.processes.tree import children
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from tests.rewards.scoring import scored
from tests.rewards.service.test_pool import runs

_MODULE = """
import os, subprocess, time
def child(prompt, completion, answer):
    child = subprocess.Popen(["sleep", "600"], start_new_session=completion == "hang").pid
    with open(answer, "a") as file: file.write(f" {child}")
    if not os.fork(): time.sleep(600)
    if completion == "exit": os._exit(3)
    time.sleep(600)
def orphan(prompt, completion, answer):
    if not os.fork():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        with open(answer, "a") as file: file.write(f" {child}")
        os._exit(0)
    os.wait()
    if completion == "exit": os._exit(3)
    time.sleep(600)
"""
HOW_THEY_END = [
    ("hang", "timeout after 1 s, with less than 0.1 s of processor time"),
    ("exit", "worker died: exit status 3"),
]


@pytest.mark.parametrize("reward", ["child", "orphan"])
@pytest.mark.parametrize(("completion", "how"), HOW_THEY_END)
def test_what_a_reward_started_ends_with_its_worker(tmp_path: Path, completion: str, how: str, reward: str) -> None:
    (tmp_path / "parents.py").write_text(_MODULE)
    mark = tmp_path / "mark"
    config = RewardsConfig(function=f"parents:{reward}", path=str(tmp_path), timeout=0.1)
    [verdict] = scored(config, ScoreItem(prompt="", completion=completion, answer=str(mark)))
    assert verdict.reason == how
    started = mark.read_text().split()
    assert [runs(int(pid)) for pid in started] == [False] * len(started) != []


_FORKS = """
import os, subprocess, sys
def forked(prompt, completion, answer):
    child = os.fork()
    if child == 0:
        if completion == "returns": return 0.25
        if completion == "exits": sys.exit(3)
        if completion == "raises": raise KeyError("in the child")
    _, status = os.waitpid(child, 0)
    return float(os.waitstatus_to_exitcode(status))
def program(prompt, completion, answer):
    return subprocess.run(["false"]).returncode == 0
def dies(prompt, completion, answer):
    if not os.fork():
        while True: pass
    os._exit(4)
if os.environ.get("FORKS_WHILE_IMPORTED") and os.fork() == 0:
    sys.exit(0)
"""


@pytest.fixture
def forks(tmp_path: Path) -> Path:
    (tmp_path / "forking_reward.py").write_text(_FORKS)
    return tmp_path


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """SIGCHLD is ignored, as some supervisors start their programs."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


async def test_a_forked_child_never_answers_for_its_worker(forks: Path) -> None:
    async with RewardPool(RewardsConfig(function="forking_reward:forked", path=str(forks), workers=1)) as pool:
        ends = ("returns", "exits", "raises")
        verdicts = await pool.score([ScoreItem(prompt="", completion=end, answer="") for end in ends])
        assert [verdict.reward for verdict in verdicts] == [0.0, 3.0, 1.0]  # the codes with which the children ended
        assert [children(pid) for pid in pool.pids] == [[]]


def test_a_child_that_an_import_has_forked_is_no_worker(forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKS_WHILE_IMPORTED", "yes")
    config = RewardsConfig(function="forking_reward:forked", path=str(forks))
    assert [verdict.reward for verdict in scored(config, ScoreItem("", "exits", ""))] == [3.0]


@pytest.mark.usefixtures("ignored_children")
def test_a_reward_knows_how_its_programs_end_where_children_are_ignored(forks: Path) -> None:
    config = RewardsConfig(function="forking_reward:program", path=str(forks))
    assert [verdict.outcome for verdict in scored(config, ScoreItem("", "", ""))] == [Outcome.WRONG]


@pytest.mark.usefixtures("ignored_children")
def test_a_worker_that_forks_and_dies_ends_no_run_where_children_are_ignored(forks: Path) -> None:
    config = RewardsConfig(function="forking_reward:dies", path=str(forks), timeout=1.0)
    [verdict] = scored(config, ScoreItem("", "", ""))
    assert verdict.outcome is Outcome.UNDECIDED
    assert verdict.reason.startswith("worker died")
