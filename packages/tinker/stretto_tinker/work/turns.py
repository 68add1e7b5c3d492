"""Whose turn it is: the client for whom the least has been computed goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

#: A turn of sampling ends after so many seconds, or so many tokens; one of training after a micro-batch.
TURN_SECONDS, TURN_TOKENS = 0.05, 4096
Lane = TypeVar("Lane", bound=Hashable)


class Backlog:
    """Requests of each client that wait or are computed, and their bytes on disk."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[str, int]] = {}
        self._requests, self._bytes = Counter[str](), Counter[str]()

    def add(self, id: str, owner: str, size: int) -> None:
        """A request of a client waits."""
        if id not in self._sizes:
            self._sizes[id] = owner, size
            self._requests[owner] += 1
            self._bytes[owner] += size

    def done(self, id: str) -> None:
        """It does not wait any more."""
        owner, size = self._sizes.pop(id, ("", 0))
        self._requests[owner] -= 1
        self._bytes[owner] -= size
        if self._requests[owner] <= 0:
            del self._requests[owner], self._bytes[owner]

    def of(self, owner: str) -> tuple[int, int]:
        """Requests and bytes of a client."""
        return self._requests[owner], self._bytes[owner]


class Turns:
    """Seconds of computation of each client, and the choice that they make.

    A client that comes anew, or again, begins with the least that any busy client has, or had when there was one: it is
    not owed the time in which it asked for nothing, nor does one who comes first have to wait for all that others get.

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
        self._least = 0.0  # that a busy client has, or had; it never falls
        self._last: dict[Hashable, int] = {}  # when each lane had its last turn
        self._turn = 0

    def choose(self, lanes: Mapping[Lane, Collection[str]]) -> Lane:
        """The lane that is next, of those with work; each has the clients it works for."""
        owners = frozenset(owner for clients in lanes.values() for owner in clients)
        self._least = max(self._least, min((self._spent[owner] for owner in owners & self._busy), default=0.0))
        for owner in owners - self._busy:
            self._spent[owner] = max(self._spent.get(owner, 0.0), self._least)
        self._busy = owners
        self._spent = {one: spent for one, spent in self._spent.items() if one in owners or spent > self._least}
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
