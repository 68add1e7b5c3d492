"""Whose turn it is: the client for whom the least has been computed goes first."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

Lane = TypeVar("Lane", bound=Hashable)


class Turns:
    """Seconds of computation of each client, and the choice that they make.

    A client that comes anew, or again, begins with the least that any busy client has: it is not owed the time in which
    it asked for nothing.

    >>> turns = Turns()
    >>> turns.choose({"model-1": ["ann"], "model-2": ["bob"]})
    'model-1'
    >>> turns.spent(["ann"], 2.0)
    >>> turns.choose({"model-1": ["ann"], "model-2": ["bob"]})
    'model-2'
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._busy: frozenset[str] = frozenset()
        self._last: dict[Hashable, int] = {}  # when each lane had its last turn
        self._turn = 0

    def choose(self, lanes: Mapping[Lane, Collection[str]]) -> Lane:
        """The lane that is next, of those with work; each has the clients it works for."""
        owners = frozenset(owner for clients in lanes.values() for owner in clients)
        least = min((self._spent[owner] for owner in owners & self._busy), default=0.0)
        for owner in owners - self._busy:
            self._spent[owner] = max(self._spent.get(owner, 0.0), least)
        self._busy = owners
        chosen = min(
            lanes, key=lambda lane: (min(self._spent[owner] for owner in lanes[lane]), self._last.get(lane, -1))
        )
        self._turn += 1
        self._last = {lane: turn for lane, turn in self._last.items() if lane in lanes} | {chosen: self._turn}
        return chosen

    def spent(self, owners: Collection[str], seconds: float) -> None:
        """A turn for these clients took so long; each bears an equal part."""
        for owner in owners:
            self._spent[owner] = self._spent.get(owner, 0.0) + seconds / len(owners)
