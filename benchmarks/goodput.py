"""Goodput under kills: how much of its work does a run do when something is killed every minute?

    python -m benchmarks.goodput [--period 60] [--kills 20]     40 minutes, on a machine that does nothing else

One run of recipes/arithmetic.toml goes on all the time. Undisturbed periods and periods that begin with a kill take
turns, so that a slow minute of the machine affects both. A kill hits, in turn, the conductor or all processes (the run
is then resumed at once, as by hand), the trainer, an engine, or a reward worker. Steps count whose line is written
within the period; steps that are trained again after a kill count once. The learning rate is close to zero, so that
answers keep their length.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import hit, until_gone
from benchmarks.report import Table, save
from benchmarks.runs import RECIPE
from stretto.core.machine import cache_folder
from stretto_report.audit.check import check_run
from tests.launch.running import Command, Laboratory, steps_done, wait_for_step

FAULTS = ("conductor", "trainer", "engine", "rewards", "all")
SETTINGS = (
    "trainer.steps=1000000",
    "trainer.learning_rate=1e-9",
    "trainer.checkpoint_every=100",
    "warm_start.threads=1",
    "evaluation.prompts=32",
    "deadlines.trainer_restarts=1000",
    "deadlines.engine_restarts=1000",
)
_FIRST_STEPS = 50  # before the first period begins


class Going:
    """A run of recipes/arithmetic.toml that is kept going after any fault. Its folder may hold a run to resume."""

    def __init__(self, laboratory: Laboratory, run_dir: Path, settings: Sequence[str]) -> None:
        self._laboratory, self._run_dir, self._settings = laboratory, run_dir, settings
        self._stack = contextlib.ExitStack()
        self._chance = random.Random(0)

    def __enter__(self) -> Going:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start the run, or resume it, after ending what is left of the earlier process."""
        self._stack.close()
        resume = ("--resume",) if (self._run_dir / "ledger.sqlite").exists() else ()
        self.command: Command = self._stack.enter_context(
            self._laboratory.train(self._run_dir, *self._settings, *resume, recipe=RECIPE)
        )

    def hit(self, fault: str) -> bool:
        """Kill or stop a role, and resume the run if its conductor is gone. Return False if there is no such
        process."""
        found = hit(self.command, fault, self._chance)
        if found and fault in ("conductor", "all"):
            until_gone(self.command)
            self.start()
        return found

    def steps(self) -> int:
        """Number of steps on record."""
        return steps_done(self._run_dir)

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
        assert self.command.process.poll() is None, f"the run has ended: {self.command.end()}"


def measured(going: Going, period: float, kills: int) -> Iterator[dict[str, Any]]:
    """Yield pairs of periods; the disturbed one is alternately first and second."""
    for number in range(kills):
        pair: dict[str, Any] = {"fault": FAULTS[number % len(FAULTS)]}
        for disturbed in (number % 2 == 1, number % 2 == 0):
            start = time.monotonic()
            before = going.steps()
            if disturbed:
                going.hit(pair["fault"])
            going.wait(period - (time.monotonic() - start))
            pair["disturbed" if disturbed else "undisturbed"] = going.steps() - before
        yield pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", type=float, default=60.0, help="seconds")
    parser.add_argument("--kills", type=int, default=20)
    words = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    table = Table("fault", "steps in a period with a kill", "undisturbed", "ratio")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        run_dir = Path(root) / "run"
        with Going(Laboratory(Path(root), cache_folder()), run_dir, SETTINGS) as going:
            wait_for_step(going.command, _FIRST_STEPS)
            for pair in measured(going, words.period, words.kills):
                pairs.append(pair)
                disturbed, undisturbed = pair["disturbed"], pair["undisturbed"]
                table.add(pair["fault"], disturbed, undisturbed, f"{disturbed / max(1, undisturbed):.2f}")
                table.show_last()
        kept = check_run(run_dir).kept
    disturbed, undisturbed = (sum(pair[kind] for pair in pairs) for kind in ("disturbed", "undisturbed"))
    goodput = disturbed / undisturbed
    print(f"a kill every {words.period:.0f} s leaves {goodput:.1%} of the undisturbed rate; every law kept: {kept}")
    results = {"period": words.period, "settings": SETTINGS, "goodput": goodput, "laws_kept": kept, "pairs": pairs}
    save("goodput", results)


if __name__ == "__main__":
    main()
