"""Decode steps on a GPU that write and read all rows at once, through tables (`stretto_kernels.gpu.tables`).

    rows     address of keys | address of values | stride between heads | bucket    for each row     [R, 4]
    layers   bytes from layer 0 to this layer: of keys | of values                  for each bucket  [Z, B, 2]
    writes   packed token | row | position in the slot                              for each token   [W, 3]
    chunks   row | first token | end                                                for each window  [N, 3]

A step depends only on these integers, so buckets may have any length, and may be reallocated between two steps. Steps
without contexts (most steps) are therefore captured as CUDA graphs (`stretto_kernels.gpu.graphs`). They are padded with
rows that use a scratch slot.

The number of chunks depends only on the number of rows, so one captured graph serves all steps with that many rows.

Axes: Z layer, B bucket, T packed token, W written token, R row, N place for a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.model.decode.length_buckets import Bucket, CacheLayout
from stretto.model.decode.steps import DecodeStep, StepPlan, written_tokens
from stretto.model.layout import Packing
from stretto_kernels.gpu.attention import GRAIN, TABLE, chosen, reads_ragged, triton_version
from stretto_kernels.gpu.graphs import Capture, CudaCapture, Graphs, Inputs, captured_size
from stretto_kernels.gpu.tables import MORE_PER_ROW, TableRows, cut, read_seconds, slots_of
from stretto_kernels.steps.trace import Forward

Ints = npt.NDArray[np.int64]

#: Programs per multiprocessor that read chunks: enough to balance the work.
_PER_PROCESSOR = 8


class TableSteps:
    """Runs decode steps over all buckets at once; steps without contexts are replayed from CUDA graphs."""

    def __init__(self, layout: CacheLayout, windows: frozenset[int | None], capture: Capture, programs: int) -> None:
        """Prepare for steps; no graph is captured yet. `layout`: of the KV cache. `windows`: attention windows of the
        layers in tokens, None for full attention. `capture`: captures CUDA graphs. `programs`: least number of GPU
        programs to aim for, so that the device is busy."""
        self._layout = layout
        self._windows = tuple(windows)
        self._spare = -(-programs // layout.kv_heads)
        self._graphs, self._tile = Graphs(capture, layout.device), TABLE[0]
        shape = (2, 1, layout.kv_heads, 1, layout.head_dim)
        self._nobodys = torch.zeros(shape, dtype=layout.dtype, device=layout.device)  # one slot for all layers
        self._buckets = layout.lengths
        self._held: tuple[_Places, list[Ints]] | None = None  # the tables of the last step that depend on slots
        self._coming: tuple[Ints, list[Ints]] | None = None  # positions of an expected step, and tables of them

    def tune(self, heads: int, record: Path | None) -> None:
        """Choose the kernels' tile: from the file `record` of the run, or by a measurement that is written there; None:
        the default tile. Call it before the first step. `heads`: number of query heads."""
        layout, device = self._layout, torch.cuda.get_device_name(self._layout.device)
        name = f"{device}, {layout.dtype}, {heads} heads of {layout.kv_heads} x {layout.head_dim}"
        like_KD = self._nobodys[0, 0, :, 0]
        self._tile = chosen(f"{name}, triton {triton_version()}", partial(read_seconds, like_KD, heads), record)

    def logits(self, step: DecodeStep, forward: Forward, last: int) -> Tensor:
        """Compute the logits after each of the step's last `last` tokens, [last, V], float32, in memory of their own. A
        step with contexts runs eagerly; one without runs as a CUDA graph, padded to a captured size, and `last` must be
        its number of rows. `forward`: the model's forward, the same in every call."""
        run, rows = partial(self._run, forward, step.contexts, last), step.rows
        if step.contexts is None:
            rows = captured_size(rows)
            logits = self._graphs(run, self._arrays(step, rows))
        else:
            arrays = self._arrays(step, rows)
            logits = run(*Inputs.like(arrays, self._layout.device).fill(arrays).parts)
        kept = logits[:last].to(torch.float32, copy=True)  # the next replay overwrites them
        if step.contexts is None:
            self._expect(step, rows)
        return kept

    def _run(self, forward: Forward, contexts: Packing | None, last: int, *arrays: Tensor) -> Tensor:
        """Compute one step from its `_arrays` on the device; this is what graphs capture. Returns the logits of the
        last `last` tokens; without contexts, of all rows, padding rows included."""
        token_ids, positions, rows_R4, layers_ZB2, writes, *chunks = arrays
        rows = len(rows_R4)
        last = rows if contexts is None else last  # a captured step may have padding rows
        by_window = dict(zip(self._windows, zip(chunks[::2], chunks[1::2], strict=True), strict=True))
        slots_ZR4 = rows_R4.expand(len(layers_ZB2), rows, 4).clone()
        slots_ZR4[:, :, :2] += layers_ZB2[:, rows_R4[:, 3]]
        table = TableRows(len(token_ids) - rows, self._layout.dtype, slots_ZR4, writes, by_window, self._tile)
        plan = StepPlan(contexts, (table,), rotated=table.attend_rotated if contexts is None else None)
        return forward(token_ids[None], positions[None], plan, len(token_ids), -last)[0]

    def _arrays(self, step: DecodeStep, rows: int) -> list[Ints]:
        """Return the inputs of a step as arrays, padded to `rows` rows; padding rows have one token at position 0."""
        token_ids, positions = _padded(step.token_ids, step.rows, rows), _padded(step.positions, step.rows, rows)
        if step.contexts is None and self._coming is not None and np.array_equal(self._coming[0], positions):
            numbers = self._coming[1]
        else:
            numbers = self._numbers(positions[step.start :], step)
        return [token_ids, positions, *self._places(step.buckets, rows), *numbers]

    def _expect(self, step: DecodeStep, rows: int) -> None:
        """Prepare the tables of the next step for the case that no row enters or leaves, while the device computes this
        one: each row then has one token more. `rows`: number of rows with padding."""
        positions = _padded(step.positions + 1, step.rows, rows)
        self._coming = positions, self._numbers(positions)

    def _numbers(self, newest: Ints, step: DecodeStep | None = None) -> list[Ints]:
        """Return the table of entries to write, then for each window the table of chunks to read, and its bounds.
        `newest`: position of each row's newest token. `step`: a step, for its contexts; None: the step has no tokens
        but these."""
        rows, start, entering = len(newest), *((step.start, step.entering) if step is not None else (0, ()))
        own = np.stack([np.arange(start, start + rows), np.arange(rows), newest])
        if entering:
            own = np.concatenate([*(written_tokens(row.place, row.sources) for row in entering), own], axis=1)
        numbers, most = [own.T], rows + max(MORE_PER_ROW * rows, self._spare)
        for window in self._windows:
            firsts = np.zeros_like(newest) if window is None else np.maximum(newest + 1 - window, 0)
            chunks = cut(firsts, newest + 1, most, GRAIN)
            numbers += [chunks.items, chunks.bounds]
        return numbers

    def _places(self, buckets: Sequence[Bucket], rows: int) -> list[Ints]:
        """Return the tables of the rows' slots, with a dummy slot for padding rows up to `rows`, and of the layers'
        offsets (`_layers`). Both are cached until rows change their buckets, or a bucket its memory."""
        now = _Places(rows, [bucket.addresses for bucket in buckets], [len(bucket.owners) for bucket in buckets])
        if self._held is None or not self._held[0].same(now):
            nobodys = slots_of(self._nobodys[0], self._nobodys[1], 1, self._buckets)
            held = [slots_of(one.keys[0], one.values[0], len(one.owners), at) for at, one in enumerate(buckets)]
            slots = np.concatenate([*held, nobodys.repeat(rows - sum(now.used), axis=0)])
            self._held = now, [slots, self._layers(now.addresses)]
        return self._held[1]

    def _layers(self, addresses: Sequence[Sequence[int]]) -> Ints:
        """Return the bytes from layer 0's keys, and values, to each layer's, [Z, B, 2]. `addresses`: `Bucket.addresses`
        of each bucket in use; unused buckets have zeros. So has the last bucket, the scratch slot, which all layers
        share."""
        layers = np.zeros((self._layout.layers, self._buckets + 1, 2), np.int64)
        for at, own in enumerate(addresses):
            layers[:, at] = np.array(own).reshape(-1, 2) - np.array(own[:2])
        return layers


@dataclass(frozen=True)
class _Places:
    """Slots of the rows of a step, for comparison: `rows` with padding; memory and number of used slots by bucket."""

    rows: int  # with padding rows
    addresses: list[list[int]]  # `Bucket.addresses` of each bucket, a new list after a reallocation
    used: list[int]  # rows of each bucket

    def same(self, other: _Places) -> bool:
        """Whether tables that were made for `other` hold for these rows too."""
        return (
            self.rows == other.rows
            and self.used == other.used
            and all(ours is theirs for ours, theirs in zip(self.addresses, other.addresses, strict=True))
        )


def _padded(numbers: Ints, rows: int, wanted: int) -> Ints:
    """Append zeros to `numbers`, one number per token, for the padding of `rows` rows up to `wanted` rows."""
    return numbers if rows == wanted else np.concatenate([numbers, np.zeros(wanted - rows, np.int64)])


def table_steps(layout: CacheLayout, windows: frozenset[int | None]) -> TableSteps | None:
    """Make `TableSteps` if the layout's device is a GPU whose kernels take its dtype and head size; else return None.
    `windows`: attention windows of the layers, None for full attention."""
    if not reads_ragged(layout.device, layout.dtype, layout.head_dim):
        return None
    multiprocessors = torch.cuda.get_device_properties(layout.device).multi_processor_count
    return TableSteps(layout, windows, CudaCapture(layout.device), _PER_PROCESSOR * multiprocessors)
