"""Pure functions of the pool: chunks of items, and which item to blame for a lost worker.

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

_CHUNK_SECONDS = 0.02  # long against one wake-up of the conductor, short enough to share work among workers
_CHUNK_ITEMS = 64
_CHUNK_CHARACTERS = 64 << 20  # items may carry large tests of programs, and a frame holds at most 1 GiB


class Call:
    """One call of `RewardPool.score`: its items, and the verdicts so far. The future `done` is done when all are
    there."""

    def __init__(self, items: Sequence[ScoreItem]) -> None:
        self.items = items
        self.verdicts: list[Verdict | None] = [None] * len(items)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._missing = len(items)

    def settle(self, index: int, verdict: Verdict) -> None:
        """Store the verdict of the item at `index`, unless it has one already; the last one completes `done`."""
        if self.verdicts[index] is None:
            self.verdicts[index] = verdict
            self._missing -= 1
            if self._missing == 0 and not self.done.done():
                self.done.set_result(None)


@dataclass(frozen=True)
class Chunk:
    """Items of one call, by their indices in `Call.items`, that are sent to a worker together. `losses`: number of
    workers that died while they judged it."""

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
    """Cut a call, which has items, into chunks of about 20 ms of work, at most 64 items and 64 million characters, but
    at least one item. `seconds_per_item` is an estimate; 0 if unknown."""
    size = _CHUNK_ITEMS
    if seconds_per_item > 0:
        size = max(1, int(min(_CHUNK_ITEMS, _CHUNK_SECONDS / seconds_per_item)))
    longest = max(sum(map(len, msgspec.structs.astuple(item))) for item in call.items)
    size = max(1, min(size, _CHUNK_CHARACTERS // max(1, longest)))
    total = len(call.items)
    return [Chunk(call, tuple(range(at, min(at + size, total)))) for at in range(0, total, size)]


@dataclass(frozen=True)
class _Blame:
    """Chunks to handle after the loss of a worker. `culprit`: the item that the worker was judging, alone in its chunk;
    None if it is unknown. `innocent`: the other chunks without verdicts, to score again."""

    culprit: Chunk | None
    innocent: tuple[Chunk, ...] = field(default=())


def blame(outstanding: Sequence[Chunk], judged: int, progress: int) -> _Blame:
    """Find the item that a lost worker was judging, among the chunks that it had not replied to. If it is unknown, each
    item of the oldest chunk is scored again in a chunk of its own. The culprit and these chunks count one more loss.

    Args:
        outstanding: these chunks, in the order in which they were sent.
        judged: number of items of earlier chunks, which the worker had replied to.
        progress: the worker's counter (`wire.JudgingCounter.count`): odd while an item was being judged. 0: unknown.
    """
    at = progress // 2 - judged
    for position, chunk in enumerate(outstanding if progress % 2 and at >= 0 else ()):
        if at < len(chunk.indices):
            culprit = Chunk(chunk.call, (chunk.indices[at],), chunk.losses + 1)
            others = chunk.indices[:at] + chunk.indices[at + 1 :]
            rest = [Chunk(chunk.call, others)] if others else []
            return _Blame(culprit, (*outstanding[:position], *rest, *outstanding[position + 1 :]))
        at -= len(chunk.indices)
    # The worker was between two items, or a reward has overwritten the counter: items alone will show the culprit.
    again = [Chunk(chunk.call, (index,), chunk.losses + 1) for chunk in outstanding[:1] for index in chunk.indices]
    return _Blame(None, (*again, *outstanding[1:]))
