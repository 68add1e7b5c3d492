"""Decode attention on the CPU: rows of any length in one call, each read to its own end.

A step has one query per row and head. Dense kernels pad the rows of a bucket to the longest, and their overhead per row
and head exceeds the arithmetic. This loop reads the KV cache only once, the least that is possible: a block of tokens
is used for all query heads of its key head while it is in the core's cache. It also appends the newest entry of each
row. KV entries are float32 or bfloat16, sums float32.

Axes: R row, S slot, H query heads, K key/value heads, G query heads of a key head, L tokens of a slot, D width of a
head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, compiled, exp, floats, halved, halves, inlined, tanh, widened
from stretto_kernels.rule import Rule

#: Values that stand for no window and for no soft cap.
NO_WINDOW = np.iinfo(np.int64).max
NO_CAP = 0.0

_BLOCK = U(32)  # tokens; their keys take 8 KiB at a width of 64


@inlined
def _score(query_D: Any, keys: Any, at: Any, scores: Any) -> None:
    """Fill `scores` with the products of a query and the keys from index `at` on, one key per score, four at a time."""
    width, count = U(len(query_D)), U(len(scores))
    blocks = count // U(4) * U(4)
    for p in range(U(0), blocks, U(4)):
        s0, s1, s2, s3 = F(0.0), F(0.0), F(0.0), F(0.0)
        k0 = at + p * width
        k1, k2, k3 = k0 + width, k0 + U(2) * width, k0 + U(3) * width
        for d in range(width):
            q = query_D[d]
            s0 += q * keys[k0 + d]
            s1 += q * keys[k1 + d]
            s2 += q * keys[k2 + d]
            s3 += q * keys[k3 + d]
        scores[p], scores[p + U(1)], scores[p + U(2)], scores[p + U(3)] = s0, s1, s2, s3
    for p in range(blocks, count):
        s0 = F(0.0)
        for d in range(width):
            s0 += query_D[d] * keys[at + p * width + d]
        scores[p] = s0


@inlined
def _weigh(scores: Any, scaling: Any, softcap: Any) -> None:
    """Replace scores, in place, by the softmax of the scaled and, if `softcap` > 0, capped scores."""
    top, mass = F(-np.inf), F(0.0)
    for p in range(U(len(scores))):
        scores[p] *= scaling
        if softcap > F(0.0):  # softcap * tanh(score / softcap) (Gemma 2)
            scores[p] = softcap * tanh(scores[p] / softcap)
        top = max(top, scores[p])
    for p in range(U(len(scores))):
        scores[p] = exp(scores[p] - top)
        mass += scores[p]
    share = F(1.0) / mass
    for p in range(U(len(scores))):
        scores[p] *= share


@inlined
def _mix(values: Any, at: Any, weights: Any, total_D: Any) -> None:
    """Add to `total_D` the values from index `at` on, times their weights, eight at a time."""
    width, count = U(len(total_D)), U(len(weights))
    blocks = count // U(8) * U(8)
    for p in range(U(0), blocks, U(8)):
        w0, w1, w2, w3 = weights[p], weights[p + U(1)], weights[p + U(2)], weights[p + U(3)]
        w4, w5, w6, w7 = weights[p + U(4)], weights[p + U(5)], weights[p + U(6)], weights[p + U(7)]
        v0 = at + p * width
        v1, v2, v3 = v0 + width, v0 + U(2) * width, v0 + U(3) * width
        v4, v5, v6, v7 = v0 + U(4) * width, v0 + U(5) * width, v0 + U(6) * width, v0 + U(7) * width
        for d in range(width):
            early = w0 * values[v0 + d] + w1 * values[v1 + d] + w2 * values[v2 + d] + w3 * values[v3 + d]
            late = w4 * values[v4 + d] + w5 * values[v5 + d] + w6 * values[v6 + d] + w7 * values[v7 + d]
            total_D[d] += early + late
    for p in range(blocks, count):
        for d in range(width):
            total_D[d] += weights[p] * values[at + p * width + d]


@inlined
def _copy(source: Any, at: Any, count: Any, target: Any, to: Any) -> None:
    for n in range(count):
        target[to + n] = source[at + n]


@compiled
def _attend(
    query: Any, new: Any, cache: Any, out: Any, ends: Any, shape: Any, window: Any, scaling: Any, softcap: Any
) -> None:
    """Row r attends to the positions ends[r] - window <= p < ends[r] of slot r, for float32. `new` and `cache` are
    (address of keys, address of values); if the address of new keys is 0, no entries are appended. `shape`: (rows,
    query heads, key heads, slot length, slots, head width)."""
    rows, heads, kv_heads, length, slots = shape[0], shape[1], shape[2], U(shape[3]), shape[4]
    width = U(shape[5])
    group, new_count = heads // kv_heads, rows * kv_heads * width
    asked, outs = floats(query, rows * heads * width), floats(out, rows * heads * width)
    new_keys, new_values = floats(new[0], new_count), floats(new[1], new_count)
    size = slots * kv_heads * length * width
    keys, values = floats(cache[0], size), floats(cache[1], size)
    weights, total_D = np.empty((group, length), np.float32), np.empty(width, np.float32)
    for row in range(U(rows)):
        first, end = U(max(ends[row] - window, 0)), U(ends[row])
        for kv_head in range(U(kv_heads)):
            place = row * U(kv_heads) + kv_head
            slot = place * length * width
            if new[0] != 0:
                newest = slot + (end - U(1)) * width
                _copy(new_keys, place * width, width, keys, newest)
                _copy(new_values, place * width, width, values, newest)
            for block in range(first, end, _BLOCK):
                stop = min(block + _BLOCK, end)
                for g in range(U(group)):
                    query_D = asked[(place * U(group) + g) * width : (place * U(group) + g + U(1)) * width]
                    _score(query_D, keys, slot + block * width, weights[g, block:stop])
            for g in range(U(group)):
                _weigh(weights[g, first:end], scaling, softcap)
                total_D[:] = F(0.0)
                _mix(values, slot + first * width, weights[g, first:end], total_D)
                _copy(total_D, U(0), width, outs, (place * U(group) + g) * width)


@compiled
def _attend_halves(
    query: Any, new: Any, cache: Any, out: Any, ends: Any, shape: Any, window: Any, scaling: Any, softcap: Any
) -> None:
    """Same as `_attend`, for bfloat16: a block of entries is converted to float32 once for all query heads of its key
    head."""
    rows, heads, kv_heads, length, slots = shape[0], shape[1], shape[2], U(shape[3]), shape[4]
    width = U(shape[5])
    group, new_count = heads // kv_heads, rows * kv_heads * width
    asked, outs = halves(query, rows * heads * width), halves(out, rows * heads * width)
    new_keys, new_values = halves(new[0], new_count), halves(new[1], new_count)
    size = slots * kv_heads * length * width
    keys, values = halves(cache[0], size), halves(cache[1], size)
    weights, wide = np.empty((group, length), np.float32), np.empty(_BLOCK * width, np.uint32)
    queries, totals = np.empty((group, width), np.float32), np.empty((group, width), np.float32)
    floating = wide.view(np.float32)
    for row in range(U(rows)):
        first, end = U(max(ends[row] - window, 0)), U(ends[row])
        for kv_head in range(U(kv_heads)):
            place = row * U(kv_heads) + kv_head
            slot, own = place * length * width, place * U(group) * width
            if new[0] != 0:
                newest = slot + (end - U(1)) * width
                _copy(new_keys, place * width, width, keys, newest)
                _copy(new_values, place * width, width, values, newest)
            for g in range(U(group)):
                for d in range(width):
                    queries[g, d], totals[g, d] = widened(asked[own + g * width + d]), F(0.0)
            for block in range(first, end, _BLOCK):
                stop = min(block + _BLOCK, end)
                _widen(keys, slot + block * width, (stop - block) * width, wide)
                for g in range(U(group)):
                    _score(queries[g], floating, U(0), weights[g, block:stop])
            for g in range(U(group)):
                _weigh(weights[g, first:end], scaling, softcap)
            for block in range(first, end, _BLOCK):
                stop = min(block + _BLOCK, end)
                _widen(values, slot + block * width, (stop - block) * width, wide)
                for g in range(U(group)):
                    _mix(floating, U(0), weights[g, block:stop], totals[g])
            for g in range(U(group)):
                for d in range(width):
                    outs[own + g * width + d] = halved(totals[g, d])


@inlined
def _widen(numbers: Any, at: Any, count: Any, wide: Any) -> None:
    for n in range(count):
        wide[n] = np.uint32(np.uint32(numbers[at + n]) << np.uint32(16))


def ragged_attention(
    query_RHD: Tensor,
    keys_SKLD: Tensor,
    values_SKLD: Tensor,
    ends: npt.NDArray[np.int64],
    rule: Rule,
    newest: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of row r to the entries of slot r at positions below ``ends[r]``, within the rule's window. Writes the
    `newest` entries into the cache first.

    Args:
        query_RHD: one query per row and head.
        keys_SKLD: float32 or bfloat16, contiguous; at least as many slots as rows.
        values_SKLD: like the keys.
        ends: [R], at least 1, at most L.
        rule: attention settings of the layer.
        newest: key and value [R, K, D] of each row, which are written at position ``ends[r] - 1``; None: they are
            written already.

    Returns:
        [R, H, D], of the cache's dtype.
    """
    dtype, width = keys_SKLD.dtype, query_RHD.shape[-1]
    query_RHD = query_RHD.to(dtype).contiguous()
    out_RHD = torch.empty_like(query_RHD)
    new = () if newest is None else tuple(x.to(dtype).contiguous() for x in newest)
    slots, kv_heads, length, _ = keys_SKLD.shape
    (_attend if dtype is torch.float32 else _attend_halves)(
        query_RHD.data_ptr(),
        tuple(x.data_ptr() for x in new) or (0, 0),
        (keys_SKLD.data_ptr(), values_SKLD.data_ptr()),
        out_RHD.data_ptr(),
        ends,
        (*query_RHD.shape[:2], kv_heads, length, slots, width),
        NO_WINDOW if rule.window is None else rule.window,
        F(width**-0.5 if rule.scaling is None else rule.scaling),
        F(NO_CAP if rule.softcap is None else rule.softcap),
    )
    return out_RHD
