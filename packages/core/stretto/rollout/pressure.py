"""The groups in flight that the engines have room for (``rollout.max_in_flight = "auto"``): a pure function.

With too few groups rows and KV cache of the engines are empty; too many wait in front of them, or drive each other out
of the cache and are computed again. The number in force follows what the engines tell, as the window of a congested
network does (additive increase, multiplicative decrease: Chiu and Jain 1989, Computer Networks 17). It is decided at
the end of a *window*, in which as many groups have ended as it allows:

    needed     by the open completions of the fullest engine, over what it has: rows or KV cache, the larger share;
               above 1 some of them wait
    lowered    n <- max(n - n / 4, max_in_flight_min)    where some waited throughout, or more than one completion was
                                                         preempted for every four groups
    raised     n <- min(n + max(1, n / 16), most)        where admission waits for n alone, and the mean of what was
                                                         needed, times (new n / old n), is at most 9/10
               n <- min(2 n, most)                       likewise, until it has been lowered for the first time
    most       the smaller of max_in_flight_max and (eta + 1) B, above which equation 3 admits nothing

The window after it was lowered or doubled does not count: groups of before are still in flight.

Under a load that stays the same it is never raised to where it would be lowered: it comes to rest.
(docs/explanation/staleness.md)

The state is a record, and the next one follows from what the engines tell: a resumed run goes on from the one on
record, and a simulation comes to its numbers by the same function.
"""

from __future__ import annotations

from stretto.core.records import Record

ROOM = 9 / 10  # of an engine, which a larger number may come to need
_ADDED, _REMOVED = 16, 4  # parts of the number: one is added, one is taken away
_BORNE = 4  # groups for each completion that is preempted: where the cache is nearly full, one is now and then


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
        settling: it was lowered or doubled after the last window, so that this one does not count.
        ended: groups, in this window.
        moments: at which the engines have told, in this window.
        needed: the mean of those moments.
        least: that was needed at any of them.
        preempted: completions, in this window.
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
        """What this window says."""
        lost = f", {self.preempted} completions preempted" if self.preempted else ""
        return f"{self.needed:.2f} of the fullest engine needed{lost}"


def measured(state: AdaptiveInFlight, now: Pressure, ended: int) -> AdaptiveInFlight:
    """The window with one more moment; `ended` groups have ended since the one before."""
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
    """The number after a window, and a new window; the same state while the window is open.

    `short`: admission waits for the number alone. `most`: what is allowed, or useful if that is less.
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
    """The largest number to be tried for which the fullest engine has room, when groups are spread evenly."""
    steps = [state.number + _step(state.number), *([2 * state.number] if state.probing else [])]
    tried = [max(state.number, min(step, most)) for step in steps]
    before = -(-state.number // engines)
    fitting = [number for number in tried if state.needed * -(-number // engines) <= ROOM * before]
    return max(fitting, default=state.number)
