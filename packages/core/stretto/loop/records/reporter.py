"""Interface for showing the events of a run to the person who started it."""

from __future__ import annotations

from typing import Protocol

from stretto.core.events import SupervisedProgress
from stretto.store.series.metrics import EvaluationLine, StepMetrics


class Reporter(Protocol):
    """Shows a run's events to the user (`dashboard.terminal.progress`)."""

    def say(self, text: str) -> None:
        """Show a line of text permanently: a warning, a new phase, a replaced engine."""

    def learning(self, progress: SupervisedProgress) -> None:
        """Show progress of the warm start."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished training step."""

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Show a held-out accuracy."""


class SilentReporter:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def learning(self, progress: SupervisedProgress) -> None: ...

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluated(self, evaluation: EvaluationLine) -> None: ...
