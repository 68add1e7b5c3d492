"""Adapt the number of groups in flight to the engines' capacity (``rollout.max_in_flight = "auto"``): a pure function.

With too few groups, rows and KV cache of the engines are idle; with too many, completions wait or are preempted and
recomputed. The number n follows the engines' load by additive increase, multiplicative decrease, like a congestion
window (Chiu and Jain 1989, Computer Networks 17). It is decided at the end of a *window*, after n groups have ended:

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
(docs/explanation/staleness.md)

The state is a record, and the next one depends on the engines' readings alone, so resumed runs and simulations use the
same function.
"""

from __future__ import annotations

from stretto.core.records import Record

ROOM = 9 / 10  # share of an engine that a larger number may need
_ADDED, _REMOVED = 16, 4  # fractions of the number: added, taken away
_BORNE = 4  # groups per tolerated preemption: with a nearly full cache some are normal


class Pressure(Record, frozen=True):
    """A reading of the engines' load.

    Attributes:
        needed: demand of the fullest engine's open completions over its supply; rows or KV cache, the larger share.
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
        """The window's measurements as text."""
        lost = f", {self.preempted} completions preempted" if self.preempted else ""
        return f"{self.needed:.2f} of the fullest engine needed{lost}"


def measured(state: AdaptiveInFlight, now: Pressure, ended: int) -> AdaptiveInFlight:
    """The state with one more reading in its window. `ended`: groups that ended since the previous reading."""
    moments = state.moments + 1
    return AdaptiveInFlight(
        state.number,
        state.probing,
        state.settling,
        ended=state.ended + ended,
        moments=moments,
        needed=state.needed + (now.needed - state.needed) / moments,
        least=min(state.least, now.needed) if state.moments else now.needed,
        preempted=state.preempted + now.preempted,
    )


def decided(state: AdaptiveInFlight, engines: int, short: bool, lowest: int, most: int) -> AdaptiveInFlight:
    """The state with the next limit and an empty window; unchanged while fewer groups have ended than the limit.

    `engines`: number of engines that take groups. `short`: whether this limit alone holds admission back. `lowest`,
    `most`: smallest and largest number to choose.
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
    """The largest next limit for which the fullest engine has room, with groups spread evenly over the engines; the
    present limit if there is none."""
    steps = [state.number + _step(state.number), *([2 * state.number] if state.probing else [])]
    tried = [max(state.number, min(step, most)) for step in steps]
    before = -(-state.number // engines)
    fitting = [number for number in tried if state.needed * -(-number // engines) <= ROOM * before]
    return max(fitting, default=state.number)
