"""When groups start, within equation 3 and `max_in_flight`: each as soon as it may, or in rounds."""

from __future__ import annotations

from typing import Protocol


class Pacing(Protocol):
    """The policy that decides when groups start, within equation 3 and `max_in_flight`."""

    def opens(self, may_start: bool, in_flight: int) -> bool:
        """Whether a group starts now. `may_start`: equation 3 and `max_in_flight` allow it."""


class Continuous:
    """Each group starts as soon as it may."""

    def opens(self, may_start: bool, in_flight: int) -> bool:
        return may_start


class InRounds:
    """Groups start together: all that may, once none is in flight; the next ones after all of these have left."""

    def __init__(self) -> None:
        self._opening = True  # the round still takes groups

    def opens(self, may_start: bool, in_flight: int) -> bool:
        self._opening = may_start and (self._opening or not in_flight)
        return self._opening
