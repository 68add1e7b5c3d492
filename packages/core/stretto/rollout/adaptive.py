"""Bounds that adapt, as pure functions: the staleness to the measured mismatch (``rollout.max_staleness = "auto"``),
the number of groups in flight to the engines' capacity (``rollout.max_in_flight = "auto"``).

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

With too few groups, rows and KV cache of the engines are idle; with too many, completions wait or are preempted and
recomputed. The number n follows the engines' load in the same way. It is decided at the end of a *window*, after n
groups have ended:

    needed     demand of the fullest engine's open completions over its supply, rows or KV cache, the larger share;
               above 1 some of them wait
    lowered    n <- max(n - n / 4, max_in_flight_min)    if completions waited at every reading of the window, or more
                                                         than one was preempted for every four groups
    raised     n <- min(n + max(1, n / 16), most)        if only n holds admission back, and the mean of `needed`,
                                                         times (new n / old n), is at most 9/10
               n <- min(2 n, most)                       likewise, until it has been lowered for the first time
    most       the smaller of max_in_flight_max and (eta + 1) B, above which equation 3 admits nothing

The window after a decrease or doubling does not count, since earlier groups are still in flight.

Under a constant load n settles: it is never raised to a number from which it would be lowered.

Both states are records. The next one depends on the metrics of a step, or on the engines' readings, alone. So the loop,
a resumed run and a simulation get the same bounds (docs/explanation/staleness.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from stretto.core.errors import several
from stretto.core.records import Record

_MOST = 2.0  # cap: one bad step cannot lower a bound whose smoothed mismatch allows a raise
_SHARE = 1 / 4  # weight of the newest step in the smoothed mismatch
_ALLOWS = 1 / 2  # smoothed mismatch below which the bound may be raised


class _MismatchLimit(NamedTuple):
    """A metric of the update (docs/reference/metrics.md): its value without mismatch (`none`), and the `limit` beyond
    which the bound is lowered."""

    none: float
    limit: float


LIMITS: Mapping[str, _MismatchLimit] = {
    "effective_samples": _MismatchLimit(1.0, 0.8),
    "kl_behavior": _MismatchLimit(0.0, 0.05),
    "clip_fraction": _MismatchLimit(0.0, 0.05),
    "outlier_fraction": _MismatchLimit(0.0, 0.1),
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
    """The largest of the step's metrics relative to their `LIMITS` (0 to 2; 1 is at the limit), and that metric's name
    and value as text; None if no metric that has a limit was measured.

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
    """The state after the measurements of `step`: the smoothed mismatch follows `metrics`, and the bound is halved if
    that is above 1, or raised (by one, or doubled until the first fall) if it is below 1/2. After a change the bound
    stays for some steps. The state is unchanged if `step` is not newer than the state's, or if no metric that has a
    limit was measured.

    `starved`: no second batch was ready when the step's batch was taken; only then the bound is raised. `lowest`,
    `highest`: limits of the bound.
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


ROOM = 9 / 10  # share of an engine that a larger number may need
_ADDED, _REMOVED = 16, 4  # fractions of the number: added, taken away
_BORNE = 4  # groups per tolerated preemption: with a nearly full cache some are normal


class Pressure(Record, frozen=True):
    """A reading of the engines' load.

    Attributes:
        needed: demand of the fullest engine's open completions over its supply: batch rows or KV cache, the larger.
        preempted: completions that lost their KV entries since the previous reading.
        engines: number of engines that take groups.
    """

    needed: float
    preempted: int = 0
    engines: int = 1


class AdaptiveInFlight(Record, frozen=True):
    """The adaptive limit on groups in flight, with the measurements of the current window.

    Attributes:
        number: the limit.
        probing: whether the limit has never been lowered.
        settling: whether the limit was lowered or doubled after the last window, so that this window does not count.
        ended: groups that ended in this window.
        moments: number of readings of the engines' load (`Pressure`) in this window.
        needed: mean of `Pressure.needed` over these readings: demand over supply of the fullest engine.
        least: smallest `Pressure.needed` of these readings.
        preempted: completions preempted in this window.
    """

    number: int
    probing: bool = True
    settling: bool = False
    ended: int = 0
    moments: int = 0
    needed: float = 0.0
    least: float = 0.0
    preempted: int = 0

    @property
    def reason(self) -> str:
        """The window's measurements as text: mean demand over supply of the fullest engine (`needed`), and preempted
        completions."""
        lost = f", {several(self.preempted, 'completion')} preempted" if self.preempted else ""
        return f"{self.needed:.2f} of the fullest engine needed{lost}"


def measured(state: AdaptiveInFlight, now: Pressure, ended: int) -> AdaptiveInFlight:
    """The state with one more reading in its window. `ended`: groups that ended since the previous reading."""
    moments = state.moments + 1
    return msgspec.structs.replace(
        state,
        ended=state.ended + ended,
        moments=moments,
        needed=state.needed + (now.needed - state.needed) / moments,
        least=min(state.least, now.needed) if state.moments else now.needed,
        preempted=state.preempted + now.preempted,
    )


def decided(state: AdaptiveInFlight, engines: int, short: bool, lowest: int, most: int) -> AdaptiveInFlight:
    """Decide on the limit at the end of a window: returns the state with the next limit and an empty window. The limit
    falls if many completions were preempted, or some waited for room at every reading. The state is unchanged while
    fewer groups than the limit have ended in the window, or without a reading; a window that is `settling` leaves the
    limit as it is.

    `engines`: number of engines that take groups. `short`: whether this limit alone holds admission back; only then it
    is raised. `lowest`, `most`: smallest and largest number to choose.
    """
    if state.ended < state.number or not state.moments:
        return state
    if state.settling:
        return AdaptiveInFlight(state.number, state.probing)
    if state.preempted * _BORNE > state.ended or state.least > 1:
        lower = max(min(lowest, state.number), state.number - max(1, state.number // _REMOVED))
        return AdaptiveInFlight(lower, probing=False, settling=lower < state.number)
    raised = _raised(state, engines, most) if short else state.number
    return AdaptiveInFlight(raised, state.probing, settling=raised > state.number + _step(state.number))


def _step(number: int) -> int:
    return max(1, number // _ADDED)


def _raised(state: AdaptiveInFlight, engines: int, most: int) -> int:
    """The largest next limit (a step above `state.number`, or twice that number while probing; at most `most`) for
    which the fullest engine has room, with groups spread evenly over the engines; the present limit if there is none.
    """
    steps = [state.number + _step(state.number), *([2 * state.number] if state.probing else [])]
    tried = [max(state.number, min(step, most)) for step in steps]
    before = -(-state.number // engines)
    fitting = [number for number in tried if state.needed * -(-number // engines) <= ROOM * before]
    return max(fitting, default=state.number)
