"""Alarms about engines whose log-probabilities differ from the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stretto_report.audit.symptoms.evidence import Alarm, Evidence
from stretto_report.audit.symptoms.windows import apart

_RISING = 0.01  # nats a token
_HALF, _QUARTER = 0.5, 0.25  # of the tolerance
_ERROR = "trainer.behavior_logprob_error"


def mismatch(found: Evidence) -> Iterator[Alarm]:
    """Alarm if, in two consecutive measured steps, the log-probabilities of engine and trainer differ by more than
    rounding explains for their dtypes; or if the newest window's difference exceeds three times the first window's and
    0.01 nats a token."""
    values = found.series.get(_ERROR)
    if values is None:
        return
    known = np.flatnonzero(np.isfinite(values))
    beyond = values[known] > found.mismatch
    if len(known) >= 2 and beyond[-2:].all():
        within = np.flatnonzero(~beyond)
        first = int(found.steps[known[within[-1] + 1 if len(within) else 0]])
        message = f"engine and trainer differ by {values[known[-1]]:.2g} nats a token, {found.mismatch:g} are rounding"
        yield Alarm("mismatch", "mismatch of engine and trainer", first, message, f"series:{_ERROR}")
    elif (ill := apart(found.steps, values, lambda mean, begin: (mean > 3 * begin) & (mean > _RISING))) is not None:
        message = f"engine and trainer differed by {ill.was:.2g} nats a token, and differ by {ill.now:.2g}"
        yield Alarm("mismatch", "mismatch of engine and trainer", ill.first, message, f"series:{_ERROR}")


def canary_drifting(found: Evidence) -> Iterator[Alarm]:
    """Alarm for each engine whose canary difference from the trainer is at least half of its tolerance, or at least a
    quarter of it and more than three times the initial difference."""
    for name, values in found.series.items():
        if not name.startswith("canary."):
            continue
        ill = apart(
            found.steps,
            values,
            lambda mean, begin: (mean >= _HALF) | ((mean >= _QUARTER) & (mean > 3 * begin)),
            1,
        )
        if ill is not None:
            engine = name.removeprefix("canary.")
            message = f"{engine} was at {ill.was:.0%} of what it may be from the trainer, and is at {ill.now:.0%}"
            yield Alarm("canary_drifting", "an engine drifts from the trainer", ill.first, message, f"series:{name}")
