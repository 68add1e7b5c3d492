"""Mean and 95 % interval of a value over seeds, and of a curve over steps or time.

Intervals are Student's: mean ± t · s / √n with n - 1 degrees of freedom, for independent, approximately normally
distributed runs. A bootstrap over so few runs would give intervals that are too narrow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

import mpmath

from stretto.core.records import Record

CONFIDENCE = 0.95
_CLOCK_POINTS = 40


class Interval(Record, frozen=True):
    """Mean over `runs` runs, with the ends of its 95 % interval (None for a single run)."""

    mean: float
    low: float | None
    high: float | None
    runs: int

    def __str__(self) -> str:
        return _digits(self.mean) + (f" ± {_digits(self.high - self.mean)}" if self.high is not None else "")


class CurvePoint(Record, frozen=True):
    """Point of a mean curve. `at`: a training step, or seconds."""

    at: float
    accuracy: Interval


class Evaluated(Record, frozen=True):
    """Held-out accuracy after training step `step`, `seconds` after the first prompt was admitted."""

    step: int
    seconds: float
    accuracy: float


Curve = Sequence[Evaluated]


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval of the values, of which there must be at least one; a single value has no interval (None).

    >>> print(interval([0.5, 0.7]))  # t = 12.706 with one degree of freedom, s = 0.1414
    0.6 ± 1.27
    """
    mean, runs = fmean(values), len(values)
    if runs == 1:
        return Interval(mean, None, None, runs)
    half = student_t(runs - 1) * stdev(values) / math.sqrt(runs)
    return Interval(mean, mean - half, mean + half, runs)


@cache
def student_t(freedom: int) -> float:
    """The t such that a Student variable with `freedom` degrees of freedom lies within ±t with probability 95 %.

    P(|T| > t) is the regularised incomplete beta function I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t²)
    (Abramowitz and Stegun, 26.7.1).

    >>> round(student_t(4), 3)
    2.776
    """

    def beyond(t: float) -> float:
        inside = freedom / (freedom + t * t)
        return float(mpmath.betainc(freedom / 2, 0.5, 0, inside, regularized=True)) - (1 - CONFIDENCE)

    return float(mpmath.findroot(beyond, (1.9, 13.0), solver="anderson"))


def by_step(curves: Sequence[Curve]) -> tuple[CurvePoint, ...]:
    """Mean curve, with intervals, over the steps at which every run was evaluated; empty without such steps or without
    `curves` (one for each run)."""
    at = [{one.step: one.accuracy for one in curve} for curve in curves]
    shared = sorted(set.intersection(*map(set, at))) if at else []
    return tuple(CurvePoint(step, interval([accuracies[step] for accuracies in at])) for step in shared)


def by_clock(curves: Sequence[Curve], seconds: float) -> tuple[CurvePoint, ...]:
    """Mean curve at evenly spaced times from 0 to `seconds`: the mean of every run's newest accuracy. It begins when
    every run has one; empty if a run has none by `seconds`, or without `curves` (one for each run)."""
    if not curves or seconds <= 0:
        return ()
    moments = [seconds * point / _CLOCK_POINTS for point in range(_CLOCK_POINTS + 1)]
    return tuple(
        CurvePoint(moment, interval([value for value in found if value is not None]))
        for moment in moments
        if None not in (found := [accuracy_at(curve, moment) for curve in curves])
    )


def accuracy_at(curve: Curve, seconds: float) -> float | None:
    """Newest accuracy that was measured by the time `seconds`; None before the first."""
    ordered = sorted(curve, key=lambda one: one.seconds)
    known = bisect_right([one.seconds for one in ordered], seconds)
    return ordered[known - 1].accuracy if known else None


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
