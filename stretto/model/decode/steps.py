"""One step of the cached path: what is known of it before anything runs, and how its rows write and read the cache.

    places     0 1 2 3 | 4 5 | 6          the rows of a step, in the order of their newest tokens
    shelves    64        128   256        a place is a slot of a shelf: `ByBucket` goes from shelf to shelf

Axes: T packed token, W written token, R row, K key/value heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.model.attention_support import Rule
from stretto.model.decode.length_buckets import Bucket, CacheLayout
from stretto.model.decode.reading import Reading, reading
from stretto.model.layout import Packing

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstTokens:
    """The packed tokens whose keys and values are the first of the row at a place."""

    place: int
    sources: Ints


@dataclass(frozen=True)
class DecodeStep:
    """What is computed: the packed tokens, contexts first and then the newest of every row."""

    token_ids: Ints  # [T]
    positions: Ints  # [T], each in its row
    contexts: Packing | None  # None in a step that brings no context, which is most steps
    shelves: tuple[Bucket, ...]  # their slots are the places, one shelf after the other
    begun: tuple[FirstTokens, ...]  # rows whose context enters the cache

    @property
    def rows(self) -> int:
        return sum(len(shelf.owners) for shelf in self.shelves)

    @property
    def start(self) -> int:
        """The first of the newest tokens."""
        return len(self.token_ids) - self.rows

    @property
    def newest(self) -> Ints:
        """[R], the position of each row's newest token."""
        return self.positions[self.start :]


class StepRows(Protocol):
    """Rows of a step, in all layers."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        """Write what the step adds to these rows, then read: what their newest tokens take, [rows, H, D]."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """What the attention function needs to know, made once per step and shared by all layers."""

    contexts: Packing | None
    rows: tuple[StepRows, ...]  # all rows, in the order of their places


#: The model's forward: token ids [T], positions [T], rows and plan to the logits of the last tokens, [rows, V].
Call = Callable[[Tensor, Tensor, int, StepPlan], Tensor]


class Steps(Protocol):
    """How steps are run on a device."""

    def logits(self, step: DecodeStep, call: Call) -> Tensor:
        """[R, V], the logits after each row's newest token; the caller may keep them."""
        ...


@dataclass(frozen=True)
class BucketStep:
    """The rows of one shelf: what is written to it, and how its rows read."""

    shelf: Bucket
    start: int
    stop: int
    sources: Tensor | slice  # [W] packed tokens whose keys and values are written
    cells: Tensor  # [W * K] where they are written, for each key head
    reading: Reading

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        keys, values = self.shelf.keys[layer], self.shelf.values[layer]
        for cache, new_TKD in ((keys, k_TKD), (values, v_TKD)):
            # As rows of the whole cache: writing them by slot and position takes twice as long.
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.cells, self._written(new_TKD))
        return self.reading.attend(q_THD[self.start : self.stop], keys, values, rule)

    def _written(self, new_TKD: Tensor) -> Tensor:
        """[W * K, D]"""
        if isinstance(self.sources, slice):
            return new_TKD[self.sources].flatten(0, 1)
        return new_TKD.index_select(0, self.sources).flatten(0, 1)


@dataclass(frozen=True)
class ByBucket:
    """Steps that write and read one shelf after the other, with any kind of reading (`model.decode.reading`)."""

    layout: CacheLayout
    windows: frozenset[int | None]

    def logits(self, step: DecodeStep, call: Call) -> Tensor:
        plan = StepPlan(step.contexts, tuple(self._shelf_steps(step)))
        return call(self._tensor(step.token_ids), self._tensor(step.positions), step.rows, plan)

    def _shelf_steps(self, step: DecodeStep) -> Iterator[BucketStep]:
        first = 0
        for shelf in step.shelves:
            end = first + len(shelf.owners)
            begun = [(row.place - first, row.sources) for row in step.begun if first <= row.place < end]
            yield self._shelf_step(shelf, step.start + first, step.newest[first:end], begun)
            first = end

    def _shelf_step(self, shelf: Bucket, start: int, newest: Ints, begun: list[tuple[int, Ints]]) -> BucketStep:
        rows = len(newest)
        sources: Tensor | slice = slice(start, start + rows)
        slots, places = np.arange(rows), newest
        if begun:
            own = np.stack([np.arange(start, start + rows), slots, newest])
            written, slots, places = np.concatenate([*(written_tokens(*one) for one in begun), own], axis=1)
            sources = self._tensor(written)
        cells = self._tensor(shelf.cells(slots, places))
        read = reading(newest, self.windows, self.layout.device, self.layout.dtype)
        return BucketStep(shelf, start, start + rows, sources, cells, read)

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.layout.device)


def written_tokens(place: int, sources: Ints) -> Ints:
    """[3, W]: the packed tokens, their row's place (or slot), and where in the row they are written."""
    return np.stack([sources, np.full(len(sources), place), np.arange(len(sources))])
