"""The KV cache of an engine: buckets of slots, each bucket for one range of lengths.

    bucket  64 tokens   slots 0 1 2 3 4 5 . .     rows of up to 64 tokens
    bucket 128 tokens   slots 0 1 . .             a row that outgrows its bucket moves to the next
    bucket 256 tokens   slots 0 .

In a step the used slots of a bucket are 0..n-1, so attention reads a contiguous slice of memory, up to the longest row
of this bucket. A long row does not slow short rows down, and no slot reserves the whole context. A row is copied each
time that its length doubles, like a growing list.

Buckets keep spare slots for new rows. With a budget (`most_tokens`), spare slots are freed when all slots together
exceed it. The scheduler ensures that the rows themselves fit the budget.

Axes: Z layers, S slots, K key/value heads, L tokens of a slot, D width of a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.errors import BoundViolated
from stretto_kernels.large_pages import zeros

Ints = npt.NDArray[np.int64]

SHORTEST = 64
FREE = -1
_FIRST_SLOTS = 4


@dataclass(frozen=True)
class CacheLayout:
    """Shape, dtype and device of the KV entries of one token, and the context length, which limits rows."""

    layers: int
    kv_heads: int
    head_dim: int
    context_length: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the KV entries of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def slot(self, tokens: int) -> int:
        """Length of the slot for a row of `tokens` tokens: a power of two from 64 on, at most the context length."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), self.context_length)

    @property
    def lengths(self) -> int:
        """Number of different slot lengths."""
        return len({self.slot(1 << power) for power in range(self.context_length.bit_length() + 1)})


class Bucket:
    """KV cache slots of one length. `owners[slot]` is the row that uses the slot, or FREE. A free slot is given to a
    new row by `take`, or removed by `compact`."""

    def __init__(self, length: int, layout: CacheLayout) -> None:
        self.length = length
        self.owners: list[int] = []
        self.free_slots: list[int] = []
        self._layout = layout
        self._rows: Ints | None = None
        self._addresses: list[int] = []
        self.keys = [self._zeros(0) for _ in range(layout.layers)]  # Z times [S, K, L, D]
        self.values = [self._zeros(0) for _ in range(layout.layers)]

    @property
    def rows(self) -> Ints:
        """`owners` as an array, cached until they change."""
        if self._rows is None:
            self._rows = np.asarray(self.owners, dtype=np.int64)
        return self._rows

    @property
    def addresses(self) -> list[int]:
        """Memory addresses of the keys and the values of layer 0, of layer 1, and so on, until the next `resize`. The
        same list object until then."""
        if not self._addresses:
            self._addresses = [held.data_ptr() for layer in zip(self.keys, self.values, strict=True) for held in layer]
        return self._addresses

    @property
    def capacity(self) -> int:
        """Number of allocated slots."""
        return len(self.keys[0])

    def take(self, row: int, most_spare: int | None = None) -> int:
        """Assign a slot to `row`, a free one or else the next, and return its number. If memory must be allocated, the
        number of slots is doubled, but at most `most_spare` of the new slots are spare; None: no limit."""
        self._rows = None
        if self.free_slots:
            slot = self.free_slots.pop()
            self.owners[slot] = row
            return slot
        used = len(self.owners)
        if used == self.capacity:
            spare = max(used, _FIRST_SLOTS) - 1
            self.resize(used + 1 + (spare if most_spare is None else min(spare, most_spare)))
        self.owners.append(row)
        return used

    def cells(self, slots: Ints, positions: Ints) -> Ints:
        """Return the indices [W * K] of tokens, for each key head, in a layer's keys viewed as [S * K * L, D]. `slots`,
        `positions`: [W], slot of each token and its position there."""
        heads = self._layout.kv_heads
        cells: Ints = (slots * heads)[:, None] + np.arange(heads)
        return (cells * self.length + positions[:, None]).ravel()

    def resize(self, slots: int) -> None:
        """Reallocate memory for this number of slots, at least the used ones, whose entries are copied. Only one
        layer's keys or values exist twice at a time."""
        used, self._addresses = len(self.owners), []
        for held in (self.keys, self.values):
            for layer in range(len(held)):
                resized = self._zeros(slots)
                resized[:used] = held[layer][:used]
                held[layer] = resized
                del resized

    def copy_slot(self, slot: int, target: Bucket, place: int) -> None:
        """Copy the entries of a slot to slot `place` of the bucket `target`, whose slots are at least as long."""
        both = (*zip(self.keys, target.keys, strict=True), *zip(self.values, target.values, strict=True))
        sources, targets = zip(*((own[slot], other[place, :, : self.length]) for own, other in both), strict=True)
        torch._foreach_copy_(targets, sources)

    def free(self, slot: int) -> None:
        """Make a used slot free; its entries stay until another row gets the slot."""
        self._rows = None
        self.owners[slot] = FREE
        self.free_slots.append(slot)

    def clear(self) -> None:
        """Drop all rows; the memory stays allocated."""
        self._rows = None
        self.owners.clear()
        self.free_slots.clear()

    def compact(self) -> list[tuple[int, int]]:
        """Copy the last rows' entries into free slots, so that used slots are 0..n-1; returns (row, new slot) of moved
        rows."""
        self._rows, moved = None, []
        for slot in sorted(self.free_slots):
            while self.owners and self.owners[-1] == FREE:
                self.owners.pop()
            if slot >= len(self.owners):
                break
            self.copy_slot(len(self.owners) - 1, self, slot)
            self.owners[slot] = self.owners.pop()
            moved.append((self.owners[slot], slot))
        while self.owners and self.owners[-1] == FREE:
            self.owners.pop()
        self.free_slots.clear()
        return moved

    def _zeros(self, slots: int) -> Tensor:
        layout = self._layout
        shape = (slots, layout.kv_heads, self.length, layout.head_dim)
        # Zeros, not empty memory: a masked position still enters the products, and 0 * nan is nan.
        return zeros(shape, layout.dtype, layout.device)


class LengthBuckets:
    """All buckets, and the bucket and slot of each row, which is a number of the caller. `most_tokens`: budget of all
    allocated slots together, in tokens; None: no limit. A row longer than the context raises BoundViolated.

    Example: the row outgrows its bucket::

        buckets.place(7, tokens=60)     # slot 0 of the bucket for 64 tokens
        buckets.move(7, tokens=65)      # copied to slot 0 of the bucket for 128; its old slot is free
        buckets.compact()               # the last row of the first bucket takes the free slot
    """

    def __init__(self, layout: CacheLayout, most_tokens: int | None = None) -> None:
        self._layout = layout
        self._most_tokens = most_tokens
        self._buckets: dict[int, Bucket] = {}
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._placed = False  # whether a slot was taken since the last check of the budget

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def place_of(self, row: int) -> tuple[Bucket, int]:
        return self._places[row]

    def used(self) -> list[Bucket]:
        """Buckets that hold rows, shortest slots first. The rows of a step are in this order."""
        return [self._buckets[length] for length in sorted(self._buckets) if self._buckets[length].owners]

    def expect(self, tokens: Sequence[int]) -> None:
        """Allocate slots for new rows with these numbers of tokens, so that each bucket grows once instead of by
        doublings. `place` assigns the slots."""
        for length, rows in Counter(map(self._layout.slot, tokens)).items():
            bucket = self._bucket(length)
            slots = len(bucket.owners) - len(bucket.free_slots) + rows
            if (more := slots - bucket.capacity) > 0:
                spare = max(0, bucket.capacity - more)
                most_spare = self._most_spare(bucket, more)
                bucket.resize(slots + (spare if most_spare is None else min(spare, most_spare)))

    def place(self, row: int, tokens: int) -> tuple[Bucket, int]:
        """Assign a slot for `tokens` tokens to `row`, which is new or about to be moved; returns (bucket, slot)."""
        bucket = self._bucket(tokens)
        self._placed = True
        self._places[row] = (bucket, bucket.take(row, self._most_spare(bucket)))
        return self._places[row]

    def move(self, row: int, tokens: int) -> None:
        """Move `row`, with its cached entries, to a bucket of longer slots, for `tokens` tokens, and free its old
        slot."""
        bucket, slot = self._places[row]
        longer, place = self.place(row, tokens)
        bucket.copy_slot(slot, longer, place)
        bucket.free(slot)

    def release(self, row: int) -> None:
        """Free the slot of a row, which must have one. After the last row all buckets forget their slots, so that the
        places of later rows do not depend on earlier ones; the memory stays allocated."""
        bucket, slot = self._places.pop(row)
        bucket.free(slot)
        if not self._places:
            self.clear()

    def clear(self) -> None:
        """Drop all rows; the memory stays allocated."""
        self._places.clear()
        for bucket in self._buckets.values():
            bucket.clear()

    def resize_rows(self, lengths: Ints, entering: Sequence[int]) -> list[Bucket]:
        """Prepare the slots of a step and compact the buckets; returns those that hold rows, in the order of `used`.

        Args:
            lengths: [rows] tokens of each row, indexed by row; rows longer than their slot are moved to longer slots.
            entering: new rows, which get a slot.
        """
        outgrown = [
            row
            for bucket in self.used()
            for row in bucket.rows[(bucket.rows != FREE) & (lengths[bucket.rows] > bucket.length)].tolist()
        ]
        if outgrown or entering:
            self.expect(lengths[outgrown + list(entering)].tolist())
        for row in outgrown:
            self.move(row, int(lengths[row]))
        for row in entering:
            self.place(row, int(lengths[row]))
        self.compact()
        return self.used()

    def compact(self) -> None:
        """Make the used slots of each bucket contiguous. Then free spare slots beyond the memory limit, if there is one
        and rows were placed since the last time."""
        for bucket in self._buckets.values():
            if bucket.free_slots:
                self._places.update((row, (bucket, slot)) for row, slot in bucket.compact())
        if self._placed and self._most_tokens is not None:
            self._give_back(self._most_tokens)
            self._placed = False

    def limit(self, most_tokens: int) -> None:
        """Set the budget to `most_tokens`, and free spare slots beyond it. The rows must fit the budget."""
        self._most_tokens, self._placed = most_tokens, True
        self.compact()

    def tokens_allocated(self) -> int:
        """Total length of all allocated slots."""
        return sum(bucket.length * bucket.capacity for bucket in self._buckets.values())

    def check_integrity(self) -> None:
        """Check that each slot is free or owned by exactly one row. Raises BoundViolated if it is not; names the slot
        and the row, or the numbers that differ."""
        for row, (bucket, slot) in self._places.items():
            if slot >= len(bucket.owners) or bucket.owners[slot] != row:
                raise BoundViolated(f"row {row} has slot {slot} of bucket {bucket.length}, which it does not own")
        owned = sum(owner != FREE for bucket in self._buckets.values() for owner in bucket.owners)
        if owned != len(self._places):
            raise BoundViolated(f"{owned} slots are owned, but {len(self._places)} rows have a place")
        for bucket in self._buckets.values():
            if sorted(bucket.free_slots) != [slot for slot, owner in enumerate(bucket.owners) if owner == FREE]:
                raise BoundViolated(f"bucket {bucket.length} lost count of its free slots")

    def rows(self) -> set[int]:
        """Rows that have a slot."""
        return set(self._places)

    def _give_back(self, most_tokens: int) -> None:
        """Free spare slots, from the bucket with the most spare memory first, until at most `most_tokens` are
        allocated."""

        def spare(bucket: Bucket) -> int:
            return bucket.length * (bucket.capacity - len(bucket.owners))

        for bucket in sorted(self._buckets.values(), key=spare, reverse=True):
            if (excess := self.tokens_allocated() - most_tokens) <= 0:
                return
            bucket.resize(max(len(bucket.owners), bucket.capacity + -excess // bucket.length))

    def _most_spare(self, bucket: Bucket, needed: int = 1) -> int | None:
        """Return the number of spare slots, in addition to `needed` slots, that the budget allows a bucket to add;
        None: no limit."""
        if self._most_tokens is None:
            return None
        return max(0, (self._most_tokens - self.tokens_allocated()) // bucket.length - needed)

    def _bucket(self, tokens: int) -> Bucket:
        """Return the bucket for rows of `tokens` tokens, created empty if there is none. Raises BoundViolated if they
        are more than the context."""
        length = self._layout.slot(tokens)
        if tokens > length:
            raise BoundViolated(f"{tokens} tokens do not fit the context of {length}")
        if length not in self._buckets:
            self._buckets[length] = Bucket(length, self._layout)
        return self._buckets[length]
