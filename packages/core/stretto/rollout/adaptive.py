"""The bound on staleness that follows the measured mismatch (``rollout.max_staleness = "auto"``): a pure function.

Stale tokens cost what the policy that is trained differs from those that sampled them. Each training step measures that
difference, and the bound follows as the window of a congested network does (additive increase, multiplicative decrease:
Chiu and Jain 1989, Computer Networks 17):

    measured    m = the largest of the measured values, each over its limit; at most 2
    smoothed    s <- s + (m - s) / 4
    lowered     eta <- max(eta // 2, staleness_min)    where s > 1
    raised      eta <- min(eta + 1, staleness_max)     where s < 1/2, and the trainer had no second batch at hand
                eta <- min(2 eta, ..)                  until it has been lowered for the first time
    held        max(old, new) + 1 steps after a change

Between 1/2 and 1 the bound stays. It is held because a change takes that long to show: groups in flight keep the bound
under which they were admitted. A larger bound gives the trainer more to choose from and nothing else, so it is raised
only where the trainer is about to wait for generation. (docs/explanation/staleness.md)

The state is a record, and the next one follows from the metrics of a step alone: the loop, a resumed run and a
simulation come to the same bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stretto.core.records import Record

_MOST = 2.0  # a single step, however bad, does not lower a bound whose smoothed mismatch allows it to be raised
_SHARE = 1 / 4  # of the newest step in the smoothed mismatch
_ALLOWS = 1 / 2  # below it, the mismatch allows a larger bound


class MismatchLimit(NamedTuple):
    """A metric of the update (docs/reference/metrics.md): its value without mismatch, and its limit."""

    none: float
    limit: float


LIMITS: Mapping[str, MismatchLimit] = {
    "effective_samples": MismatchLimit(1.0, 0.8),
    "kl_behavior": MismatchLimit(0.0, 0.05),
    "clip_fraction": MismatchLimit(0.0, 0.05),
    "outlier_fraction": MismatchLimit(0.0, 0.1),
}


class AdaptiveBound(Record, frozen=True):
    """A bound that is adapted, after the measurements of `step`.

    Attributes:
        mismatch: smoothed; 1 is the limit.
        held: steps until it may change again.
        probing: it has never been lowered.
        worst: the metric that was nearest to its limit, with its value.
    """

    bound: int
    mismatch: float = 0.0
    held: int = 0
    probing: bool = True
    step: int = 0
    worst: str = ""


def mismatch(metrics: Mapping[str, float | None]) -> tuple[float, str] | None:
    """The largest of the measured values over its limit, and which it is; None where none was measured.

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
    """The state after the measurements of `step`; those of an earlier one change nothing.

    `starved`: when the batch of the step was taken, there was no second one to be taken after it.
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
