"""Virtual clock of a simulation, which replaces `time.monotonic`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Clock that jumps from event to event, so that waiting costs no real time.

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
        """Schedule `callback` at the time `when` (seconds). Events of the same time run in the order of scheduling."""
        if when < self._now:
            raise ValueError(f"cannot schedule at {when}, it is {self._now} already")
        heapq.heappush(self._events, (when, next(self._order), callback))

    def call_after(self, delay: float, callback: Callable[[], None]) -> None:
        self.call_at(self._now + delay, callback)

    def advance(self) -> bool:
        """Jump to the next event and run it; return False if there is none left."""
        if not self._events:
            return False
        self._now, _, callback = heapq.heappop(self._events)
        callback()
        return True
