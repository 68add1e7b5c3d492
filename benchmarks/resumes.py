"""A run is killed at every step and resumed: do the weights come out the same, to the last bit?

    python -m benchmarks.resumes          about 15 minutes

For every step k of a run of 20, all its processes are killed (SIGKILL) once step k is on record, and the run is resumed
to its end. A synchronous run must end with the tokens and weights of an undisturbed one. An asynchronous run is never
repeated exactly; instead its own record, replayed without generating, must end with its weights. The checker checks
every run.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from stretto.core.machine import cache_folder
from stretto_app.extensions.commands.replay import replay
from stretto_report.audit.check import check_run
from stretto_report.audit.diff import diff_runs
from tests.launch.running import TINY, Laboratory, steps_done, wait_for_step, wait_until

STEPS = 20
SYNCHRONOUS = ("rollout.max_staleness=0", f"trainer.steps={STEPS}", "trainer.checkpoint_every=6")
ASYNCHRONOUS = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=6")


def killed_at(laboratory: Laboratory, run_dir: Path, settings: Sequence[str], step: int) -> int:
    """Train, kill everything after `step`, and resume to the end. Returns the number of steps on record after the
    kill."""
    with laboratory.train(run_dir, *settings, recipe=TINY) as command:
        wait_for_step(command, step)
        for pid in command.processes():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not command.processes(), "the end of all processes")
    done = steps_done(run_dir)
    laboratory.trained(run_dir, *settings, "--resume")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=list(range(1, STEPS)), help="where to kill")
    steps = parser.parse_args().steps
    found: list[dict[str, Any]] = []
    table = Table("killed behind step", "of a run", "on record", "the weights are equal", "every law is kept")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        folder = Path(root)
        laboratory = Laboratory(folder, cache_folder())
        laboratory.trained(folder / "undisturbed", *SYNCHRONOUS)
        for step in steps:
            for kind, settings in (("synchronous", SYNCHRONOUS), ("asynchronous", ASYNCHRONOUS)):
                run_dir = folder / f"{kind}-{step}"
                done = killed_at(laboratory, run_dir, settings, step)
                if kind == "synchronous":
                    equal = diff_runs(folder / "undisturbed", run_dir).fields == ()
                else:
                    equal = replay(run_dir, 0, [], None, say=lambda text: None).equal is True
                kept = check_run(run_dir).kept
                found.append({"step": step, "run": kind, "recorded": done, "equal": equal, "laws_kept": kept})
                table.add(step, kind, done, equal, kept)
                table.show_last()
    same, lawful = sum(one["equal"] for one in found), sum(one["laws_kept"] for one in found)
    print(f"{len(found)} runs were killed and went on: {same} came to equal weights, {lawful} kept every law")
    save("resumes", {"settings": {"synchronous": SYNCHRONOUS, "asynchronous": ASYNCHRONOUS}, "runs": found})


if __name__ == "__main__":
    main()
