"""Scheduling: completions run first come, first served, within a fixed number of rows and a budget of cached tokens;
the longest prompt plus completion that the context and the KV cache can hold.

    add            queue the completions of a request
    admit          give free rows to the head of the queue
    grow           let running completions grow; when the cache is full, preempt the newest
    take_pending   start pending rows, oldest first, as far as the cache has capacity
    finish         free the row of a completion
    interrupt      drop the cache of running completions, which become pending again
    limit          change the budget of cached tokens, which other engines share
    abort          remove a request wherever its completions are

A completion is in one of three places: waiting (no row), pending (a row, nothing cached), running (cached). A running
completion holds the slot that its tokens need now. A completion starts beside others only if a part of the cache
(`GROWTH`) stays free for their growth. Running completions are older than pending ones, and those older than waiting
ones (`check_integrity`). So the oldest is preempted only under a lowered limit: then it waits, until its slot fits the
budget again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stretto.core.errors import BoundViolated, RefusedRequest
from stretto.core.records import GenerateRequest
from stretto.engine.config import EngineConfig
from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.hf.inspection import ModelFolder

Ints = npt.NDArray[np.int64]

#: Part of the cache that is kept free for growth when a completion starts. Otherwise a completion would start in the
#: last free slot, and be preempted and recomputed as soon as another completion grows.
GROWTH = 1 / 16


@dataclass(frozen=True)
class Member:
    """One completion of a request: the completion of ``request.seeds[index]``."""

    request: GenerateRequest
    index: int

    @property
    def tokens(self) -> int:
        """Largest possible number of tokens of prompt plus completion."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens


class Scheduler:
    """Decides which completions of an engine run: each needs a row, its place in the batch, and a slot in the KV cache.
    Two rows for three completions of one request::

    scheduler.add(request)                         # waiting 0 1 2
    scheduler.admit()                              # [(row 0, member 0), (row 1, member 1)]: pending
    scheduler.take_pending(costs, 4096, lengths)   # [0, 1]: running
    scheduler.finish(0)                            # row 0 is free
    scheduler.admit()                              # [(row 0, member 2)]

    Args:
        rows: number of completions that may have a row.
        cache_tokens: tokens of all slots together.
        slot: the length of the slot for a number of tokens (`model.decode.length_buckets.CacheLayout.slot`).
    """

    def __init__(self, rows: int, cache_tokens: int, slot: Callable[[int], int]) -> None:
        self._rows = rows
        self._cache_tokens = self._most_tokens = cache_tokens
        self._slot = slot
        self._free = list(range(rows - 1, -1, -1))
        self._waiting: deque[Member] = deque()
        self._pending: deque[int] = deque()  # oldest first
        self._running: set[int] = set()
        self.members: dict[int, Member] = {}  #: unfinished completions by row; only the scheduler changes it
        self._ages: dict[int, int] = {}  # by row, the lower the older
        self._open: dict[str, int] = {}  # completions of a request that have not ended
        self._slots: Ints = np.zeros(rows, np.int64)  # tokens of each running row's slot; 0 where none runs
        self._held = 0
        self._admitted = 0

    @property
    def waiting(self) -> int:
        """Number of completions without a row (a place in the batch)."""
        return len(self._waiting)

    def prompts_waiting(self) -> dict[str, int]:
        """Number of prompt tokens of each request that has completions without a row, by request id."""
        return {member.request.id: len(member.request.prompt_token_ids) for member in self._waiting}

    @property
    def idle(self) -> bool:
        """Whether every completion has ended."""
        return not self._open

    def add(self, request: GenerateRequest) -> None:
        """Queue the completions of a request. Raises RefusedRequest if an open request has its id, or a completion of
        it could never fit the cache."""
        if request.id in self._open:
            raise RefusedRequest("id", repr(request.id), "an id that no open request uses")
        members = [Member(request, index) for index in range(len(request.seeds))]
        if self._slot(members[0].tokens) > self._most_tokens:
            allowed = f"less: the cache holds {self._most_tokens:,} tokens (engine.cache_gib)"
            raise RefusedRequest("sampling.max_tokens", f"{members[0].tokens:,} with the prompt", allowed)
        self._open[request.id] = len(members)
        self._waiting.extend(members)

    def admit(self) -> list[tuple[int, Member]]:
        """Give free rows to the head of the queue, whose completions become pending; returns (row, member) pairs."""
        admitted = []
        while self._free and self._waiting:
            member, row = self._waiting.popleft(), self._free.pop()
            self.members[row], self._ages[row] = member, self._admitted
            self._admitted += 1
            self._pending.append(row)
            admitted.append((row, member))
        return admitted

    def grow(self, lengths: Ints) -> list[int]:
        """Let running rows grow into longer slots. If the cache is full, the newest running rows become pending again;
        returns these preempted rows, newest first. `lengths`: [rows] tokens of each row."""
        grown = np.flatnonzero((lengths > self._slots) & (self._slots > 0))
        for row in grown.tolist():
            self._hold(row, self._slot(int(lengths[row])))
        return self._preempted()

    def limit(self, cache_tokens: int) -> list[int]:
        """Set the budget of cached tokens, at most the initial budget; returns the rows preempted to keep it, newest
        first. Pending rows whose slots are longer than the budget wait until it is raised."""
        self._cache_tokens = min(cache_tokens, self._most_tokens)
        return self._preempted()

    def _preempted(self) -> list[int]:
        """Preempt the newest running rows until the slots fit the budget; returns these rows, which are pending again,
        ahead of the others."""
        preempted: list[int] = []
        while self._held > self._cache_tokens:
            newest = max(self._running, key=self._ages.__getitem__)
            self._running.remove(newest)
            self._hold(newest, 0)
            self._pending.appendleft(newest)
            preempted.append(newest)
        return preempted

    def needed(self, lengths: Ints) -> float:
        """Demand over supply, in rows (of all open completions) or in cached tokens (of those with a row), whichever
        share is larger; above 1 some must wait. A pending row is assumed to need at least as much as a running row on
        average. `lengths`: [rows] tokens of each row."""
        mean = self._held / max(1, len(self._running))
        pending = sum(max(mean, self._slot(int(lengths[row]))) for row in self._pending)
        rows = (len(self.members) + len(self._waiting)) / self._rows
        return max(rows, (self._held + pending) / max(1, self._cache_tokens))

    def has_capacity(self, lengths: Ints) -> bool:
        """Whether the oldest pending row can be computed now; False if none is pending. `lengths`: [rows] tokens of
        each row."""
        return bool(self._pending) and self._fits(self._slot(int(lengths[self._pending[0]])))

    def take_pending(self, costs: Mapping[int, int], most_tokens: int, lengths: Ints) -> list[int]:
        """Make pending rows running, oldest first, as far as they fit this step, and return them.

        Args:
            costs: tokens to compute for each pending row.
            most_tokens: limit on their sum; one row is taken in any case.
            lengths: [rows] tokens of each row; only rows whose slots fit the cache are taken.
        """
        taken: list[int] = []
        total = 0
        while self._pending:
            row = self._pending[0]
            slot, total = self._slot(int(lengths[row])), total + costs[row]
            if (taken and total > most_tokens) or not self._fits(slot):
                break
            taken.append(self._pending.popleft())
            self._running.add(row)
            self._hold(row, slot)
        return taken

    def finish(self, row: int) -> Member:
        """Free the row of an ended completion (running, or pending with an ended prefix); returns the completion."""
        if row in self._running:
            self._running.remove(row)
        else:
            self._pending.remove(row)
        return self._leave(row)

    def interrupt(self) -> None:
        """Make all running rows pending again, oldest first and before rows that never ran; their slots are free."""
        self._pending.extendleft(sorted(self._running, key=self._ages.__getitem__, reverse=True))
        self._running.clear()
        self._slots[:] = 0
        self._held = 0

    def abort(self, request: str) -> list[int]:
        """Drop the request with this id; returns the rows that its unfinished completions had. Unknown ids are
        ignored."""
        self._waiting = deque(member for member in self._waiting if member.request.id != request)
        rows = [row for row, member in self.members.items() if member.request.id == request]
        self._pending = deque(row for row in self._pending if row not in rows)
        self._running.difference_update(rows)
        for row in rows:
            self._leave(row)
        self._open.pop(request, None)
        return rows

    def is_open(self, request: str) -> bool:
        """Whether a completion of this request is unfinished."""
        return request in self._open

    @property
    def running(self) -> list[int]:
        """Rows of running completions, ascending."""
        return sorted(self._running)

    @property
    def pending(self) -> tuple[int, ...]:
        """Rows of pending completions, oldest first."""
        return tuple(self._pending)

    def check_integrity(self) -> None:
        """Check that every row is exactly one of free, pending and running, that every open completion is counted once,
        that the cache holds exactly the running rows, within its limit, and that no pending row is older than a running
        one. Raises BoundViolated, which names the contradiction, otherwise."""
        rows = sorted([*self._free, *self._pending, *self._running])
        if rows != list(range(self._rows)):
            raise BoundViolated(f"the {self._rows} rows are not each in one place: {rows}")
        if set(self.members) != {*self._pending, *self._running}:
            raise BoundViolated(f"rows {sorted(self.members)} have completions, others are in use")
        if sum(self._open.values()) != len(self._waiting) + len(self.members):
            raise BoundViolated(f"{self._open} are open, {self.waiting} wait and {len(self.members)} have rows")
        if set(np.flatnonzero(self._slots).tolist()) != self._running or self._held != self._slots.sum():
            raise BoundViolated(f"{self._held} tokens are held in the slots {self._slots} by rows {self.running}")
        if self._held > self._cache_tokens:
            raise BoundViolated(f"{self._held} tokens are held in a cache for {self._cache_tokens}")
        ages = [self._ages[row] for row in (*sorted(self._running, key=self._ages.__getitem__), *self._pending)]
        if ages != sorted(ages):
            raise BoundViolated(f"rows {self.running} run before older ones: pending are {self.pending}")

    def _fits(self, slot: int) -> bool:
        """Whether a completion may start in a slot of this many tokens: beside running ones, the part `GROWTH` of the
        budget must stay free."""
        growth = int(GROWTH * self._cache_tokens) if self._running else 0
        return self._held + slot + growth <= self._cache_tokens

    def _hold(self, row: int, slot: int) -> None:
        """Replace the slot of a row by one of this many tokens; 0: by none."""
        self._held += slot - int(self._slots[row])
        self._slots[row] = slot

    def _leave(self, row: int) -> Member:
        """Take a completion out of its row; returns the completion."""
        member = self.members.pop(row)
        del self._ages[row]
        self._free.append(row)
        self._hold(row, 0)
        self._open[member.request.id] -= 1
        if not self._open[member.request.id]:
            del self._open[member.request.id]
        return member


def longest_row(layout: CacheLayout, cache_bytes: int) -> int:
    """Largest number of tokens (prompt plus completion) of one row in a cache of `cache_bytes`, at most the context
    length; 0 if not even the shortest slot fits.

    A row takes a whole slot, whose length is a power of two or the context length.

    Example: memory for 700 tokens and a context of 4,096: a row may have 512, since the next slot has 1,024.
    """
    held, context = cache_bytes // layout.bytes_per_token, layout.context_length
    slots = (context, *(1 << power for power in range(context.bit_length())))
    return max((tokens for tokens in slots if layout.slot(tokens) <= held), default=0)


def longest_row_of(folder: ModelFolder, config: EngineConfig) -> int:
    """Largest number of tokens (prompt plus completion) of one row in the recipe's KV cache, for a model folder that is
    not loaded; at most the context length, 0 if not even the shortest slot fits."""
    layout = CacheLayout(
        layers=folder.layers,
        kv_heads=folder.kv_heads,
        head_dim=folder.head_dim,
        context_length=folder.context_length,
        dtype=getattr(torch, config.dtype),
        device=torch.device("cpu"),  # bytes per token are the same on any device
    )
    return longest_row(layout, config.cache_bytes)
