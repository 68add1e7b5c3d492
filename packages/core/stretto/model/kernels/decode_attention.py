"""Decode attention on the CPU: rows of any length in one call, each read to its own end.

A step has one query per row and head. Dense kernels pad the rows of a bucket to its longest and have an overhead per
row and head that exceeds the arithmetic. This loop only reads the KV cache once, the lower bound of the work. KV
entries are float32 or bfloat16, sums float32; numba compiles it on the first call.

Axes: R row, S slot, H query heads, K key/value heads, L tokens of a slot, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.model.attention_support import Rule

_njit: Any
try:
    from numba import njit as _njit
except ImportError:  # optional on a machine with a GPU
    _njit = None

#: Whether numba is installed.
AVAILABLE = _njit is not None

#: Values for no window and no cap.
NO_WINDOW = np.iinfo(np.int64).max
NO_CAP = 0.0

_F = np.float32
_U = np.uint64  # numba treats signed indices as possibly negative, and then does not vectorise


# Sums may be reordered; infinities and NaN keep their meaning.
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}


def _inner(function: Callable[..., Any]) -> Any:
    """A part of the loops, inlined into each of them.

    As a separate function, a process that compiled the loop and one that loaded it from disk would run different
    copies, and completions would differ in their last bits.
    """
    return _njit(forceinline=True, **_OPTIONS)(function) if AVAILABLE else function


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile the loop; cached on disk if possible."""
    if not AVAILABLE:
        return function
    try:
        return _njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return _njit(**_OPTIONS)(function)


@_inner
def _exp(x: Any) -> Any:
    """e^x to 2e-7 for x below 87: a power of two times a Taylor series (vectorises)."""
    t = min(max(x * _F(1.4426950408889634), _F(-126.0)), _F(126.0))
    whole = np.floor(t + _F(0.5))
    rest = t - whole
    series = rest * _F(1.5403530393381609e-4) + _F(1.3333558146428443e-3)
    series = series * rest + _F(9.618129107628477e-3)
    series = series * rest + _F(5.550410866482158e-2)
    series = series * rest + _F(0.2402265069591007)
    series = series * rest + _F(0.6931471805599453)
    series = series * rest + _F(1.0)
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@_inner
def _tanh(x: Any) -> Any:
    """tanh to 2e-7, relative; 1 - 2 / (e^2x + 1) alone cancels near 0 (Cephes, tanhf.c; vectorises)."""
    size, square = abs(x), x * x
    series = square * _F(-5.70498872745e-3) + _F(2.06390887954e-2)
    series = series * square - _F(5.37397155531e-2)
    series = series * square + _F(1.33314422036e-1)
    series = series * square - _F(3.33332819422e-1)
    far = _F(1.0) - _F(2.0) / (_exp(size + size) + _F(1.0))
    return x + x * square * series if size < _F(0.625) else (far if x > _F(0.0) else -far)


@_inner
def _score(query_D: Any, keys_LD: Any, scores: Any, first: Any, end: Any, scaling: Any, softcap: Any) -> Any:
    """Write scores of the keys from `first` to before `end`, four at a time; returns the largest."""
    width = _U(len(query_D))
    blocks = first + (end - first) // _U(4) * _U(4)
    for p in range(first, blocks, _U(4)):
        s0, s1, s2, s3 = _F(0.0), _F(0.0), _F(0.0), _F(0.0)
        k0 = p * width
        k1, k2, k3 = k0 + width, k0 + _U(2) * width, k0 + _U(3) * width
        for d in range(width):
            q = query_D[d]
            s0 += q * keys_LD[k0 + d]
            s1 += q * keys_LD[k1 + d]
            s2 += q * keys_LD[k2 + d]
            s3 += q * keys_LD[k3 + d]
        scores[p], scores[p + _U(1)], scores[p + _U(2)], scores[p + _U(3)] = s0, s1, s2, s3
    for p in range(blocks, end):
        s0 = _F(0.0)
        for d in range(width):
            s0 += query_D[d] * keys_LD[p * width + d]
        scores[p] = s0
    top = _F(-np.inf)
    for p in range(first, end):
        scores[p] *= scaling
        if softcap > _F(0.0):  # softcap * tanh(score / softcap) (Gemma 2)
            scores[p] = softcap * _tanh(scores[p] / softcap)
        top = max(top, scores[p])
    return top


@_inner
def _mix(values_LD: Any, weights: Any, first: Any, end: Any, total_D: Any) -> None:
    """Add the weighted values, eight at a time."""
    width = _U(len(total_D))
    for d in range(width):
        total_D[d] = _F(0.0)
    blocks = first + (end - first) // _U(8) * _U(8)
    for p in range(first, blocks, _U(8)):
        w0, w1, w2, w3 = weights[p], weights[p + _U(1)], weights[p + _U(2)], weights[p + _U(3)]
        w4, w5, w6, w7 = weights[p + _U(4)], weights[p + _U(5)], weights[p + _U(6)], weights[p + _U(7)]
        v0 = p * width
        v1, v2, v3 = v0 + width, v0 + _U(2) * width, v0 + _U(3) * width
        v4, v5, v6, v7 = v0 + _U(4) * width, v0 + _U(5) * width, v0 + _U(6) * width, v0 + _U(7) * width
        for d in range(width):
            early = w0 * values_LD[v0 + d] + w1 * values_LD[v1 + d] + w2 * values_LD[v2 + d] + w3 * values_LD[v3 + d]
            late = w4 * values_LD[v4 + d] + w5 * values_LD[v5 + d] + w6 * values_LD[v6 + d] + w7 * values_LD[v7 + d]
            total_D[d] += early + late
    for p in range(blocks, end):
        for d in range(width):
            total_D[d] += weights[p] * values_LD[p * width + d]


@_inner
def _attend_group(
    query_GD: Any,
    keys_LD: Any,
    values_LD: Any,
    first: Any,
    end: Any,
    scaling: Any,
    softcap: Any,
    weights: Any,
    total_D: Any,
    out_GD: Any,
) -> None:
    """Attention of one key head's query heads to the tokens from `first` to before `end`; `weights` and `total_D` are
    scratch memory."""
    width = _U(len(total_D))
    for head in range(len(query_GD)):
        top = _score(query_GD[head], keys_LD, weights, first, end, scaling, softcap)
        mass = _F(0.0)
        for p in range(first, end):
            weights[p] = _exp(weights[p] - top)
            mass += weights[p]
        _mix(values_LD, weights, first, end, total_D)
        share = _F(1.0) / mass
        for d in range(width):
            out_GD[head, d] = total_D[d] * share


@_compiled
def _attend(query: Any, keys: Any, values: Any, ends: Any, window: Any, scaling: Any, softcap: Any, out: Any) -> None:
    """Row r attends to the tokens ends[r] - window <= p < ends[r] of slot r."""
    group = query.shape[1] // keys.shape[1]
    weights, total_D = np.empty(keys.shape[2], np.float32), np.empty(query.shape[2], np.float32)
    for row in range(len(query)):
        first, end = _U(max(ends[row] - window, 0)), _U(ends[row])
        for kv_head in range(keys.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys_LD, values_LD = keys[row, kv_head].ravel(), values[row, kv_head].ravel()
            asked, given = query[row, heads], out[row, heads]
            _attend_group(asked, keys_LD, values_LD, first, end, scaling, softcap, weights, total_D, given)


@_inner
def _widen(halves: Any, first: Any, end: Any, floats: Any) -> None:
    """Convert bfloat16 (as integers) to float32: the same bits followed by 16 zeros."""
    for place in range(first, end):
        floats[place] = np.uint32(np.uint32(halves[place]) << np.uint32(16))


@_compiled
def _attend_halves(
    query: Any, keys: Any, values: Any, ends: Any, window: Any, scaling: Any, softcap: Any, out: Any
) -> None:
    """As `_attend`, for bfloat16 KV entries: one head at a time is widened and stays in the core's cache while used."""
    group, width = query.shape[1] // keys.shape[1], _U(query.shape[2])
    numbers = keys.shape[2] * keys.shape[3]  # of one head
    wide_keys, wide_values = np.empty(numbers, np.uint32), np.empty(numbers, np.uint32)
    weights, total_D = np.empty(keys.shape[2], np.float32), np.empty(query.shape[2], np.float32)
    for row in range(len(query)):
        first, end = _U(max(ends[row] - window, 0)), _U(ends[row])
        for kv_head in range(keys.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            _widen(keys[row, kv_head].ravel(), first * width, end * width, wide_keys)
            _widen(values[row, kv_head].ravel(), first * width, end * width, wide_values)
            keys_LD, values_LD = wide_keys.view(np.float32), wide_values.view(np.float32)
            asked, given = query[row, heads], out[row, heads]
            _attend_group(asked, keys_LD, values_LD, first, end, scaling, softcap, weights, total_D, given)


def computes_ragged(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this loop supports KV entries of this kind."""
    return AVAILABLE and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def ragged_attention(
    query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, ends: npt.NDArray[np.int64], rule: Rule
) -> Tensor:
    """Attention of row r to slot r: the tokens before position ``ends[r]``, within the rule's window.

    Args:
        query_RHD: one query per row and head.
        keys_SKLD: float32 or bfloat16, contiguous; at least as many slots as rows.
        values_SKLD: like the keys.
        ends: [R], at least 1, at most L.
        rule: of the layer.

    Returns:
        [R, H, D]
    """
    out_RHD = torch.empty(query_RHD.shape, dtype=torch.float32)
    window = NO_WINDOW if rule.window is None else rule.window
    softcap = np.float32(NO_CAP if rule.softcap is None else rule.softcap)
    scaling = np.float32(query_RHD.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling)
    halves = keys_SKLD.dtype == torch.bfloat16
    keys, values = (x.view(torch.uint16).numpy() if halves else x.numpy() for x in (keys_SKLD, values_SKLD))
    query = query_RHD.float().contiguous().numpy()
    (_attend_halves if halves else _attend)(query, keys, values, ends, window, scaling, softcap, out_RHD.numpy())
    return out_RHD.to(query_RHD.dtype)
