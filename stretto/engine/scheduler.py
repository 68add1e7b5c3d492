"""Which answers run: first come, first served, in a fixed number of rows.

    add      a request's answers join the queue
    admit    answers from the head of the queue get rows
    finish   an answer gives its row back
    interrupt  running answers lose their cache and have to be computed again before they go on
    abort    a request's answers leave, wherever they are

An answer is in exactly one of three places: waiting (no row), pending (a row, tokens still to be computed), running (a
row, computed). `check_integrity` says so, and is run by the tests after every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.core.errors import BoundViolated, RefusedRequest
from stretto.core.records import GenerateRequest


@dataclass(frozen=True)
class Member:
    """One answer that is wanted: member `index` of `request`."""

    request: GenerateRequest
    index: int

    @property
    def tokens(self) -> int:
        """The most that prompt and answer can come to; what is reserved for it."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens


class Scheduler:
    """Two rows for three answers of one request::

    scheduler.add(request)          # waiting 0 1 2
    scheduler.admit()               # [(row 0, member 0), (row 1, member 1)]: pending
    scheduler.take_pending(4096)    # [0, 1]: running
    scheduler.finish(0)             # row 0 is free
    scheduler.admit()               # [(row 0, member 2)]
    """

    def __init__(self, rows: int, cache_tokens: int) -> None:
        self._rows = rows
        self._cache_tokens = cache_tokens
        self._free = list(range(rows - 1, -1, -1))
        self._waiting: deque[Member] = deque()
        self._pending: deque[int] = deque()
        self._running: set[int] = set()
        self._members: dict[int, Member] = {}  # by row
        self._open: dict[str, int] = {}  # answers of a request that have not ended
        self._reserved = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows_in_use(self) -> int:
        return len(self._members)

    @property
    def rows(self) -> list[int]:
        """Those that have an answer."""
        return list(self._members)

    @property
    def idle(self) -> bool:
        return not self._open

    def add(self, request: GenerateRequest) -> None:
        """Queue the answers of a request.

        Raises:
            RefusedRequest: its id is in use, or an answer of it could never fit the cache.
        """
        if request.id in self._open:
            raise RefusedRequest("id", repr(request.id), "an id that no open request has")
        members = [Member(request, index) for index in range(len(request.seeds))]
        if members[0].tokens > self._cache_tokens:
            allowed = f"prompt and max_tokens come to at most engine.cache_tokens = {self._cache_tokens:,}"
            raise RefusedRequest("sampling.max_tokens", f"{members[0].tokens:,} with the prompt", allowed)
        self._open[request.id] = len(members)
        self._waiting.extend(members)

    def admit(self) -> list[tuple[int, Member]]:
        """Give rows to the answers at the head of the queue, as many as there is room for."""
        admitted = []
        while self._free and self._waiting and self._fits(self._waiting[0]):
            member, row = self._waiting.popleft(), self._free.pop()
            self._members[row] = member
            self._reserved += member.tokens
            self._pending.append(row)
            admitted.append((row, member))
        return admitted

    def take_pending(self, costs: Mapping[int, int], most_tokens: int) -> list[int]:
        """Rows that are computed in the coming step, oldest first.

        Args:
            costs: tokens to compute for each pending row.
            most_tokens: stop before the sum exceeds this, but take one row at least.
        """
        taken: list[int] = []
        total = 0
        while self._pending:
            total += costs[self._pending[0]]
            if taken and total > most_tokens:
                break
            taken.append(self._pending.popleft())
        self._running.update(taken)
        return taken

    def finish(self, row: int) -> Member:
        """The answer in `row` has ended; the row is free."""
        self._running.remove(row)
        return self._leave(row)

    def interrupt(self) -> None:
        """All running rows have lost what was computed: they are pending again, before those that never ran."""
        self._pending.extendleft(reversed(self.running))
        self._running.clear()

    def abort(self, request: str) -> list[int]:
        """Forget a request. Returns the rows that it leaves, running or pending; unknown ids are no error."""
        self._waiting = deque(member for member in self._waiting if member.request.id != request)
        rows = [row for row, member in self._members.items() if member.request.id == request]
        self._pending = deque(row for row in self._pending if row not in rows)
        self._running.difference_update(rows)
        for row in rows:
            self._leave(row)
        self._open.pop(request, None)
        return rows

    def is_open(self, request: str) -> bool:
        """Is any answer of it still to end?"""
        return request in self._open

    @property
    def running(self) -> list[int]:
        return sorted(self._running)

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(self._pending)

    def member(self, row: int) -> Member:
        return self._members[row]

    def check_integrity(self) -> None:
        """Every row is free, pending or running, and exactly one of them; every open answer is counted once.

        Raises:
            BoundViolated: with what does not add up.
        """
        rows = sorted([*self._free, *self._pending, *self._running])
        if rows != list(range(self._rows)):
            raise BoundViolated(f"the {self._rows} rows are not each in one place: {rows}")
        if set(self._members) != {*self._pending, *self._running}:
            raise BoundViolated(f"rows {sorted(self._members)} have answers, others are in use")
        if sum(self._open.values()) != len(self._waiting) + len(self._members):
            raise BoundViolated(f"{self._open} are open, {self.waiting} wait and {self.rows_in_use} have rows")
        if self._reserved != sum(member.tokens for member in self._members.values()):
            raise BoundViolated(f"{self._reserved} tokens are reserved for {self.rows_in_use} answers")

    def _fits(self, member: Member) -> bool:
        return self._reserved + member.tokens <= self._cache_tokens

    def _leave(self, row: int) -> Member:
        member = self._members.pop(row)
        self._free.append(row)
        self._reserved -= member.tokens
        self._open[member.request.id] -= 1
        if not self._open[member.request.id]:
            del self._open[member.request.id]
        return member
