"""How often a role may die: a number of times within a window, however long the run, and as often in a row."""

from __future__ import annotations

from stretto.processes.supervisor import RestartBudget


def test_one_more_than_allowed_within_the_window_is_too_many() -> None:
    restarts = RestartBudget(allowed=2, window=60.0, clock=iter([0.0, 1.0, 59.9]).__next__)
    assert [restarts.exceeded_by_one_more() for _ in range(3)] == [False, False, True]
    assert len(restarts) == 3


def test_a_death_that_is_as_long_ago_as_the_window_counts_no_more() -> None:
    restarts = RestartBudget(allowed=2, window=60.0, clock=iter([0.0, 1.0, 60.0, 60.5]).__next__)
    found = []
    for _ in range(4):
        found.append(restarts.exceeded_by_one_more())
        restarts.progressed()
    assert found == [False, False, False, True]


def test_deaths_without_progress_between_them_count_however_far_apart() -> None:
    restarts = RestartBudget(allowed=2, window=60.0, clock=iter([0.0, 100.0, 200.0, 300.0]).__next__)
    assert [restarts.exceeded_by_one_more(), restarts.exceeded_by_one_more()] == [False, False]
    restarts.progressed()
    assert [restarts.exceeded_by_one_more(), len(restarts)] == [False, 1]


def test_one_that_dies_of_the_same_work_every_time_is_given_up() -> None:
    restarts = RestartBudget(allowed=2, window=60.0, clock=iter([0.0, 100.0, 200.0]).__next__)
    assert [restarts.exceeded_by_one_more() for _ in range(3)] == [False, False, True]


def test_no_death_may_be_allowed() -> None:
    assert RestartBudget(allowed=0, window=60.0).exceeded_by_one_more()
