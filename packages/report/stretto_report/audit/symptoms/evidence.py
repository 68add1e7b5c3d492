"""An alarm as a record, and the evidence that decides alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.core.records import Record
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto_report.audit.symptoms.windows import Numbers, Steps


class Alarm(Record, frozen=True):
    """An alarm that fires. `first_step`: the step since which it holds. `look`: where to look for the cause:
    ``series:NAME``, ``recipe:KEY``, ``timeline`` or ``logs``."""

    name: str
    title: str
    first_step: int
    message: str
    look: str

    def __str__(self) -> str:
        return f"alarm  {self.title} since step {self.first_step}: {self.message}; see {self.look}"


@dataclass(frozen=True)
class Disk:
    """Disk of a running run, in bytes: free space, and size of the files directly in the run folder."""

    free: int
    written: int


@dataclass(frozen=True)
class Evidence:
    """Measurements that decide the alarms.

    `series`: numbers by their names in docs/reference/metrics.md (``reward``, ``trainer.entropy``,
    ``busy.trainer``), one for each of `steps`, NaN where not measured.
    """

    steps: Steps
    series: Mapping[str, Numbers]
    evaluations: Sequence[EvaluationLine] = ()
    bound: float | None = None  # `rollout.max_staleness`, for steps without the series `max_staleness`; None: no bound
    disk: Disk | None = None
    last_step: int | None = None  # `trainer.steps`; None: not known
    mismatch: float = 0.1  # nats a token between engine and trainer that rounding explains for their dtypes
    undecided_reason: str = ""  # of the newest step with undecided verdicts; "": none

    @property
    def in_force(self) -> float | None:
        """Staleness bound of the newest step that recorded one, else that of the recipe (`bound`)."""
        values = self.series.get("max_staleness", np.empty(0))
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else self.bound

    @classmethod
    def of(cls, steps: Sequence[StepMetrics]) -> Evidence:
        """Evidence from lines of ``metrics.jsonl``."""
        series: dict[str, Numbers] = {}
        for place, step in enumerate(steps):
            for name, value in numbers_of(step):
                series.setdefault(name, np.full(len(steps), np.nan))[place] = value
        reasons = [step.undecided_reason for step in steps if step.undecided_reason]
        numbers = np.array([step.step for step in steps], np.int64)
        return cls(numbers, series, undecided_reason=reasons[-1] if reasons else "")


_VERDICTS = ("reward", "accuracy", "undecided")
_WHOLE = (*_VERDICTS, "length_mean", "truncated", "staleness_mean", "rl_seconds", "max_staleness")
_OF_TRAINER = ("entropy", "behavior_logprob_error", "grad_norm", "bad_steps", "kl_behavior", "kl_reference")
#: Series that an alarm reads, beside those of `busy`, `memory` and `canary`.
READ = frozenset({*_WHOLE, *(f"trainer.{name}" for name in _OF_TRAINER)})


def numbers_of(step: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yield name and value of each measurement of a step; missing ones are left out."""
    for name in _WHOLE:
        if (value := getattr(step, name)) is not None:
            yield name, value
    kinds = {"trainer": step.trainer, "busy": step.busy, "memory": step.memory, "canary": step.canary}
    for kind, values in kinds.items():
        for name, value in values.items():
            if value is not None:
                yield f"{kind}.{name}", value
