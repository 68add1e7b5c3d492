"""The highest number of groups in flight. The ledger counts it independently of the controller, as evidence for the
check of the run's bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stretto.core.records import State
from stretto.store.ledger.rows import LiveRow
from stretto.store.ledger.seals import find_fact

#: Name of the fact: a list with ``[key, most]`` for each stretch between two changes of a bound. `key`: of the first
#: group in it. `most`: highest number of groups in flight when one of its groups was issued.
IN_FLIGHT = "in_flight"


class MostInFlight:
    """Counts groups in flight; keeps the highest number for each stretch between two changes of a bound."""

    def __init__(self, facts: Iterable[tuple[str, str, object]], path: Path, rows: Iterable[LiveRow]) -> None:
        """Continue the count of an existing ledger. `facts`: rows of its table ``meta``; `path`: of the ledger, for
        messages; `rows`: its trajectories that are in flight or buffered."""
        self._stretches = find_fact(facts, path, IN_FLIGHT, list[tuple[int, int]]) or []
        self._members = Counter(row.group_key for row in rows if row.state is State.IN_FLIGHT)
        self._begins = not self._stretches

    def changed(self) -> None:
        """Begin a new stretch with the next group: a bound has changed."""
        self._begins = True

    def issued(self, key: int, members: int) -> dict[str, str]:
        """Count one more group in flight. Returns ``{IN_FLIGHT: JSON of the fact}`` if the fact has changed, else an
        empty dict. `key`: of the group."""
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
        """Note that the trajectory of `row` has left the state `before`. A group is no longer in flight once all its
        members have left that state."""
        if before is State.IN_FLIGHT:
            self._members[row.group_key] -= 1
            if not self._members[row.group_key]:
                del self._members[row.group_key]
