"""Time as something that is handed in: a run has `time.monotonic`, a simulation a clock that jumps."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock that jumps from event to event: a day of a simulated run takes as long as its decisions take.

    >>> clock = VirtualClock()
    >>> clock.call_at(2.0, lambda: print("two"))
    >>> clock.call_at(1.0, lambda: print("one"))
    >>> while clock.advance(): pass
    one
    two
    >>> clock.now()
    2.0
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Run `callback` at `when` (seconds); events of one moment run in the order in which they were asked for."""
        if when < self._now:
            raise ValueError(f"cannot schedule at {when}, it is {self._now} already")
        heapq.heappush(self._events, (when, next(self._order), callback))

    def call_after(self, delay: float, callback: Callable[[], None]) -> None:
        self.call_at(self._now + delay, callback)

    def advance(self) -> bool:
        """Run the next event; False when there is none left."""
        if not self._events:
            return False
        self._now, _, callback = heapq.heappop(self._events)
        callback()
        return True
