"""Promises of the virtual clock: it jumps from event to event in order, and never goes back."""

import pytest

from stretto_foresight.simulator.clock import VirtualClock


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
