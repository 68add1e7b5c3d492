"""Where keys and values are kept while answers grow: shelves of slots, each shelf for one range of lengths.

    shelf  64 tokens   slots 0 1 2 3 4 5 . .     rows that hold up to 64 tokens
    shelf 128 tokens   slots 0 1 . .             a row that outgrows its shelf moves to the next one
    shelf 256 tokens   slots 0 .

The used slots of a shelf are always 0..n-1 when a step runs, so that attention reads a plain slice of memory, cut at
the longest row of *that shelf*: a long straggler does not make the short rows pay for its length, and no slot
reserves the whole context. A moved row is copied once per doubling, like a list that grows.

Shelves keep spare slots for the rows to come. With a budget (`most_tokens`) the spare slots of all shelves are given
back as soon as the slots together would exceed it; the rows themselves are kept within it by the one who admits them.

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

Ints = npt.NDArray[np.int64]

SHORTEST = 64
HOLE = -1
_FIRST_SLOTS = 4


@dataclass(frozen=True)
class CacheLayout:
    """What one token of keys and values looks like, and how long a row may become."""

    layers: int
    kv_heads: int
    head_dim: int
    context_length: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def slot(self, tokens: int) -> int:
        """Tokens of the slot that a row of so many tokens takes."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), self.context_length)


class Bucket:
    """Slots of one length. `owners[slot]` is the row that holds the slot, or HOLE until the next `close_holes`."""

    def __init__(self, length: int, layout: CacheLayout) -> None:
        self.length = length
        self.owners: list[int] = []
        self.holes: list[int] = []
        self._layout = layout
        self._rows: Ints | None = None
        self._hold(self._zeros(0))

    @property
    def rows(self) -> Ints:
        """`owners` as an array, made once for all the steps between two changes."""
        if self._rows is None:
            self._rows = np.asarray(self.owners, dtype=np.int64)
        return self._rows

    @property
    def capacity(self) -> int:
        """Slots in memory."""
        return self.cache.shape[2]

    def take(self, row: int, most_spare: int | None = None) -> int:
        """A slot for `row`: a hole if there is one, else the next slot; at most `most_spare` more come with it."""
        self._rows = None
        if self.holes:
            slot = self.holes.pop()
            self.owners[slot] = row
            return slot
        used = len(self.owners)
        if used == self.capacity:
            spare = max(used, _FIRST_SLOTS) - 1
            self.resize(used + 1 + (spare if most_spare is None else min(spare, most_spare)))
        self.owners.append(row)
        return used

    def cells(self, slots: Ints, positions: Ints) -> Ints:
        """[W * K], the places of these tokens, one for each key head, in a layer's keys seen as rows [S * K * L, D]."""
        heads = self._layout.kv_heads
        cells: Ints = (slots * heads)[:, None] + np.arange(heads)
        return (cells * self.length + positions[:, None]).ravel()

    def resize(self, slots: int) -> None:
        """Hold so many slots, at least those in use."""
        resized = self._zeros(slots)
        resized[:, :, : len(self.owners)] = self.cache[:, :, : len(self.owners)]
        self._hold(resized)

    def free(self, slot: int) -> None:
        self._rows = None
        self.owners[slot] = HOLE
        self.holes.append(slot)

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self._rows = None
        self.owners.clear()
        self.holes.clear()

    def close_holes(self) -> list[tuple[int, int]]:
        """Move the last rows into the holes; returns the moved ``(row, slot)`` pairs."""
        self._rows, moved = None, []
        for hole in sorted(self.holes):
            while self.owners and self.owners[-1] == HOLE:
                self.owners.pop()
            if hole >= len(self.owners):
                break
            self.cache[:, :, hole] = self.cache[:, :, len(self.owners) - 1]
            self.owners[hole] = self.owners.pop()
            moved.append((self.owners[hole], hole))
        while self.owners and self.owners[-1] == HOLE:
            self.owners.pop()
        self.holes.clear()
        return moved

    def _zeros(self, slots: int) -> Tensor:
        layout = self._layout
        shape = (2, layout.layers, slots, layout.kv_heads, self.length, layout.head_dim)
        # Zeros, not empty memory: a masked position still enters the products, and 0 * nan is nan.
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def _hold(self, cache: Tensor) -> None:
        self.cache = cache  # [2, Z, S, K, L, D]: keys, then values
        self.keys = cache[0].unbind(0)  # Z times [S, K, L, D]
        self.values = cache[1].unbind(0)


class LengthBuckets:
    """All shelves and the place of each row.

    Example: the row outgrows its shelf::

        shelves.place(7, tokens=60)     # slot 0 of the shelf for 64 tokens
        shelves.stretch(7, tokens=65)   # copied to slot 0 of the shelf for 128; a hole stays behind
        shelves.close_holes()           # the hole is gone
    """

    def __init__(self, layout: CacheLayout, most_tokens: int | None = None) -> None:
        self._layout = layout
        self._most_tokens = most_tokens
        self._shelves: dict[int, Bucket] = {}
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._placed = False  # since the budget was looked at last

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def place_of(self, row: int) -> tuple[Bucket, int]:
        return self._places[row]

    def used(self) -> list[Bucket]:
        """The shelves that hold rows, shortest first: the order of rows in a step."""
        return [self._shelves[length] for length in sorted(self._shelves) if self._shelves[length].owners]

    def expect(self, tokens: Sequence[int]) -> None:
        """Rows of so many tokens come next: each shelf is made long enough once, and not copied from doubling to
        doubling while they come one by one."""
        for length, rows in Counter(map(self._layout.slot, tokens)).items():
            shelf = self._shelf(length)
            slots = len(shelf.owners) - len(shelf.holes) + rows
            if (more := slots - shelf.capacity) > 0:
                spare = max(0, shelf.capacity - more)
                most_spare = self._most_spare(shelf, more)
                shelf.resize(slots + (spare if most_spare is None else min(spare, most_spare)))

    def place(self, row: int, tokens: int) -> tuple[Bucket, int]:
        """Give `row` a slot that holds `tokens` tokens."""
        shelf = self._shelf(tokens)
        self._placed = True
        self._places[row] = (shelf, shelf.take(row, self._most_spare(shelf)))
        return self._places[row]

    def stretch(self, row: int, tokens: int) -> None:
        """Move `row` to a shelf that holds `tokens` tokens, with what it has cached."""
        shelf, slot = self._places[row]
        longer, place = self.place(row, tokens)
        longer.cache[:, :, place, :, : shelf.length] = shelf.cache[:, :, slot]
        shelf.free(slot)

    def release(self, row: int) -> None:
        shelf, slot = self._places.pop(row)
        shelf.free(slot)
        if not self._places:
            self.clear()  # without rows it is as new: where the next ones stand depends on nothing that was before

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self._places.clear()
        for shelf in self._shelves.values():
            shelf.clear()

    def close_holes(self) -> None:
        """Make the used slots of each shelf its first; then keep the budget."""
        for shelf in self._shelves.values():
            if shelf.holes:
                self._places.update((row, (shelf, slot)) for row, slot in shelf.close_holes())
        if self._placed and self._most_tokens is not None:
            self._give_back(self._most_tokens)
            self._placed = False

    def tokens_used(self) -> int:
        """Tokens of the slots that rows hold."""
        return sum(shelf.length for shelf, _ in self._places.values())

    def tokens_allocated(self) -> int:
        """Tokens that the memory held now could keep."""
        return sum(shelf.length * shelf.capacity for shelf in self._shelves.values())

    def check_integrity(self) -> None:
        """Each slot is a hole or owned by exactly the row that says so.

        Raises:
            BoundViolated: with the slot that contradicts its row.
        """
        for row, (shelf, slot) in self._places.items():
            if slot >= len(shelf.owners) or shelf.owners[slot] != row:
                raise BoundViolated(f"row {row} believes in slot {slot} of shelf {shelf.length}, which is not its own")
        owned = sum(owner != HOLE for shelf in self._shelves.values() for owner in shelf.owners)
        if owned != len(self._places):
            raise BoundViolated(f"{owned} slots are owned, but {len(self._places)} rows have a place")
        for shelf in self._shelves.values():
            if sorted(shelf.holes) != [slot for slot, owner in enumerate(shelf.owners) if owner == HOLE]:
                raise BoundViolated(f"shelf {shelf.length} lost count of its holes")

    def rows(self) -> set[int]:
        """The rows that have a slot."""
        return set(self._places)

    def _give_back(self, most_tokens: int) -> None:
        """Free spare slots, most spare memory first, until the shelves hold no more than this."""

        def spare(shelf: Bucket) -> int:
            return shelf.length * (shelf.capacity - len(shelf.owners))

        for shelf in sorted(self._shelves.values(), key=spare, reverse=True):
            if (excess := self.tokens_allocated() - most_tokens) <= 0:
                return
            shelf.resize(max(len(shelf.owners), shelf.capacity + -excess // shelf.length))

    def _most_spare(self, shelf: Bucket, needed: int = 1) -> int | None:
        """Slots that the budget allows a shelf to take beyond those that are needed."""
        if self._most_tokens is None:
            return None
        return max(0, (self._most_tokens - self.tokens_allocated()) // shelf.length - needed)

    def _shelf(self, tokens: int) -> Bucket:
        length = self._layout.slot(tokens)
        if tokens > length:
            raise BoundViolated(f"{tokens} tokens do not fit the context of {length}")
        if length not in self._shelves:
            self._shelves[length] = Bucket(length, self._layout)
        return self._shelves[length]
