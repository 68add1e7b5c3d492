"""The pure part of the pool: chunks, blame for a lost worker, and what is scored again.

Call ──cut──► Chunk, Chunk ──► worker ──► verdicts back into the Call
                ▲                │
                └─ scored again ◄┘ the worker was lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from stretto.core.records import Verdict
from stretto.rewards.service.wire import ScoreItem

_CHUNK_SECONDS = 0.02  # work worth one wake-up of the conductor, little enough to be shared among workers
_CHUNK_ITEMS = 64
_CHUNK_CHARACTERS = 64 << 20  # the tests of a program go with each of its completions, and a frame holds 1 GiB


class Call:
    """One call of `RewardPool.score`: its items, and the verdicts so far."""

    def __init__(self, items: Sequence[ScoreItem]) -> None:
        self.items = items
        self.verdicts: list[Verdict | None] = [None] * len(items)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._missing = len(items)

    def settle(self, index: int, verdict: Verdict) -> None:
        if self.verdicts[index] is None:
            self.verdicts[index] = verdict
            self._missing -= 1
            if self._missing == 0 and not self.done.done():
                self.done.set_result(None)


@dataclass(frozen=True)
class Chunk:
    """Items of one call that go to a worker together; `losses` workers were lost over it before."""

    call: Call
    indices: tuple[int, ...]
    losses: int = 0

    @property
    def items(self) -> tuple[ScoreItem, ...]:
        return tuple([self.call.items[index] for index in self.indices])

    def settle(self, verdicts: Sequence[Verdict]) -> None:
        for index, verdict in zip(self.indices, verdicts, strict=True):
            self.call.settle(index, verdict)


def chunks(call: Call, seconds_per_item: float) -> list[Chunk]:
    """Cut a call into chunks of about 20 ms of work: a quick group travels whole, slow or large items one by one."""
    size = _CHUNK_ITEMS
    if seconds_per_item > 0:
        size = max(1, int(min(_CHUNK_ITEMS, _CHUNK_SECONDS / seconds_per_item)))
    longest = max(sum(map(len, msgspec.structs.astuple(item))) for item in call.items)
    size = max(1, min(size, _CHUNK_CHARACTERS // max(1, longest)))
    total = len(call.items)
    return [Chunk(call, tuple(range(at, min(at + size, total)))) for at in range(0, total, size)]


@dataclass(frozen=True)
class Blame:
    """Result of a lost worker: the item in progress (alone in its chunk), and the innocent others."""

    culprit: Chunk | None
    innocent: tuple[Chunk, ...] = field(default=())


def blame(outstanding: Sequence[Chunk], judged: int, progress: int) -> Blame:
    """Split the chunks that a lost worker still owed.

    Args:
        outstanding: in the order in which they were sent.
        judged: items of earlier chunks that the worker had replied to.
        progress: the worker's counter (`wire.JudgingCounter`): odd while an item was being judged.
    """
    at = progress // 2 - judged
    for position, chunk in enumerate(outstanding if progress % 2 and at >= 0 else ()):
        if at < len(chunk.indices):
            culprit = Chunk(chunk.call, (chunk.indices[at],), chunk.losses + 1)
            others = chunk.indices[:at] + chunk.indices[at + 1 :]
            rest = [Chunk(chunk.call, others)] if others else []
            return Blame(culprit, (*outstanding[:position], *rest, *outstanding[position + 1 :]))
        at -= len(chunk.indices)
    # The worker was between two items, or a reward has written over the counter: each is judged alone to find out.
    again = [Chunk(chunk.call, (index,), chunk.losses + 1) for chunk in outstanding[:1] for index in chunk.indices]
    return Blame(None, (*again, *outstanding[1:]))
