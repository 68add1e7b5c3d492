"""Stalls, on a clock that jumps: the seconds in which nothing moved, without those in which the watching process was
suspended, or in which users' code was at work within its deadline."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from stretto.core.deadlines import StallTimer, Watchdog, waiting
from stretto.core.errors import NothingMoves
from tests.faults.simulation import VirtualLoop

T = TypeVar("T")


def jumping(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_a_stall_grows_from_poll_to_poll_and_ends_with_a_movement() -> None:
    async def main() -> list[float]:
        stall, seen = StallTimer(1.0), []
        for moved in (False, False, True, False):
            await asyncio.sleep(0.5)
            seen.append(stall.poll(moved))
        return seen

    assert jumping(main()) == [0.5, 1.0, 0.0, 0.5]


def test_a_pause_of_the_one_who_looks_counts_once_at_most() -> None:
    """SIGSTOP, a machine that was suspended."""

    async def main() -> float:
        stall = StallTimer(0.1)
        await asyncio.sleep(0.5)
        return stall.poll(moved=False)

    assert jumping(main()) == 0.1


def test_a_role_that_waits_is_named_when_nothing_moves() -> None:
    async def main() -> None:
        watchdog = Watchdog(lambda: "as before", 3)
        with waiting("trainer", "a batch", 60):
            for _ in range(4):  # the first look has nothing to compare with
                await asyncio.sleep(1)
                watchdog.check()

    with pytest.raises(NothingMoves, match="nothing has moved for 3 s: trainer has waited 4 s of 60 s for a batch"):
        jumping(main())


def test_a_wait_for_users_code_within_its_deadline_is_no_standstill_and_its_end_is() -> None:
    looks = []

    async def main() -> None:
        watchdog, at_work = Watchdog(lambda: "as before", 3), True
        with waiting("conductor", "a tool", 60, lambda: at_work):
            for second in range(30):
                at_work = second < 20  # then the workflow waits for the run, which stands still
                await asyncio.sleep(1)
                watchdog.check()
                looks.append(second)

    with pytest.raises(NothingMoves, match="conductor has waited 23 s of 60 s for a tool"):
        jumping(main())
    assert looks[-1] == 21
