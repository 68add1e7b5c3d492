"""Highest number of groups in flight, counted independently of the controller that admits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stretto.core.records import State
from stretto.store.ledger.rows import LiveRow
from stretto.store.ledger.seals import find_fact

#: The fact with ``[key, most]`` for each stretch: its first group, and the most in flight when one of it was issued.
IN_FLIGHT = "in_flight"


class MostInFlight:
    """Counts groups in flight; keeps the highest number for each stretch between two changes of a bound."""

    def __init__(self, facts: Iterable[tuple[str, str, object]], path: Path, rows: Iterable[LiveRow]) -> None:
        """`facts`: rows of the table ``meta`` of the ledger at `path`; `rows`: rows of unfinished trajectories."""
        self._stretches = find_fact(facts, path, IN_FLIGHT, list[tuple[int, int]]) or []
        self._members = Counter(row.group_key for row in rows if row.state is State.IN_FLIGHT)
        self._begins = not self._stretches

    def changed(self) -> None:
        """Begin a new stretch: a bound has changed for all groups issued from now on."""
        self._begins = True

    def issued(self, key: int, members: int) -> dict[str, str]:
        """Count one more group in flight; returns the changed fact as JSON by its name, empty if unchanged."""
        self._members[key] = members
        if self._begins:
            self._stretches.append((key, 0))
            self._begins = False
        first, most = self._stretches[-1]
        if len(self._members) <= most:
            return {}
        self._stretches[-1] = first, len(self._members)
        return {IN_FLIGHT: msgspec.json.encode(self._stretches).decode()}

    def moved(self, row: LiveRow, before: State) -> None:
        """Note that a trajectory has left the state `before`."""
        if before is State.IN_FLIGHT:
            self._members[row.group_key] -= 1
            if not self._members[row.group_key]:
                del self._members[row.group_key]
