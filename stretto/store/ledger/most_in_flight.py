"""How many groups were in flight when another one was issued, counted apart from the controller that admits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stretto.core.records import State
from stretto.store.ledger.rows import LiveRow

#: The fact with ``[key, most]`` for each stretch: its first group, and the most in flight when one of it was issued.
IN_FLIGHT = "in_flight"


class MostInFlight:
    """One stretch lasts from one change of a bound to the next."""

    def __init__(self, known: Iterable[tuple[int, int]], rows: Iterable[LiveRow]) -> None:
        """`known`: the fact of an earlier process; `rows`: those of trajectories that are not final."""
        self.stretches = list(known)
        self._members = Counter(row.group_key for row in rows if row.state is State.IN_FLIGHT)
        self._begins = not self.stretches

    def changed(self) -> None:
        """A bound has changed for all groups that are issued from now on."""
        self._begins = True

    def issued(self, key: int, members: int) -> bool:
        """A group is in flight; returns whether `stretches` has changed."""
        self._members[key] = members
        groups = len(self._members)
        if self._begins:
            self.stretches.append((key, groups))
            self._begins = False
            return True
        first, most = self.stretches[-1]
        self.stretches[-1] = first, max(most, groups)
        return groups > most

    def moved(self, row: LiveRow, before: State) -> None:
        """A trajectory was in the state `before`, and is in another one."""
        if before is State.IN_FLIGHT:
            self._members[row.group_key] -= 1
            if not self._members[row.group_key]:
                del self._members[row.group_key]
