"""Promises of the clocks: the virtual one jumps from event to event in order; neither ever goes back."""

import pytest

from stretto.core.clock import VirtualClock, WallClock


def test_events_of_one_moment_run_in_the_order_in_which_they_were_asked_for() -> None:
    clock, seen = VirtualClock(), list[str]()
    for name in "abc":
        clock.call_at(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    while clock.advance():
        pass
    assert seen == ["a", "b", "c"]


def test_an_event_may_schedule_another() -> None:
    clock, seen = VirtualClock(), list[float]()
    clock.call_at(1.0, lambda: clock.call_after(2.0, lambda: seen.append(clock.now())))
    while clock.advance():
        pass
    assert seen == [3.0]


def test_nothing_is_scheduled_in_the_past() -> None:
    clock = VirtualClock()
    clock.call_at(2.0, lambda: None)
    clock.advance()
    with pytest.raises(ValueError, match=r"it is 2\.0 already"):
        clock.call_at(1.0, lambda: None)


def test_the_wall_clock_does_not_go_back() -> None:
    clock = WallClock()
    assert 0.0 <= clock.now() <= clock.now()
