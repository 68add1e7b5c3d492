"""No silent hang: when nothing moves, the run says who waits for what, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stretto.core.deadlines import Wait, open_waits
from stretto.core.errors import NothingMoves

#: Seconds that may count between two looks: while the conductor itself was stopped, nobody else could be judged.
_LONGEST_LOOK = 5.0


class Watchdog:
    """Looks now and then whether anything has moved.

    Args:
        progress: what changes when anybody gets anything done.
        seconds: how long nothing may move.
    """

    def __init__(self, progress: Callable[[], object], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._before: object = None
        self._looked = asyncio.get_running_loop().time()
        self._still = 0.0

    def look(self) -> None:
        """To be called every second or so.

        Raises:
            NothingMoves: nothing has, for too long.
        """
        now, found = asyncio.get_running_loop().time(), self._progress()
        elapsed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        self._still = self._still + elapsed if found == self._before else 0.0
        self._before = found
        if self._still >= self._seconds:
            raise NothingMoves(self._seconds, [_told(wait, now) for wait in open_waits()])


def _told(wait: Wait, now: float) -> str:
    return f"{wait.owner} has waited {now - wait.since:.0f} s of {wait.seconds:g} s for {wait.awaited}"
