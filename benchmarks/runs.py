"""Whole runs as measurements: start `stretto train` as a user would, and read its run folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.store.inspection import Inspection
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, StepMetrics, read_metrics
from stretto_report.reading.inspection import inspect_run

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "arithmetic.toml"


@dataclass(frozen=True)
class Run:
    """Results of one run."""

    inspection: Inspection
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvaluationLine, ...]

    @property
    def trained_per_second(self) -> float:
        return self.inspection.trajectories.trained / self.inspection.rl_seconds

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of reinforcement until an evaluation during the run first reached this held-out accuracy; None if
        none did."""
        reached = [e.rl_seconds for e in self.evaluations if e.accuracy >= accuracy]
        return min(reached) if reached else None


def train(
    overrides: Sequence[str],
    recipe: Path = RECIPE,
    keep: Path | None = None,
    surroundings: Mapping[str, str] | None = None,
) -> Run:
    """Do one run in a temporary folder, or (unless None) in `keep`. `surroundings`: environment variables; None: ours.

    Raises:
        RuntimeError: the run failed; the message ends with the last lines of its output.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        path = keep or Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "stretto_app.cli.main",
            "train",
            str(recipe),
            *overrides,
            "--run-dir",
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-800:]}{done.stderr}")
        steps, evaluations = read_metrics(RunFolder.open(path).metrics)
        return Run(inspect_run(path), tuple(steps), tuple(evaluations))
