"""Ctrl-C, SIGTERM and worse, at every stage of a run.

- A requested stop ends within 10 seconds, with a checkpoint if a step was done, and leaves nothing behind.
- A stopped run goes on by --resume, and the law of the ledger holds over all of it.
- A run folder has one owner; a dead owner's lock is nobody's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from stretto.store.folder.checkpoints import Checkpoints
from tests.launch.running import (
    TINY,
    Laboratory,
    assert_the_law,
    logs,
    said,
    wait_for_step,
    wait_until,
)

ENDLESS = "trainer.steps=100000"
NEVER = "trainer.checkpoint_every=1000000"
SLOW = ("rewards.function=tests.launch.rewards_for_tests:slow", NEVER)


def checkpoint_step(run_dir: Path) -> int:
    checkpoint = Checkpoints(run_dir / "checkpoints").latest()
    return checkpoint.step if checkpoint is not None else 0


def test_a_stopped_run_has_a_checkpoint_and_goes_on(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, ENDLESS, *SLOW) as command:
        wait_for_step(command, 2)
        another = laboratory.run("train", TINY, "--run-dir", run_dir)
        another.refused(f"{run_dir}: is in use by process {command.process.pid}", "choose another folder")
        ended, seconds = command.stop(signal.SIGINT)
        assert ended.code == 130, ended.err
        assert seconds < 10
        assert "Traceback" not in ended.err, ended.err
        command.assert_nothing_is_left()
    first = checkpoint_step(run_dir)
    assert first == assert_the_law(run_dir).steps >= 2

    laboratory.run("train", TINY, "--run-dir", run_dir).refused(f"{run_dir}: holds another run", "--resume")
    changed = laboratory.run("train", TINY, *SLOW, "--run-dir", run_dir, "--resume", "seed=2", "engine.slots=9")
    changed.refused("seed: was 1 and is 2", "engine.slots: was 8 and is 9", "may change only trainer.steps")

    laboratory.trained(run_dir, f"trainer.steps={first + 1}", *SLOW, "--resume")
    found = assert_the_law(run_dir)
    assert found.steps == first + 1
    assert found.trajectories.trained == found.steps * 2 * 4
    assert found.trajectories.failed == 0, "what was in flight and buffered is kept"


def test_a_stop_does_not_wait_for_an_engine_that_does_not_reply(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, ENDLESS, "deadlines.stop=1") as command:
        wait_for_step(command, 1)
        os.kill(command.role("engine"), signal.SIGSTOP)
        ended, seconds = command.stop(signal.SIGINT)
        assert ended.code == 130, ended.err
        assert seconds < 10
        command.assert_nothing_is_left()
    assert checkpoint_step(run_dir) >= 1


def test_a_stop_during_the_warm_start_leaves_nothing_half_done(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    long = tmp_path / "long.toml"
    long.write_text(TINY.read_text() + "\n[warm_start]\nsteps = 100000\n")
    with laboratory.train(run_dir, recipe=long) as command:
        wait_until(lambda: "warm start" in said(run_dir), "the warm start", command)
        ended, seconds = command.stop(signal.SIGTERM)
        assert ended.code == 143, ended.err
        assert seconds < 10
        assert "Traceback" not in ended.err, ended.err
        command.assert_nothing_is_left()
    assert not list((laboratory.cache / "warm-starts").glob("*"))
    assert not list((laboratory.cache / "warm-starts").glob(".*"))
    assert list((run_dir / "policy").iterdir()) == []
    assert "Traceback" not in logs(run_dir)


def test_a_second_signal_ends_the_run_at_once(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, ENDLESS) as command:
        wait_for_step(command, 1)
        command.process.send_signal(signal.SIGINT)
        ended, seconds = command.stop(
            signal.SIGTERM
        )  # SIGINT again would have to come later: `processes.stopping.ONCE`
        assert ended.code == 130, ended.err
        assert seconds < 10
        assert "Traceback" not in ended.err, ended.err
        command.assert_nothing_is_left()
