"""Stalls: the seconds in which nothing moved, without those in which the watching process was suspended."""

from __future__ import annotations

import asyncio
import time

import pytest

from stretto.core.deadlines import StallTimer, Watchdog, waiting
from stretto.core.errors import NothingMoves


def test_a_stall_grows_from_poll_to_poll_and_ends_with_a_movement() -> None:
    async def main() -> list[float]:
        stall, seen = StallTimer(1.0), []
        for moved in (False, False, True, False):
            await asyncio.sleep(0.05)
            seen.append(stall.poll(moved))
        return seen

    first, second, third, fourth = asyncio.run(main())
    assert 0.05 <= first < second
    assert third == 0.0 < fourth


def test_a_pause_of_the_one_who_looks_counts_once_at_most() -> None:
    async def main() -> float:
        stall = StallTimer(0.1)
        time.sleep(0.5)  # SIGSTOP, a machine that was suspended
        return stall.poll(moved=False)

    assert asyncio.run(main()) == 0.1


def test_whoever_waits_is_named_when_nothing_moves() -> None:
    async def main() -> None:
        watchdog = Watchdog(lambda: "as before", 0.05)
        with waiting("trainer", "a batch", 60):
            for _ in range(10):
                await asyncio.sleep(0.02)
                watchdog.check()

    with pytest.raises(
        NothingMoves, match=r"nothing has moved for 0\.05 s: trainer has waited \d+ s of 60 s for a batch"
    ):
        asyncio.run(main())
