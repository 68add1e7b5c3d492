"""When groups start, within what equation 3 and the number in flight allow."""

from __future__ import annotations

from typing import Protocol


class Pacing(Protocol):
    def opens(self, may_start: bool, in_flight: int) -> bool:
        """Whether a group starts now. `may_start`: equation 3 and the number in flight allow it."""
        ...


class Continuous:
    """As soon as one may."""

    def opens(self, may_start: bool, in_flight: int) -> bool:
        return may_start


class InRounds:
    """Together: as many as may when none is in flight, and then none until all of these have left."""

    def __init__(self) -> None:
        self._opening = True  # the round has not got all its groups yet

    def opens(self, may_start: bool, in_flight: int) -> bool:
        self._opening = may_start and (self._opening or not in_flight)
        return self._opening
