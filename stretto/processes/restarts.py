"""How often a role may die before the run gives up: within a stretch of time, and without getting anything done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RESTART_DELAY_SECONDS = 0.5  #: between two starts of a role: what was missing, memory say, may be there then


class RestartBudget:
    """The deaths of one role within the last `window` seconds, and those since it has got something done: one that
    dies of the same work every time ends the run, however long each time takes.

    Example::

        deaths = RestartBudget(allowed=3, window=3600.0)
        if deaths.one_more():          # the fourth within an hour, or the fourth since `progressed`
            raise RoleDied(...)
    """

    def __init__(self, allowed: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowed, self._window, self._clock = allowed, window, clock
        self._moments: deque[float] = deque()
        self._in_a_row = 0

    def one_more(self) -> bool:
        """Count a death; is it one too many?"""
        now = self._clock()
        self._in_a_row += 1
        self._moments.append(now)
        while self._moments[0] <= now - self._window:
            self._moments.popleft()
        return len(self) > self._allowed

    def progressed(self) -> None:
        """It has done what it was asked for."""
        self._in_a_row = 0

    def __len__(self) -> int:
        return max(len(self._moments), self._in_a_row)
