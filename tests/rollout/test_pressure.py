"""Promises of ``rollout.max_in_flight = "auto"``:

- the number stays within the limits of the recipe, and is never raised above what is useful, whatever the engines tell;
- of two engines of which one is fuller, the fuller one never gets the larger number;
- a load that stays the same brings it to rest, below the point from which it would be lowered: no oscillation;
- it is decided when as many groups have ended as it allows, and nothing of the window before counts in the next one;
- it is raised only where groups wait for it alone, and a completion that is preempted now and then does not lower it.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.adaptive import ROOM, AdaptiveInFlight, Pressure, decided, measured

Load = Callable[[int], Pressure]

moments = st.builds(Pressure, needed=st.floats(0, 3), preempted=st.integers(0, 40), engines=st.integers(1, 4))
states = st.builds(AdaptiveInFlight, number=st.integers(1, 64), probing=st.booleans(), settling=st.booleans())


def window(state: AdaptiveInFlight, now: Pressure, lowest: int = 1, most: int = 256) -> AdaptiveInFlight:
    """The state after a window in which the engines have told the same twice."""
    for ended in (state.number // 2, state.number - state.number // 2):
        state = decided(measured(state, now, ended), now.engines, True, lowest, most)
    return state


def numbers(load: Load, windows: int, start: int = 1, most: int = 256, probing: bool = True) -> list[int]:
    state, found = AdaptiveInFlight(start, probing), [start]
    for _ in range(windows):
        state = window(state, load(state.number), most=most)
        found.append(state.number)
    return found


def test_on_an_empty_engine_it_doubles_and_then_comes_to_rest_below_its_room() -> None:
    """Each group needs a 50th of the engine; nine tenths are 45 groups. The window after it was doubled does not count.
    Twice 32 would be too many, so a sixteenth is added at a time; behind 44 come 46."""
    found = numbers(lambda number: Pressure(number / 50), 60)
    assert found[:16] == [1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 34, 36, 38, 40, 42, 44]
    assert set(found[16:]) == {44}


def test_where_completions_wait_a_quarter_is_taken_away_and_the_next_window_does_not_count() -> None:
    """64 groups on an engine for 50: lowered to 48, and 0.96 of it is too much for more."""
    assert numbers(lambda number: Pressure(number / 50), 8, start=64) == [64, 48, 48, 48, 48, 48, 48, 48, 48]
    assert numbers(lambda number: Pressure(number / 20), 6, start=64) == [64, 48, 48, 36, 36, 27, 27]


def test_a_completion_that_is_preempted_now_and_then_lowers_nothing() -> None:
    # Two moments of four preemptions each, in a window of 32 groups: one for every four of them is borne, nine are not.
    assert window(AdaptiveInFlight(32, probing=False), Pressure(0.95, preempted=4)).number == 32
    assert window(AdaptiveInFlight(32, probing=False), Pressure(0.95, preempted=5)).number == 24


def test_it_is_raised_only_where_groups_wait_for_it_alone() -> None:
    state = measured(AdaptiveInFlight(8), Pressure(0.1), ended=8)
    assert decided(state, 1, short=False, lowest=1, most=256) == AdaptiveInFlight(8)
    assert decided(state, 1, short=True, lowest=1, most=256).number == 16
    assert decided(state, 1, short=True, lowest=1, most=11).number == 11
    assert decided(state, 1, short=True, lowest=1, most=3).number == 8  # what is in force is not taken back


def test_it_is_decided_when_as_many_groups_have_ended() -> None:
    state = measured(AdaptiveInFlight(8), Pressure(0.1, preempted=3), ended=7)
    assert decided(state, 1, True, 1, 256) is state
    assert (state.moments, state.needed, state.least, state.preempted) == (1, 0.1, 0.1, 3)
    state = measured(state, Pressure(0.3), ended=1)
    assert (state.moments, state.least) == (2, 0.1)
    assert state.needed == pytest.approx(0.2)
    assert decided(state, 1, True, 1, 256) == AdaptiveInFlight(6, probing=False, settling=True)


def test_groups_are_spread_over_the_engines() -> None:
    """Two engines, each for two groups: one group needs half of one engine, and leaves the other to a second one."""
    found = numbers(lambda number: Pressure(-(-number // 2) / 2, engines=2), 12)
    assert found[:3] == [1, 2, 2]
    assert found[-1] == 2  # a third would fill the first engine


@given(start=st.integers(1, 32), seen=st.lists(moments, max_size=60), low=st.integers(1, 32), more=st.integers(0, 64))
def test_it_never_leaves_its_limits(start: int, seen: list[Pressure], low: int, more: int) -> None:
    useful = low + more
    state = AdaptiveInFlight(min(max(start, low), useful))
    for now in seen:
        state = window(state, now, low, useful)
        assert low <= state.number <= useful


@given(state=states, now=moments, fuller=st.floats(0, 2), lost=st.integers(0, 20))
def test_the_fuller_engine_never_gets_more(state: AdaptiveInFlight, now: Pressure, fuller: float, lost: int) -> None:
    other = Pressure(now.needed + fuller, now.preempted + lost, now.engines)
    assert window(state, other).number <= window(state, now).number


@given(share=st.floats(0.001, 3.0), engines=st.integers(1, 4), start=st.integers(1, 200), probing=st.booleans())
def test_a_constant_load_brings_it_to_rest(share: float, engines: int, start: int, probing: bool) -> None:
    """Each group needs the same share of an engine: it falls until all have room, rises while there is, and then
    never changes."""

    def load(number: int) -> Pressure:
        return Pressure(share * -(-number // engines), engines=engines)

    found = numbers(load, 300, start, probing=probing)
    assert len(set(found[-100:])) == 1
    assert found[-1] == 1 or load(found[-1]).needed <= 1
    rises = [after > before for before, after in pairwise(found) if after != before]
    assert rises == sorted(rises)
    if any(rises):
        assert load(found[-1]).needed <= ROOM * (1 + 1e-9)
