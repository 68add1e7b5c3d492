"""``log.txt``: what a run said, with the time at which it said it. The screen is one reader more, and may go away."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from stretto.loop.records.reporter import Reporter, SilentReporter
from stretto.store.files import identity
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.trainer.messages import SupervisedProgress


class RunLog:
    """A reporter that writes everything down and passes it on to another reporter.

    A run does not end because nobody looks any more: what cannot be written or shown is left out.
    """

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self._path, self._reporter = path, reporter
        self._folder = identity(path.parent)

    def say(self, text: str) -> None:
        self.note(text)
        self._show(lambda reporter: reporter.say(text))

    def learning(self, progress: SupervisedProgress) -> None:
        self.note(f"warm start {progress.step}/{progress.steps}: loss {progress.loss:.4f}")
        self._show(lambda reporter: reporter.learning(progress))

    def step(self, metrics: StepMetrics) -> None:
        self.note(
            f"step {metrics.step}: accuracy {metrics.accuracy:.3f}, reward {metrics.reward:.3f}, "
            f"{metrics.trained_tokens} tokens, staleness {metrics.staleness_mean:.2f}"
        )
        self._show(lambda reporter: reporter.step(metrics))

    def evaluated(self, evaluation: EvaluationLine) -> None:
        unknown = f" ({evaluation.undecided} of {evaluation.prompts} undecided)" if evaluation.undecided else ""
        self.note(f"held-out accuracy of version {evaluation.version}: {evaluation.accuracy:.4f}{unknown}")
        self._show(lambda reporter: reporter.evaluated(evaluation))

    def _show(self, show: Callable[[Reporter], None]) -> None:
        try:
            show(self._reporter)
        except (OSError, SystemExit):  # a closed pipe; the terminal's library ends the program for it
            self._reporter = SilentReporter()

    def note(self, text: str) -> None:
        """Write it down without showing it; not in the folder of another run, if ours was moved away."""
        if self._folder not in (None, identity(self._path.parent)):
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        except OSError:  # a full disk must not end training; the ledger complains where it matters
            return
