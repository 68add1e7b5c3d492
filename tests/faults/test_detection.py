"""Roles that die or hang in the middle of a whole run: how long it takes until that is known, from the signal to its
log; and the run goes on without a resume.

- A role that died: 5 seconds at most.
- A role that hangs: `deadlines.hung`, and as long again as it takes to be sure (a heartbeat comes once a second).
- Each is replaced, an engine also while the start is measured. A killed engine's completions go on elsewhere under
  their names, a killed reward worker costs nothing, and a killed trainer's replacement stands where the other stood: no
  law is broken and nothing fails.
- A stop does not wait for an engine that does not reply.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stretto.store.checkpoints import Checkpoints
from stretto_report.reading.series import read_spans
from tests.faults.test_company import end_well
from tests.launch.running import (
    MODULES,
    Command,
    Laboratory,
    assert_the_law,
    exported,
    said,
    steps_done,
    wait_for_step,
    wait_for_words,
    wait_until,
)

HUNG = 2.0
SURE = 3.0
WORKER = "stretto.rewards.service.worker"


def seconds_of(wait: Callable[[], None]) -> float:
    start = time.monotonic()
    wait()
    return time.monotonic() - start


def test_what_died_is_known_in_five_seconds_what_hangs_at_its_deadline(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, names = tmp_path / "run", {"trainer": "trainer", "engine": "engine-0"}
    settings = ("trainer.steps=100000", "trainer.keep_versions=1", f"deadlines.hung={HUNG}")
    with laboratory.train(run_dir, *settings) as command:
        wait_for_step(command, 1)
        for role, name in names.items():
            os.kill(command.role(role), signal.SIGKILL)
            assert seconds_of(partial(wait_for_words, command, run_dir, f"{name} was killed by SIGKILL")) < 5
        (worker,) = command.processes(WORKER)
        os.kill(worker, signal.SIGKILL)
        assert seconds_of(partial(another_worker, command, worker)) < 5
        wait_for_step(command, steps_done(run_dir) + 1)
        for role, name in names.items():
            os.kill(command.role(role), signal.SIGSTOP)
            seconds = seconds_of(partial(wait_for_words, command, run_dir, f"{name} sent no heartbeat for"))
            assert HUNG - 1 < seconds < HUNG + SURE  # its last beat was up to a second before
        (worker,) = command.processes(WORKER)
        os.kill(worker, signal.SIGSTOP)
        assert seconds_of(partial(another_worker, command, worker)) < 5
        wait_for_step(command, steps_done(run_dir) + 1)
        end_well(command, laboratory, run_dir)
    assert "trainer was killed by SIGKILL (out of memory?): a new one is started at version" in said(run_dir)
    found, trajectories = assert_the_law(run_dir), exported(laboratory, run_dir)
    assert found.trajectories.trained == found.steps * 2 * 4
    assert 0 < found.busy["engine-0"] <= 1
    assert {one["state"] for one in trajectories} <= {"trained", "buffered", "in_flight"}
    assert all(one["group"].endswith(".0") for one in trajectories), "no prompt was asked twice"


def test_an_engine_that_is_lost_while_the_start_is_measured_comes_back_and_a_stop_waits_for_none(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000", "engine.count=2", "deadlines.stop=1") as command:
        wait_until(lambda: "accuracy of version 0" in said(run_dir), "the first evaluation", command)
        (lost,) = command.processes('"engine-0"')
        os.kill(lost, signal.SIGKILL)
        killed = time.monotonic()
        wait_for_step(command, 1)  # the other engine has gone on
        wait_until(lambda: worked_since(run_dir, "engine-0", killed), "work of the new engine", command)
        for silent in command.processes(MODULES["engine"]):
            os.kill(silent, signal.SIGSTOP)
        command.stopped(signal.SIGINT)
    assert Checkpoints(run_dir / "checkpoints").latest() is not None


def another_worker(command: Command, worker: int) -> None:
    wait_until(lambda: command.processes(WORKER) not in ([], [worker]), "a new worker", command)


def worked_since(run_dir: Path, role: str, moment: float) -> bool:
    """Whether the timeline has a span of the role that begins after a moment of `time.monotonic`."""
    return any(span.role == role and span.start > moment for span in read_spans(run_dir / "spans.jsonl"))
