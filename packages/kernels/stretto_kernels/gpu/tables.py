"""All rows of a decode step as tables of integers, for the kernels of `gpu.attention`.

The cached tokens of each row are cut into chunks of about equal length::

    rows     a a a a a a a a a a        chunks of 4, at most 8     a a a a | a a a a | a a
             b b                                                   b b
             c c c c c                                             c c c c | c
                                                                   (two places are left empty)

The number of places for chunks depends only on the number of rows. All chunks of a step have about the same length,
chosen by the tokens to read; long rows have more chunks.

Axes: Z layer, T packed token, W written token, R row, N place for a chunk, S slot, H query heads, K key/value heads, L
tokens of a slot, D width of a head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.gpu.attention import GRAIN, TABLE, Tile, read_rows, write_rows
from stretto_kernels.gpu.fused import Heads, enter_rotated
from stretto_kernels.rule import Rule

Ints = npt.NDArray[np.int64]

#: Extra chunks per row: enough to balance the work.
MORE_PER_ROW = 2
_TRIES = 5  # measurements of a tile; the first compiles


@dataclass(frozen=True)
class Chunks:
    """The chunks of one step. `items`: [N, 3] row, first token, end token (exclusive); zeros for empty places.
    `bounds`: [R + 1], row r has the chunks bounds[r] to bounds[r + 1] - 1.

    Example: the drawing in the module's docstring is ``cut([0, 0, 0], [10, 2, 5], most=8, grain=4)``: items ``(0, 0, 4)
    (0, 4, 8) (0, 8, 10) (1, 0, 2) (2, 0, 4) (2, 4, 5)`` and two empty places, bounds ``0 3 4 6``.
    """

    items: Ints
    bounds: Ints


def cut(firsts: Ints, ends: Ints, most: int, grain: int) -> Chunks:
    """Cut the tokens ``firsts[r] <= p < ends[r]`` of each row into chunks of about equal length; places for chunks that
    are left over stay empty.

    Args:
        firsts: [R], first token to read of each row.
        ends: [R], exclusive ends, greater than `firsts`.
        most: number of places for chunks; greater than R.
        grain: chunk lengths are multiples of this many tokens, except the last of a row.
    """
    seen = ends - firsts
    # ceil(seen / length) < seen / length + 1, so all rows together have at most total / length + R chunks.
    grains = -(-int(seen.sum()) // (grain * (most - len(ends))))
    length = grain * grains
    counts = -(-seen // length)
    bounds = np.concatenate([[0], counts.cumsum()])
    rows = np.arange(len(ends)).repeat(counts)
    starts = firsts[rows] + (np.arange(len(rows)) - bounds[rows]) * length
    items = np.zeros((most, 3), np.int64)
    items[: len(rows)] = np.stack([rows, starts, np.minimum(starts + length, ends[rows])], axis=1)
    return Chunks(items, bounds)


@dataclass(frozen=True)
class TableRows:
    """All rows of a step as a table of slots; implements `stretto_kernels.steps.trace.Attends`.

    `start`: index of the first newest token among the packed tokens. `dtype`: of the KV cache. `slots`: [Z, R, 4] the
    table "rows" (`slots_of`), for each layer. `writes`: [W, 3] packed token, row, position in the slot. `chunks`: by
    attention window, items and bounds of `Chunks`. `tile`: what a GPU program reads at a time.
    """

    start: int
    dtype: torch.dtype
    slots: Tensor
    writes: Tensor
    chunks: Mapping[int | None, tuple[Tensor, Tensor]]
    tile: Tile = TABLE[0]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        """Write keys and values to the slots, and attend from the rows' newest tokens; returns [R, H, D]."""
        # The kernels treat addresses as pointers to this dtype.
        query_RHD, k_TKD, v_TKD = (x.to(self.dtype) for x in (q_THD[self.start :], k_TKD, v_TKD))
        write_rows(k_TKD, v_TKD, self.slots[layer], self.writes)
        return self._read(layer, query_RHD, rule, k_TKD.shape[1])

    def attend_rotated(
        self, layer: int, query: Heads, key: Heads, value: Tensor, cos: Tensor, sin: Tensor, rule: Rule
    ) -> Tensor:
        """Attention of a step without contexts, [1, T, H, D], with the rotary embedding before it. Keys and values are
        written to the slots first. The heads and `value` [1, K, T, D] have the cache's dtype; `cos` and `sin`: [1, T,
        D]."""
        query_RHD = enter_rotated(query, key, value, cos, sin, self.slots[layer], self.writes)
        return self._read(layer, query_RHD, rule, value.shape[1]).unsqueeze(0)

    def _read(self, layer: int, query_RHD: Tensor, rule: Rule, kv_heads: int) -> Tensor:
        items, bounds = self.chunks[rule.window]
        return read_rows(query_RHD, self.slots[layer], items, bounds, rule, kv_heads, self.tile)


def slots_of(keys_SKLD: Tensor, values_SKLD: Tensor, used: int, bucket: int = 0) -> Ints:
    """The table "rows", [used, 4], for the first `used` slots of a layer's keys and values: address of keys, address of
    values, stride between heads in elements, `bucket` (number of their length bucket)."""
    slots = np.arange(used) * keys_SKLD.stride(0) * keys_SKLD.element_size()
    heads, buckets = np.full(used, keys_SKLD.stride(1)), np.full(used, bucket)
    return np.stack([keys_SKLD.data_ptr() + slots, values_SKLD.data_ptr() + slots, heads, buckets], axis=1)


def read_seconds(like_KD: Tensor, heads: int, tile: Tile, rows: int = 64, tokens: int = 2048) -> float:
    """Measure a tile with `heads` query heads: least seconds, of five tries, to read `rows` rows of `tokens` tokens of
    one layer five times. `like_KD`: keys of a token, for their sizes, dtype and device."""
    (kv_heads, width), device = like_KD.shape, like_KD.device
    cache = torch.randn((2, rows, kv_heads, tokens, width), device=device).to(like_KD.dtype)
    query = torch.randn(rows, heads, width, device=device).to(like_KD.dtype)
    chunks = cut(np.zeros(rows, np.int64), np.full(rows, tokens), rows * (1 + MORE_PER_ROW), GRAIN)
    slots, items, bounds = (
        torch.from_numpy(one).to(device) for one in (slots_of(cache[0], cache[1], rows), chunks.items, chunks.bounds)
    )
    best = math.inf
    for _ in range(_TRIES):
        wait(device)
        began = time.perf_counter()
        for _ in range(_TRIES):
            read_rows(query, slots, items, bounds, Rule(), kv_heads, tile)
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def wait(device: torch.device) -> None:
    """Wait until a CUDA device has finished all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
