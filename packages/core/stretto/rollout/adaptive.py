"""The bound on staleness that follows the measured mismatch (``rollout.max_staleness = "auto"``): a pure function.

Stale tokens hurt as far as the trained policy differs from the policies that sampled them. Each training step measures
that mismatch, and the bound follows by additive increase, multiplicative decrease, like a congestion window (Chiu and
Jain 1989, Computer Networks 17):

    measured    m = the largest of the measured values, each over its limit; at most 2
    smoothed    s <- s + (m - s) / 4
    lowered     eta <- max(eta // 2, staleness_min)    where s > 1
    raised      eta <- min(eta + 1, staleness_max)     where s < 1/2, and the trainer had no second batch at hand
                eta <- min(2 eta, ..)                  until it has been lowered for the first time
    held        max(old, new) + 1 steps after a change

Between 1/2 and 1 the bound stays. It is held after a change because groups in flight keep the bound of their admission,
so a change shows late. A larger bound only helps a trainer that waits for generation, so it is raised only then.
(docs/explanation/staleness.md)

The state is a record, and the next one depends on the metrics of a step alone, so the loop, a resumed run and a
simulation get the same bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stretto.core.records import Record

_MOST = 2.0  # cap: one bad step cannot lower a bound whose smoothed mismatch allows a raise
_SHARE = 1 / 4  # weight of the newest step in the smoothed mismatch
_ALLOWS = 1 / 2  # smoothed mismatch below which the bound may be raised


class MismatchLimit(NamedTuple):
    """A metric of the update (docs/reference/metrics.md): its value without mismatch, and the limit above which the
    bound is lowered."""

    none: float
    limit: float


LIMITS: Mapping[str, MismatchLimit] = {
    "effective_samples": MismatchLimit(1.0, 0.8),
    "kl_behavior": MismatchLimit(0.0, 0.05),
    "clip_fraction": MismatchLimit(0.0, 0.05),
    "outlier_fraction": MismatchLimit(0.0, 0.1),
}


class AdaptiveBound(Record, frozen=True):
    """State of the adaptive staleness bound after the measurements of `step`.

    Attributes:
        bound: the staleness bound for groups admitted now.
        mismatch: smoothed mismatch s, relative to its limit of 1.
        held: steps until the bound may change again.
        probing: whether the bound has never been lowered.
        worst: name and value of the metric nearest to its limit.
    """

    bound: int
    mismatch: float = 0.0
    held: int = 0
    probing: bool = True
    step: int = 0
    worst: str = ""


def mismatch(metrics: Mapping[str, float | None]) -> tuple[float, str] | None:
    """The largest of the metrics relative to their limits, with the metric's name and value; None if none was measured.

    >>> mismatch({"kl_behavior": 0.025, "effective_samples": 0.95})
    (0.5, 'kl_behavior 0.025')
    """
    known = {name: value for name in LIMITS if (value := metrics.get(name)) is not None}
    scores = {
        name: (value - LIMITS[name].none) / (LIMITS[name].limit - LIMITS[name].none) for name, value in known.items()
    }
    if not scores:
        return None
    worst = max(scores, key=lambda name: scores[name])
    return min(max(scores[worst], 0.0), _MOST), f"{worst} {known[worst]:.4g}"


def adapted(
    state: AdaptiveBound, step: int, metrics: Mapping[str, float | None], starved: bool, lowest: int, highest: int
) -> AdaptiveBound:
    """The state after the measurements of `step`. It is unchanged if `step` is not newer than the state's, or if no
    metric of `LIMITS` was measured.

    `starved`: no second batch was ready when the step's batch was taken. `lowest`, `highest`: limits of the bound.
    """
    if step <= state.step or (measured := mismatch(metrics)) is None:
        return state
    value, worst = measured
    smoothed = state.mismatch + _SHARE * (value - state.mismatch)
    bound, probing, held = state.bound, state.probing, max(0, state.held - 1)
    if not held and smoothed > 1:
        bound, probing = max(bound // 2, lowest), False
    elif not held and smoothed < _ALLOWS and starved:
        bound = min(max(2 * bound, 1) if probing else bound + 1, highest)
    if bound != state.bound:
        held = max(bound, state.bound) + 1
    return AdaptiveBound(bound, smoothed, held, probing, step, worst)
