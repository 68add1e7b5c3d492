"""Every role is replaced in one way: at once after its first end, then after pauses that grow, until its budget is
spent: a number of times within a window, however long the run, and as often in a row. A role that is not wanted any
more is left where it ended.
"""

import asyncio
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import DeadlineExceeded, RoleDied
from stretto.processes.supervisor import RestartBudget, Supervisor


class Starts:
    """A role whose starts fail as often as it says; the number of the start that worked is its result."""

    def __init__(self, failures: int) -> None:
        self.failures, self.count = failures, 0
        self.told, self.pauses = list[str](), list[float]()

    async def start(self) -> int:
        self.count += 1
        if self.count <= self.failures:
            raise RoleDied("role", f"ended at start {self.count}")
        return self.count

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def supervisor(self, restarts: RestartBudget) -> Supervisor[int]:
        return Supervisor("role", self.start, restarts, self.told.append, "log.txt", sleep=self.sleep)


def test_the_first_replacement_is_at_once_and_later_ones_wait_longer_and_longer() -> None:
    role = Starts(failures=4)
    budget = RestartBudget(allowed=10, delay=1.0, factor=2.0, longest=3.0)
    assert asyncio.run(role.supervisor(budget).replace("was killed")) == 5
    assert (role.pauses, role.told[0]) == ([0.0, 1.0, 2.0, 3.0, 3.0], "role was killed: a new one is started")
    assert role.told[1] == "role ended at start 1: a new one is started"


@given(failures=st.integers(0, 8), allowed=st.integers(0, 8))
def test_a_role_is_started_as_often_as_its_budget_allows(failures: int, allowed: int) -> None:
    role = Starts(failures)
    replaced = role.supervisor(RestartBudget(allowed, delay=0.0)).begin()
    if failures <= allowed:
        assert asyncio.run(replaced) == failures + 1
        assert len(role.told) == failures
    else:
        with pytest.raises(RoleDied, match=rf"role ended at start {allowed + 1}, {allowed + 1} times?; .*log.txt"):
            asyncio.run(replaced)
        assert len(role.told) == allowed


def test_a_role_that_dies_for_days_is_still_started_again() -> None:
    budget = RestartBudget(math.inf, delay=1.0, factor=2.0, longest=60.0)  # of a tool that follows a run
    assert not any(budget.exceeded_by_one_more() for _ in range(2_000))
    assert budget.pause == 60.0


async def test_progress_begins_the_pauses_and_the_count_anew() -> None:
    role = Starts(failures=0)
    budget = RestartBudget(allowed=2, delay=1.0)

    for _ in range(5):
        await role.supervisor(budget).replace("was killed")
        budget.progressed()
    assert role.pauses == [0.0] * 5


def test_an_end_that_was_not_its_fault_does_not_count() -> None:
    role = Starts(failures=0)
    budget = RestartBudget(allowed=0)
    assert asyncio.run(role.supervisor(budget).replace("was killed", counted=False)) == 1
    with pytest.raises(RoleDied):
        asyncio.run(role.supervisor(budget).replace("was killed"))


async def test_keep_replaces_until_the_budget_is_spent() -> None:
    role, ends = Starts(failures=0), iter(["was killed", "ended with exit code 3", "was killed again"])

    async def ended() -> str:
        return next(ends)

    with pytest.raises(RoleDied, match="was killed again, 3 times"):
        await role.supervisor(RestartBudget(allowed=2, delay=0.0)).keep(ended)
    assert role.count == 2


def test_one_that_is_not_wanted_any_more_is_not_started_again() -> None:
    role = Starts(failures=9)
    wanted: Iterator[bool] = iter([True, True, False])
    supervisor = Supervisor("role", role.start, RestartBudget(9, delay=0.0), wanted=lambda: next(wanted))
    with pytest.raises(RoleDied) as death:
        asyncio.run(supervisor.begin())
    assert (death.value.how, role.count) == ("ended at start 3", 3)


def test_any_other_error_of_a_start_ends_the_supervision() -> None:
    async def late() -> None:
        raise DeadlineExceeded("conductor", "role to be ready", 1.0)

    with pytest.raises(DeadlineExceeded):
        asyncio.run(Supervisor("role", late, RestartBudget(9)).begin())


def budget(*deaths: float) -> RestartBudget:
    """Two are allowed in a minute."""
    return RestartBudget(allowed=2, window=60.0, clock=iter(deaths).__next__)


@pytest.mark.parametrize("deaths", [(0.0, 1.0, 59.9), (0.0, 100.0, 200.0)], ids=["in the window", "without progress"])
def test_one_more_than_allowed_within_the_window_or_without_progress_is_too_many(deaths: tuple[float, ...]) -> None:
    restarts = budget(*deaths)
    assert [restarts.exceeded_by_one_more() for _ in range(3)] == [False, False, True]
    assert len(restarts) == 3


def test_a_death_that_is_as_long_ago_as_the_window_counts_no_more() -> None:
    restarts = budget(0.0, 1.0, 60.0, 60.5)
    found = []
    for _ in range(4):
        found.append(restarts.exceeded_by_one_more())
        restarts.progressed()
    assert found == [False, False, False, True]


def test_deaths_without_progress_between_them_count_however_far_apart() -> None:
    restarts = budget(0.0, 100.0, 200.0, 300.0)
    assert [restarts.exceeded_by_one_more(), restarts.exceeded_by_one_more()] == [False, False]
    restarts.progressed()
    assert [restarts.exceeded_by_one_more(), len(restarts)] == [False, 1]


def test_no_death_may_be_allowed() -> None:
    assert RestartBudget(allowed=0, window=60.0).exceeded_by_one_more()
