"""No silent hang: a run without progress ends with a list of its open waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stretto.core.deadlines import StallTimer, Wait, open_waits
from stretto.core.errors import NothingMoves

#: Seconds that count between two checks at most; there is one every second.
_LONGEST_POLL = 5.0


class Watchdog:
    """Ends a run without progress.

    Args:
        progress: a value that changes with all work of a role.
        seconds: how long it may stay the same.
    """

    def __init__(self, progress: Callable[[], object], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._before: object = None
        self._stall = StallTimer(_LONGEST_POLL)

    def check(self) -> None:
        """To be called every second.

        Raises:
            NothingMoves: there was no progress for too long.
        """
        before, self._before = self._before, self._progress()
        if self._stall.poll(moved=self._before != before) >= self._seconds:
            now = asyncio.get_running_loop().time()
            raise NothingMoves(self._seconds, [_described(wait, now) for wait in open_waits()])


def _described(wait: Wait, now: float) -> str:
    return f"{wait.owner} has waited {now - wait.since:.0f} s of {wait.seconds:g} s for {wait.awaited}"
