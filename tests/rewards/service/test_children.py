"""What a reward has started ends with its worker: in sessions of its own, and when its parent has exited."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.rewards.config import RewardsConfig
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
