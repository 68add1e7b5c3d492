"""How long it takes until a role that is gone is known to be gone: in a whole run, from the signal to its log.

- A role that died: 5 seconds at most.
- A role that hangs: `deadlines.hung`, and as long again as it takes to be sure (a heartbeat comes once a second).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.running import Command, Laboratory, said, steps_done, wait_for_step, wait_until

HUNG = 2.0
SURE = 3.0
WORKER = "stretto.rewards.service.worker"


def seconds_until(condition: Callable[[], bool], awaited: str, command: Command) -> float:
    start = time.monotonic()
    wait_until(condition, awaited, command)
    return time.monotonic() - start


def test_what_died_is_known_within_five_seconds_and_what_hangs_after_its_deadline(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir, names = tmp_path / "run", {"trainer": "trainer", "engine": "engine-0"}
    with laboratory.train(run_dir, "trainer.steps=100000", f"deadlines.hung={HUNG}") as command:
        wait_for_step(command, 1)
        for role, name in names.items():
            os.kill(command.role(role), signal.SIGKILL)
            told = f"{name} was killed by SIGKILL"
            assert seconds_until(lambda told=told: told in said(run_dir), told, command) < 5  # type: ignore[misc]
        (worker,) = command.processes(WORKER)
        os.kill(worker, signal.SIGKILL)
        assert seconds_until(lambda: command.processes(WORKER) not in ([], [worker]), "a new worker", command) < 5
        wait_for_step(command, steps_done(run_dir) + 1)
        for role, name in names.items():
            os.kill(command.role(role), signal.SIGSTOP)
            told = f"{name} sent no heartbeat for"
            seconds = seconds_until(lambda told=told: told in said(run_dir), told, command)  # type: ignore[misc]
            assert HUNG - 1 < seconds < HUNG + SURE  # its last beat was up to a second before
        (worker,) = command.processes(WORKER)
        os.kill(worker, signal.SIGSTOP)
        assert seconds_until(lambda: command.processes(WORKER) not in ([], [worker]), "a new worker", command) < 5
        wait_for_step(command, steps_done(run_dir) + 1)
