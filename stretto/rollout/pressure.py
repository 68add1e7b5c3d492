"""The groups in flight that the engines have room for (``rollout.max_in_flight = "auto"``): a pure function.

With too few groups rows and KV cache of the engines are empty; too many wait in front of them, or drive each other out
of the cache and are computed again. The number in force follows what the engines tell, as the window of a congested
network does (additive increase, multiplicative decrease: Chiu and Jain 1989, Computer Networks 17). It is decided at
the end of a *window*, in which as many groups have ended as it allows:

    needed     by the open completions of the fullest engine, over what it has: rows or KV cache, the larger share;
               above 1 some of them wait
    lowered    n <- max(n - n / 4, max_in_flight_min)      where completions were preempted, or some waited throughout;
               the window after it does not count, for older groups are still in flight
    raised     n <- min(n + max(1, n / 16), most)          where admission waits for n alone, and the most that was
                                                           needed, times (new n / old n), is at most 9/10
               n <- min(2 n, most)                         likewise, until it has been lowered for the first time
    most       the smaller of max_in_flight_max and (eta + 1) B, above which equation 3 admits nothing

A load that stays the same is never raised to where it would be lowered, so the number comes to rest. (docs/scaling.md)

The state is a record, and the next one follows from what the engines tell: a resumed run goes on from the one on
record, and a simulation comes to its numbers by the same function.
"""

from __future__ import annotations

from stretto.core.records import Record

ROOM = 9 / 10  # of an engine, which a larger number may come to need
_ADDED, _REMOVED = 16, 4  # parts of the number: one is added, one is taken away


class Pressure(Record, frozen=True):
    """What the engines tell at one moment.

    Attributes:
        needed: by the open completions of the fullest engine, over what it has; rows or KV cache, the larger share.
        preempted: completions that lost their KV entries since the moment before.
        engines: that get groups.
    """

    needed: float
    preempted: int = 0
    engines: int = 1


class AdaptiveInFlight(Record, frozen=True):
    """A number that is adapted, and the window that is being measured.

    Attributes:
        probing: it has never been lowered.
        settling: it was lowered after the last window.
        ended: groups, in this window.
        most, least: needed at any moment of it; `least` is None before the first.
        preempted: completions, in this window.
    """

    number: int
    probing: bool = True
    settling: bool = False
    ended: int = 0
    most: float = 0.0
    least: float | None = None
    preempted: int = 0

    @property
    def reason(self) -> str:
        """What this window says."""
        lost = f", {self.preempted} completions preempted" if self.preempted else ""
        return f"{self.least or 0:.2f} to {self.most:.2f} of the fullest engine needed{lost}"


def measured(state: AdaptiveInFlight, now: Pressure, ended: int) -> AdaptiveInFlight:
    """The window with one more moment, before which `ended` groups have ended since the one before."""
    return AdaptiveInFlight(
        state.number,
        state.probing,
        state.settling,
        state.ended + ended,
        max(state.most, now.needed),
        now.needed if state.least is None else min(state.least, now.needed),
        state.preempted + now.preempted,
    )


def decided(state: AdaptiveInFlight, engines: int, short: bool, lowest: int, highest: int) -> AdaptiveInFlight:
    """The number after a window, and a new window; the same state while the window is open.

    `short`: admission waits for the number alone; `highest`: what is useful, or allowed if that is less.
    """
    if state.ended < state.number or state.least is None:
        return state
    number, probing = state.number, state.probing
    if state.settling:
        return AdaptiveInFlight(number, probing)
    if state.preempted or state.least > 1:
        lower = min(number, max(lowest, number - max(1, number // _REMOVED)))
        return AdaptiveInFlight(lower, probing=False, settling=lower < number)
    if short:
        number = _raised(state, engines, highest)
    return AdaptiveInFlight(number, probing)


def _raised(state: AdaptiveInFlight, engines: int, highest: int) -> int:
    """The largest number to be tried for which the fullest engine would have room, were groups spread evenly."""
    before = -(-state.number // engines)
    steps = [state.number + max(1, state.number // _ADDED), *([2 * state.number] if state.probing else [])]
    tried = [max(state.number, min(step, highest)) for step in steps]
    fitting = [number for number in tried if state.most * -(-number // engines) / before <= ROOM]
    return max(fitting, default=state.number)
