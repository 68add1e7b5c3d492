"""Roles that die or hang in the middle of a run: the run goes on without a resume.

- A killed engine is replaced, its answers go on elsewhere under their names. A killed reward worker costs nothing.
- A killed trainer is replaced, trains the batches since the last checkpoint again, and stands where the other stood.
- A stopped process (SIGSTOP) is as good as dead after `deadlines.hung`.
- The process that roles are forked from may die, and they with it: they are replaced all the same.
- One that dies too often ends the run with a message that names it and how it died; the run goes on by --resume.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from stretto.store.series.spans import read_spans
from tests.launch.running import (
    Laboratory,
    assert_the_law,
    exported,
    said,
    shared_files,
    steps_done,
    wait_for_step,
    wait_until,
)


def test_a_killed_engine_and_reward_worker_are_replaced(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=40", "trainer.keep_versions=1") as command:
        wait_for_step(command, 2)
        for pid in (command.role("engine"), *command.processes("stretto.rewards.service.worker")):
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
    assert {t["state"] for t in trajectories} <= {"trained", "buffered", "in_flight"}
    assert all(t["group"].endswith(".0") for t in trajectories), "no prompt was asked twice"


def test_an_engine_that_is_lost_while_the_start_is_measured_comes_back(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000", "engine.count=2") as command:
        wait_until(lambda: "accuracy of version 0" in said(run_dir), "the first evaluation", command)
        (lost,) = command.processes('"engine-0"')
        os.kill(lost, signal.SIGKILL)
        killed = time.monotonic()
        wait_for_step(command, 1)  # the other engine has gone on
        wait_until(lambda: worked_since(run_dir, "engine-0", killed), "work of the new engine", command)


def worked_since(run_dir: Path, role: str, moment: float) -> bool:
    """Does the timeline show work of a role after a moment (`time.monotonic`)?"""
    return any(span.role == role and span.start > moment for span in read_spans(run_dir / "spans.jsonl"))


def test_roles_that_die_with_the_fork_server_are_replaced_without_it(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=20", "trainer.keep_versions=1") as command:
        wait_for_step(command, 2)
        os.kill(command.role("fork server"), signal.SIGKILL)
        ended = command.end()
        assert ended.code == 0, ended.err
        command.assert_nothing_is_left()
    how = "ended with the process that it was forked from (stretto.processes.fork_server_role): a new one is started"
    assert f"engine-0 {how}" in said(run_dir)
    assert f"trainer {how}" in said(run_dir)
    assert assert_the_law(run_dir).steps == 20


def test_a_killed_trainer_is_replaced_and_stands_where_the_other_stood(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=30", "trainer.checkpoint_every=8") as command:
        for step in (3, 12):
            wait_for_step(command, step)
            os.kill(command.role("trainer"), signal.SIGKILL)
            wait_for_step(command, step + 2)
        ended = command.end()
        assert ended.code == 0, ended.err
        command.assert_nothing_is_left()
    assert said(run_dir).count("trainer was killed by SIGKILL (out of memory?): a new one is started at version") == 2
    found = assert_the_law(run_dir)
    assert found.steps == 30
    assert found.trajectories.trained == 30 * 2 * 4
    assert found.trajectories.failed == 0


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_a_process_that_hangs_is_replaced(laboratory: Laboratory, tmp_path: Path, role: str) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=40", "deadlines.hung=2") as command:
        wait_for_step(command, 2)
        os.kill(command.role(role), signal.SIGSTOP)
        ended = command.end()
        assert ended.code == 0, ended.err
        command.assert_nothing_is_left()
    name = "engine-0" if role == "engine" else "trainer"
    assert f"{name} sent no heartbeat for" in said(run_dir)
    assert assert_the_law(run_dir).steps == 40


def test_a_killed_trainer_ends_the_run_with_its_name_and_the_run_goes_on(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000", "deadlines.trainer_restarts=0") as command:
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


def test_what_a_killed_run_has_left_outside_of_its_folder_goes_when_it_goes_on(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000", "trainer.checkpoint_every=2") as command:
        wait_for_step(command, 3)
        command.kill_all()
        command.process.wait(10)
        assert list(command.temporary.iterdir()) != []  # the folder of the sockets
        assert list(shared_files(run_dir)) != []
        laboratory.trained(
            run_dir, f"trainer.steps={steps_done(run_dir) + 1}", "trainer.checkpoint_every=2", "--resume"
        )
        command.assert_nothing_is_left()
    assert not (run_dir / ".sockets").exists()
