"""Interface for showing the events of a run to the person who started it, and ``log.txt``, the log lines with their
times. Logging continues when the terminal fails or closes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stretto.core.events import SupervisedProgress
from stretto.store.files import identity
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.series.progress import RunProgress, lesson_line


class Reporter(Protocol):
    """Shows a run's events to the user, on a terminal for example (`dashboard.terminal.progress`)."""

    def say(self, text: str) -> None:
        """Show a line of text permanently: a warning, a new phase, a replaced engine."""

    def learning(self, progress: SupervisedProgress) -> None:
        """Show progress of the warm start."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished training step."""

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Show a held-out accuracy."""

    def refresh(self) -> None:
        """Show what has come up without an event, such as an alarm; called every second while steps are awaited."""


class SilentReporter:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def learning(self, progress: SupervisedProgress) -> None: ...

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluated(self, evaluation: EvaluationLine) -> None: ...

    def refresh(self) -> None: ...


_LINE_SECONDS = 5.0


class RunLog:
    """A reporter that writes events to the log and passes each on to another reporter, such as the terminal.

    A line about the newest step, of training or of the warm start, is written every `seconds`, and after the last step.
    Errors must not end a run: a line that cannot be written is left out; after an error of display no more is shown.
    """

    def __init__(self, path: Path, reporter: Reporter, steps: int = 0, seconds: float = _LINE_SECONDS) -> None:
        """Prepare to append lines to the file at `path`, in the run folder, which `note` opens for each line.
        `reporter`: shows each event too. `steps`: the last step of the run; 0: not known. `seconds`: least time between
        two progress lines."""
        self._path, self._reporter, self._seconds = path, reporter, seconds
        self._progress, self._waiting, self._written = RunProgress(steps), "", -math.inf
        self._folder = identity(path.parent)

    def say(self, text: str) -> None:
        self.note(text)
        self._show(lambda reporter: reporter.say(text))

    def learning(self, progress: SupervisedProgress) -> None:
        told = (progress.phase, progress.step, progress.steps, progress.seconds, progress.loss, progress.accuracy)
        self._now_and_then(lesson_line(*told), progress.step == progress.steps)
        self._show(lambda reporter: reporter.learning(progress))

    def step(self, metrics: StepMetrics) -> None:
        self._progress.step(metrics)
        self._now_and_then(self._progress.line(), metrics.step == self._progress.steps)
        self._show(lambda reporter: reporter.step(metrics))

    def evaluated(self, evaluation: EvaluationLine) -> None:
        of = evaluation.samples or evaluation.prompts
        unknown = f" ({evaluation.undecided} of {of} undecided)" if evaluation.undecided else ""
        accuracy = "–" if evaluation.known is None else f"{evaluation.known:.4f}"
        self.note(f"held-out accuracy of version {evaluation.version}: {accuracy}{unknown}")
        self._progress.evaluated(evaluation)
        self._show(lambda reporter: reporter.evaluated(evaluation))

    def refresh(self) -> None:
        self._show(lambda reporter: reporter.refresh())

    def ends(self) -> None:
        """Log the newest step if it has no line yet. To be called at the end of the run."""
        if self._waiting:
            self._now_and_then(self._waiting, at_once=True)

    def _now_and_then(self, line: str, at_once: bool) -> None:
        self._waiting = line
        if at_once or time.monotonic() - self._written >= self._seconds:
            self.note(line)
            self._waiting, self._written = "", time.monotonic()

    def _show(self, show: Callable[[Reporter], None]) -> None:
        try:
            show(self._reporter)
        except (OSError, SystemExit):  # a closed pipe; the terminal's library ends the program for it
            self._reporter = SilentReporter()

    def note(self, text: str) -> None:
        """Write a line to the log only. Does nothing if the log cannot be written (a full disk), or if another folder
        has taken the place of the run folder."""
        if self._folder not in (None, identity(self._path.parent)):
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        except OSError:  # a full disk must not end training; the ledger complains where it matters
            return
