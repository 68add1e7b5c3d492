"""Fair sharing of computation: the next turn goes to the client with the fewest seconds of computation so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

#: A turn of sampling ends after this many seconds or tokens; a turn of training after one micro-batch.
TURN_SECONDS, TURN_TOKENS = 0.05, 4096
Lane = TypeVar("Lane", bound=Hashable)


class Backlog:
    """Number of each client's unsettled requests, and size of their bodies in bytes."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[str, int]] = {}
        self._requests, self._bytes = Counter[str](), Counter[str]()

    def add(self, id: str, owner: str, size: int) -> None:
        """Count a request; one that is counted already is ignored."""
        if id not in self._sizes:
            self._sizes[id] = owner, size
            self._requests[owner] += 1
            self._bytes[owner] += size

    def done(self, id: str) -> None:
        """Stop counting a request; an unknown id is ignored."""
        owner, size = self._sizes.pop(id, ("", 0))
        self._requests[owner] -= 1
        self._bytes[owner] -= size
        if self._requests[owner] <= 0:
            del self._requests[owner], self._bytes[owner]

    def of(self, owner: str) -> tuple[int, int]:
        """Number of a client's unsettled requests, and the bytes of their bodies."""
        return self._requests[owner], self._bytes[owner]


class Turns:
    """Counts each client's seconds of computation, and chooses the lane whose client has the fewest.

    A client without work gains no claim to later turns: when it becomes busy, its count is raised to the lowest count
    of the busy clients. If no client is busy, the last such value counts.

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
        self._least = 0.0  # lowest count of a busy client so far; it never falls
        self._last: dict[Hashable, int] = {}  # number of each lane's last turn
        self._turn = 0

    def choose(self, lanes: Mapping[Lane, Collection[str]], held: Collection[Hashable] = ()) -> Lane:
        """Choose the lane for the next turn: that of the client with the fewest seconds, and among equals the lane
        whose last turn is longest ago. A client that had no work begins with at least the seconds of the lowest that
        had.

        Args:
            lanes: lanes with work, each with the clients that it works for.
            held: lanes that are not chosen now, not all of `lanes`; their clients count as clients with work.
        """
        owners = frozenset(owner for clients in lanes.values() for owner in clients)
        self._least = max(self._least, min((self._spent[owner] for owner in owners & self._busy), default=0.0))
        for owner in owners - self._busy:
            self._spent[owner] = max(self._spent.get(owner, 0.0), self._least)
        self._busy = owners
        self._spent = {one: spent for one, spent in self._spent.items() if one in owners or spent > self._least}
        chosen = min(
            (lane for lane in lanes if lane not in held),
            key=lambda lane: (min(self._spent[owner] for owner in lanes[lane]), self._last.get(lane, -1)),
        )
        self._turn += 1
        self._last = {lane: turn for lane, turn in self._last.items() if lane in lanes} | {chosen: self._turn}
        return chosen

    def spent(self, owners: Collection[str], seconds: float) -> None:
        """Count the seconds of a turn, in equal parts for the clients that it worked for, however often each is listed.
        If parts were by requests, a client with few of the many requests in a shared lane would pay next to nothing,
        keep the lane first in the order, and so make the clients of other lanes wait for all requests of this lane."""
        clients = frozenset(owners)
        for owner in clients:
            self._spent[owner] = self._spent.get(owner, 0.0) + seconds / len(clients)
