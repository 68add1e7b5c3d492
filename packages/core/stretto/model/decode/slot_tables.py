"""Steps that write and read all rows at once, by a table of each row's slot (`model.kernels.triton_attention`).

    slots    keys, address | values, address | layer to layer | head to head    for each row     [R, 4]
    writes   packed token | row | place in the slot                             for each token   [W, 3]
    chunks   row | first | end                                                  for each window  [N, 3]

Buckets may be of any length, and may move between two steps: a step is a function of whole numbers. Steps without
contexts, which is most of them, are therefore captured as CUDA graphs (`model.decode.cuda_graphs`): their rows are
padded with rows that read and write a scratch slot.

Axes: T packed token, W written token, R row, N place for a chunk, H query heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.model.attention_support import Rule
from stretto.model.decode.chunks import cut
from stretto.model.decode.cuda_graphs import Capture, CudaCapture, Graphs, Inputs, captured_size
from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.decode.steps import DecodeStep, StepPlan, written_tokens
from stretto.model.kernels.triton_attention import GRAIN, read_rows, reads_ragged, write_rows
from stretto.model.layout import Packing
from stretto.model.trace import Forward

Ints = npt.NDArray[np.int64]

#: Chunks beyond one a row: for each row, and programs that read them for each multiprocessor. Enough of both that none
#: runs out of work long before the others.
_MORE_PER_ROW = 2
_PER_PROCESSOR = 8


@dataclass(frozen=True)
class TableRows:
    """All rows of a step."""

    start: int  # the first of the newest tokens
    dtype: torch.dtype  # of the cache
    slots: Tensor  # [R, 4]
    writes: Tensor  # [W, 3]
    chunks: Mapping[int | None, tuple[Tensor, Tensor]]  # by the window of a layer: items [N, 3] and bounds [R + 1]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        # The kernels take addresses for those of numbers of this type, whatever lies there.
        query_RHD, k_TKD, v_TKD = (x.to(self.dtype) for x in (q_THD[self.start :], k_TKD, v_TKD))
        write_rows(k_TKD, v_TKD, self.slots, self.writes, layer)
        items, bounds = self.chunks[rule.window]
        return read_rows(query_RHD, self.slots, items, bounds, rule, k_TKD.shape[1], layer)


class TableSteps:
    """Steps over all buckets at once; those without contexts are replayed."""

    def __init__(self, layout: CacheLayout, windows: frozenset[int | None], capture: Capture, programs: int) -> None:
        """`programs` is how many of a launch at least are worth having, where there is so much to read."""
        self._layout = layout
        self._windows = tuple(windows)
        self._spare = -(-programs // layout.kv_heads)
        self._graphs = Graphs(capture, layout.device)
        shape = (2, layout.layers, 1, layout.kv_heads, 1, layout.head_dim)
        self._nobodys = torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def logits(self, step: DecodeStep, forward: Forward, last: int) -> Tensor:
        """[last, V], the logits after each of the step's last tokens, float32; the caller may keep them. A step without
        contexts has those of its rows."""
        run = partial(self._run, forward, step.contexts, last)
        if step.contexts is None:
            logits = self._graphs(run, self._arrays(step, captured_size(step.rows)))
        else:
            arrays = self._arrays(step, step.rows)
            logits = run(*Inputs.like(arrays, self._layout.device).fill(arrays).parts)
        return logits[:last].to(torch.float32, copy=True)  # the next replay writes over them

    def _run(self, forward: Forward, contexts: Packing | None, last: int, *arrays: Tensor) -> Tensor:
        token_ids, positions, slots, writes, *chunks = arrays
        rows = len(slots)
        last = rows if contexts is None else last  # a captured step may have more rows than are asked for
        by_window = dict(zip(self._windows, zip(chunks[::2], chunks[1::2], strict=True), strict=True))
        table = TableRows(len(token_ids) - rows, self._layout.dtype, slots, writes, by_window)
        return forward(token_ids[None], positions[None], StepPlan(contexts, (table,)), len(token_ids), -last)[0]

    def _arrays(self, step: DecodeStep, rows: int) -> list[Ints]:
        """The step as arrays, with `rows` rows; those that are added have one token, at position 0."""
        added = rows - step.rows
        token_ids, positions = (np.pad(x, (0, added)) for x in (step.token_ids, step.positions))
        newest = positions[step.start :]
        own = np.stack([np.arange(step.start, len(token_ids)), np.arange(rows), newest])
        writes = np.concatenate([*(written_tokens(row.place, row.sources) for row in step.entering), own], axis=1)
        caches = [(bucket.cache, len(bucket.owners)) for bucket in step.buckets]
        slots = np.concatenate([*(_slots(*one) for one in caches), _slots(self._nobodys, 1).repeat(added, axis=0)])
        arrays = [token_ids, positions, slots, np.ascontiguousarray(writes.T)]
        most = rows + max(_MORE_PER_ROW * rows, self._spare)
        for window in self._windows:
            firsts = np.zeros_like(newest) if window is None else np.maximum(newest + 1 - window, 0)
            chunks = cut(firsts, newest + 1, most, GRAIN)
            arrays += [chunks.items, chunks.bounds]
        return arrays


def _slots(cache: Tensor, used: int) -> Ints:
    """[used, 4] of the first slots of a cache [2, Z, S, K, L, D], as `write_rows` wants them."""
    kind, layer, slot, head = cache.stride()[:4]
    slots = np.arange(used) * slot * cache.element_size()
    keys, values = cache.data_ptr() + slots, cache.data_ptr() + kind * cache.element_size() + slots
    return np.stack([keys, values, np.full(used, layer), np.full(used, head)], axis=1)


def table_steps(layout: CacheLayout, windows: frozenset[int | None]) -> TableSteps | None:
    """Steps by table where a GPU runs their kernels; None elsewhere."""
    if not reads_ragged(layout.device, layout.dtype, layout.head_dim):
        return None
    multiprocessors = torch.cuda.get_device_properties(layout.device).multi_processor_count
    return TableSteps(layout, windows, CudaCapture(layout.device), _PER_PROCESSOR * multiprocessors)
