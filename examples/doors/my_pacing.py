"""An admission policy: a run begins with few groups in flight, and one more is allowed for each that ends.

[rollout]
pacing = { kind = "my_pacing:Ramp", first = 2 }
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

First = Annotated[int, Field(ge=1, description="groups in flight at the start")]


class Ramp:
    """`may_start`: equation 3 and `max_in_flight` allow a group. A policy can only start fewer."""

    def __init__(self, *, first: First = 2) -> None:
        self._most, self._before = first, 0

    def opens(self, may_start: bool, in_flight: int) -> bool:
        """Whether to start a group now."""
        self._most += max(0, self._before - in_flight)
        opens = may_start and in_flight < self._most
        self._before = in_flight + opens
        return opens
