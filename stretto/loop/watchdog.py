"""No silent hang: when nothing moves, the run says who waits for what, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stretto.core.deadlines import StallTimer, Wait, open_waits
from stretto.core.errors import NothingMoves

#: Seconds that may count between two looks of the watchdog, which looks every second or so.
_LONGEST_POLL = 5.0


class Watchdog:
    """Looks now and then whether anything has moved.

    Args:
        progress: what changes when anybody gets anything done.
        seconds: how long nothing may move.
    """

    def __init__(self, progress: Callable[[], object], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._before: object = None
        self._stall = StallTimer(_LONGEST_POLL)

    def check(self) -> None:
        """To be called every second or so.

        Raises:
            NothingMoves: nothing has, for too long.
        """
        before, self._before = self._before, self._progress()
        if self._stall.poll(moved=self._before != before) >= self._seconds:
            now = asyncio.get_running_loop().time()
            raise NothingMoves(self._seconds, [_told(wait, now) for wait in open_waits()])


def _told(wait: Wait, now: float) -> str:
    return f"{wait.owner} has waited {now - wait.since:.0f} s of {wait.seconds:g} s for {wait.awaited}"
