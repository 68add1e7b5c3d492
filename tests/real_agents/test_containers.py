"""Promise: a container of Debian's podman is an agent like any program: it finds its session in its environment, and
ends with its trajectory, the container too."""

import shutil
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from stretto.core.records import Outcome
from tests.gateway.test_agents import run_of

NAMES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "STRETTO_TASK", "STRETTO_SESSION")
#: The files of this machine are those of the container, which writes over them in a layer of its own.
ROOT = "/:O"
TURN = (
    'body=\'{"model": "\'$OPENAI_MODEL\'", "messages": [{"role": "user", "content": "hi"}]}\'; '
    'curl -sf -H "Authorization: Bearer $OPENAI_API_KEY" -d "$body" $OPENAI_BASE_URL/chat/completions && '
)
REWARD = "curl -sf -d '{\"reward\": 0.25}' $STRETTO_SESSION/reward"
SECONDS = 60.0


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *words], capture_output=True, text=True, timeout=SECONDS, check=False)


def command(label: str, program: str) -> list[str]:
    """A shell in a container; `label` names it for `left_of`."""
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
    environment = [word for name in NAMES for word in ("--env", name)]
    where = ["--label", label, "--network", "host", *environment, "--rootfs", ROOT]
    return ["podman", "--runtime", "runc", "run", "--rm", "--init", *limits, *where, "/bin/sh", "-c", program]


def left_of(label: str) -> list[str]:
    """Containers with the label that run, or have not been removed, a moment later."""
    until = time.monotonic() + SECONDS
    while (found := podman("ps", "--all", "--quiet", "--filter", f"label={label}").stdout.split()) and (
        time.monotonic() < until
    ):
        time.sleep(0.1)
    return found


@pytest.fixture
def label() -> str:
    """Of the containers of a test. Where no container can run, the test is skipped with podman's own words."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    tried = subprocess.run(command("tried", "true"), capture_output=True, text=True, timeout=SECONDS, check=False)
    if tried.returncode:
        pytest.skip(f"podman cannot run a container: {tried.stderr.strip()[-300:]}")
    return uuid.uuid4().hex


async def test_a_container_finds_its_session_and_gives_its_reward(label: str, tmp_path: Path) -> None:
    trajectory = await run_of(tmp_path).one(command=command(label, TURN + REWARD))
    assert trajectory.verdict.reward == 0.25
    assert [segment.sampled for segment in trajectory.segments] == [False, True]
    assert left_of(label) == []


async def test_a_container_that_does_not_end_ends_with_its_trajectory(label: str, tmp_path: Path) -> None:
    trajectory = await run_of(tmp_path).one(command=command(label, f"{TURN} sleep 600"), deadline=5.0)
    assert trajectory.verdict.outcome is Outcome.UNDECIDED
    assert "5 s" in trajectory.verdict.reason
    assert left_of(label) == []
