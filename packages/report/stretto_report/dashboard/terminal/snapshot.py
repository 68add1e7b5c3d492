"""Snapshots of a run's progress, made from its measurements, and their trends, with a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from stretto.core.events import SupervisedProgress
from stretto.core.records import Record
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.series.progress import LONGEST, RunProgress, lesson_line, seconds_left

_POINTS = 120


class Trend:
    """Means over equal numbers of consecutive values. When there are 120 means, neighbours are merged, so
    that memory is bounded for a run of any length."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1  # values of a mean
        self._sum, self._count = 0.0, 0  # of the values behind the last mean

    def add(self, value: float | None) -> None:
        """Add the next value, to the last mean that is not complete; None and values not finite are skipped."""
        if value is None or not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == _POINTS:
            self._means = [(self._means[at] + self._means[at + 1]) / 2 for at in range(0, _POINTS, 2)]
            self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """Means of consecutive values, oldest first, each over the same number of values; only the last may be over
        fewer."""
        return (*self._means, self._sum / self._count) if self._count else tuple(self._means)


TRAINING = "training"

#: Measurements of the trainer that are shown, with their labels.
_TRAINER = {
    "loss": "loss",
    "kl_behavior": "KL to behavior",
    "kl_reference": "KL to reference",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
}


class Snapshot(Record, frozen=True):
    """State of a run at one moment. `phase`: "training", or a phase of supervised training. `seconds`: since the phase
    began. `line`: the snapshot on one line. `facts`: labels with formatted values; unknown values are left out.
    `tokens_per_second`: rate of "generated" and "trained" tokens. `busy`: share of each role's time since the previous
    step. `trends`: values of a measurement over the run, oldest first.

    Example: ``Snapshot(phase="training", step=120, steps=600, seconds=21.4, facts=(("accuracy", "71.2%"),))``
    """

    phase: str
    step: int
    steps: int
    seconds: float
    line: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    tokens_per_second: Mapping[str, float] = {}
    busy: Mapping[str, float] = {}
    trends: Mapping[str, tuple[float, ...]] = {}

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step at the pace so far. None before the second step, or if the number of steps is
        unknown."""
        return seconds_left(self.step, self.steps, self.seconds)

    def details(self) -> list[str]:
        """Return all measurements as indented lines of several measurements, each line of at most `LONGEST` characters
        (unless a single measurement is longer); empty if there are none."""
        parts = [f"{name} {value}" for name, value in self.facts]
        parts += [f"{rate:,.0f} tokens/s {what}" for what, rate in self.tokens_per_second.items()]
        parts += [f"{role} {fraction:.0%}" for role, fraction in self.busy.items()]
        lines = [""]
        for part in parts:
            longer = f"{lines[-1]} | {part}" if lines[-1] else f"  {part}"
            lines = [*lines[:-1], longer] if len(longer) <= LONGEST else [*lines, f"  {part}"]
        return [line for line in lines if line]


class Watcher:
    """Collects measurements of a run of `steps` training steps (0: not known), and makes snapshots from them."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._progress = RunProgress(steps)
        self._trends = {name: Trend() for name in ("accuracy", "held-out", "reward", "staleness", "entropy")}
        self._newest: StepMetrics | None = None
        self._make: Callable[[], Snapshot] | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """Snapshot of the newest training step or supervised progress; None before the first. An evaluation alone makes
        none."""
        return None if self._make is None else self._make()

    def learning(self, lesson: SupervisedProgress) -> None:
        facts = [("loss", f"{lesson.loss:.4f}")]
        if lesson.accuracy is not None:
            facts.append(("accuracy", f"{lesson.accuracy:.1%}"))
        made = Snapshot(
            phase=lesson.phase,
            step=lesson.step,
            steps=lesson.steps,
            seconds=lesson.seconds,
            line=lesson_line(lesson.phase, lesson.step, lesson.steps, lesson.seconds, lesson.loss, lesson.accuracy),
            facts=tuple(facts),
        )
        self._make = lambda: made

    def step(self, metrics: StepMetrics) -> None:
        self._newest = metrics
        self._progress.step(metrics)
        for name, value in (
            ("accuracy", metrics.accuracy),
            ("reward", metrics.reward),
            ("staleness", metrics.staleness_mean),
            ("entropy", metrics.trainer.get("entropy")),
        ):
            self._trends[name].add(value)
        self._make = partial(self._snapshot, metrics)

    def evaluated(self, evaluation: EvaluationLine) -> bool:
        """Add a held-out evaluation. Return whether a training step was added before, so that a snapshot shows the
        evaluation."""
        self._progress.evaluated(evaluation)
        self._trends["held-out"].add(evaluation.accuracy)
        return self._newest is not None

    def _snapshot(self, metrics: StepMetrics) -> Snapshot:
        return Snapshot(
            phase=TRAINING,
            step=metrics.step,
            steps=self._steps,
            seconds=metrics.rl_seconds,
            line=self._progress.line(),
            facts=tuple(self._facts(metrics)),
            tokens_per_second=self._progress.rates(),
            busy={role: fraction for role, fraction in sorted(metrics.busy.items()) if fraction is not None},
            trends={name: points for name, trend in self._trends.items() if len(points := trend.points) > 1},
        )

    def _facts(self, metrics: StepMetrics) -> list[tuple[str, str]]:
        facts = []
        if (held_out := self._progress.held_out) is not None:
            unknown = f", {held_out.undecided} undecided" if held_out.undecided else ""
            facts.append(("held-out", f"{held_out.accuracy:.1%} (v{held_out.version}{unknown})"))
        facts += [
            ("accuracy", f"{metrics.accuracy:.1%}"),
            ("reward", f"{metrics.reward:.3f}"),
            *((name, f"{value:.3f}") for name, value in metrics.rewards.items() if value is not None),
            ("length", f"{metrics.length_mean:.1f}, longest {metrics.length_max}"),
            ("staleness", f"{metrics.staleness_mean:.2f}, largest {metrics.staleness_max}{_bound(metrics)}"),
        ]
        facts += [
            (shown, f"{value:.3g}")
            for name, shown in _TRAINER.items()
            if (value := metrics.trainer.get(name)) is not None
        ]
        if metrics.canary:
            share, engine = max((share, engine) for engine, share in metrics.canary.items())
            facts.append(("canary", f"{share:.0%} of its tolerance ({engine})"))
        facts += [(name.replace("_", " "), f"{value:g}") for name, value in metrics.queues.items() if value is not None]
        return facts


def _bound(metrics: StepMetrics) -> str:
    return "" if metrics.max_staleness is None else f", bound {metrics.max_staleness:g}"
