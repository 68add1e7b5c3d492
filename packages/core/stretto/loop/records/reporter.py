"""What a run reports to the person who started it; how that is shown is the caller's affair."""

from __future__ import annotations

from typing import Protocol

from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.trainer.messages import SupervisedProgress


class Reporter(Protocol):
    """Satisfied by `dashboard.terminal.progress`."""

    def say(self, text: str) -> None:
        """Something that stays: a warning, a phase that begins, an engine that was replaced."""
        ...

    def learning(self, progress: SupervisedProgress) -> None:
        """The warm start goes on."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """One training step is done."""
        ...

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Held-out accuracy was measured."""
        ...


class SilentReporter:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def learning(self, progress: SupervisedProgress) -> None: ...

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluated(self, evaluation: EvaluationLine) -> None: ...
