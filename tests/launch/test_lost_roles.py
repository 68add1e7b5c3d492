"""Roles that die in the middle of a run.

- A killed engine is replaced, its prompts are asked again, the run completes and says what happened. A killed reward
  worker costs nothing.
- A killed trainer ends the run with a message that names it and how it died; the run goes on by --resume.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.launch.running import Laboratory, assert_the_law, exported, said, steps_done, wait_for_step


def test_a_killed_engine_and_reward_worker_are_replaced(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=40", "trainer.keep_versions=1") as command:
        wait_for_step(command, 2)
        for pid in (command.role("engine"), *command.processes("stretto.rewards.worker")):
            os.kill(pid, signal.SIGKILL)
        ended = command.end()
        assert ended.code == 0, ended.err
        command.assert_nothing_is_left()
    assert "engine-0 was killed by SIGKILL" in ended.out
    assert "engine-0 was killed by SIGKILL" in said(run_dir)
    found = assert_the_law(run_dir)
    assert found.steps == 40
    assert 0 < found.busy["engine-0"] <= 1
    trajectories = exported(laboratory, run_dir)
    failed = [t for t in trajectories if t["state"] == "failed"]
    assert failed
    assert all("engine-0" in t["reason"] for t in failed), {t["reason"] for t in failed}
    groups = {t["group"] for t in trajectories}
    for group in {t["group"] for t in failed}:
        prompt, _, attempt = group.rpartition(".")
        assert f"{prompt}.{int(attempt) + 1}" in groups, f"{group} was not asked again"


def test_a_killed_trainer_ends_the_run_with_its_name_and_the_run_goes_on(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000") as command:
        wait_for_step(command, 3)
        os.kill(command.role("trainer"), signal.SIGKILL)
        ended = command.end(20)
        assert ended.code == 1
        ended.says("trainer was killed by SIGKILL", "logs/trainer.txt")
        command.assert_nothing_is_left()
    assert "failed: trainer was killed by SIGKILL" in said(run_dir)
    assert_the_law(run_dir)
    before = steps_done(run_dir)
    laboratory.trained(run_dir, f"trainer.steps={before + 2}", "--resume")
    assert assert_the_law(run_dir).steps == before + 2
