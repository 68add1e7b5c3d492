"""Attention of a decode step on a GPU: rows of any length in one launch, each read as far as it is long (Triton).

What bounds a decode step is reading keys and values once. The tokens that the rows see are cut into chunks of about one
length (`stretto.model.chunks`), and each chunk is read by one program per key head, for all query heads that share it::

    read      chunk (row, first, end)  x  key head     ->  partial sum [G, D], largest score and mass [G]
    combine   row  x  query head                       ->  the row's partial sums, weighted and added

This is flash-decoding (Dao et al. 2023) with the split taken from the lengths. Rows say where their keys and values lie
by address, so that a launch reads from any number of shelves and a CUDA graph stays valid while they move.

Products are of the numbers that the cache holds, sums are in float32. TRITON_INTERPRET=1 runs the same kernels on the
processor, over tensors there.

Axes: T packed token, R row, W written token, N chunk, Z layers, H query heads, K key/value heads, G = H / K, L tokens of
a slot, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.model.packed import Rule

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU need not have it
    triton = tl = None

#: Types of keys and values that are read here.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Tokens of a chunk are a multiple of this; a shorter one is not worth a program and its partial sum.
GRAIN = 64

_ALIGNED = 16  # bytes that a thread reads at once
_TILE_BYTES = 16 * 1024  # of keys, and as many of values, that a program works on while it waits for the next
_FEWEST = 16  # rows and columns of a product on tensor cores; what is filled up is not read
_LONGEST_TILE = 128  # tokens
_PARTS = 16  # partial sums that are added at once


def _kernel(function: Callable[..., Any]) -> Any:
    # Layers differ in nothing but this number: one compiled kernel serves them all.
    return function if triton is None else triton.jit(function, do_not_specialize=["layer"])


def reads_ragged(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether keys and values of this kind are read here; the interpreter is for tests."""
    on_gpu = triton is not None and device.type == "cuda" and not triton.knobs.runtime.interpret
    return on_gpu and dtype in DTYPES and head_dim * dtype.itemsize % _ALIGNED == 0


@_kernel
def _write(
    keys_TKD: Any,
    values_TKD: Any,
    slots_R3: Any,
    writes_W3: Any,
    layer: Any,
    key_token: Any,
    key_head: Any,
    value_token: Any,
    value_head: Any,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program w copies keys and values of one token to their row's slot."""
    number = tl.program_id(0)
    token = tl.load(writes_W3 + 3 * number)
    row = tl.load(writes_W3 + 3 * number + 1)
    place = tl.load(writes_W3 + 3 * number + 2)
    layer_step = tl.load(slots_R3 + 3 * row + 1)
    head_step = tl.load(slots_R3 + 3 * row + 2)
    slot = tl.load(slots_R3 + 3 * row).to(tl.pointer_type(keys_TKD.dtype.element_ty)) + layer * layer_step

    heads_K1 = tl.arange(0, BLOCK_K)[:, None]
    inside_1D = tl.arange(0, BLOCK_D)[None, :]
    real = (heads_K1 < HEADS) & (inside_1D < WIDTH)
    to_KD = heads_K1 * head_step + place * WIDTH + inside_1D
    keys = tl.load(keys_TKD + token * key_token + heads_K1 * key_head + inside_1D, mask=real)
    tl.store(slot + to_KD, keys, mask=real)
    values = tl.load(values_TKD + token * value_token + heads_K1 * value_head + inside_1D, mask=real)
    tl.store(slot + LAYERS * layer_step + to_KD, values, mask=real)


@_kernel
def _product(left: Any, right: Any, WIDE: tl.constexpr) -> Any:
    """In float32 sums; the interpreter has no products of bfloat16."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@_kernel
def _read(
    query_RHD: Any,
    slots_R3: Any,
    items_N3: Any,
    sums_NHD: Any,
    tops_NH: Any,
    masses_NH: Any,
    layer: Any,
    query_row: Any,
    query_head: Any,
    scaling: Any,
    softcap: Any,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Program (n, k): what the query heads of key head k take from the tokens of chunk n.

    Left behind are the largest score, the mass (the sum of the exponentials of scores below the largest), and the sum
    of the values, each by its exponential.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items_N3 + 3 * number)
    first = tl.load(items_N3 + 3 * number + 1).to(tl.int32)
    end = tl.load(items_N3 + 3 * number + 2).to(tl.int32)
    if first >= end:
        return
    kind = query_RHD.dtype.element_ty
    layer_step = tl.load(slots_R3 + 3 * row + 1)
    start = layer * layer_step + kv_head * tl.load(slots_R3 + 3 * row + 2)
    keys_LD = tl.load(slots_R3 + 3 * row).to(tl.pointer_type(kind)) + start
    values_LD = keys_LD + LAYERS * layer_step

    groups_G = tl.arange(0, BLOCK_G)
    inside_D = tl.arange(0, BLOCK_D)
    heads_G = kv_head * GROUP + groups_G
    real_GD = (groups_G < GROUP)[:, None] & (inside_D < WIDTH)[None, :]
    query = query_RHD + row * query_row + heads_G[:, None] * query_head + inside_D[None, :]
    query_GD = tl.load(query, mask=real_GD, other=0.0)

    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass_G = tl.zeros([BLOCK_G], tl.float32)
    sum_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(first, end, BLOCK_L):
        tokens_L = begin + tl.arange(0, BLOCK_L)
        seen_L = tokens_L < end
        real_LD = seen_L[:, None] & (inside_D < WIDTH)[None, :]
        at_LD = tokens_L[:, None] * WIDTH + inside_D[None, :]
        # A slot is read by address, of which the compiler knows nothing: rows begin at multiples of 16 bytes.
        key_LD = tl.load(tl.multiple_of(keys_LD + at_LD, [1, 16]), mask=real_LD, other=0.0)
        scores_GL = _product(query_GD, tl.trans(key_LD), WIDE) * scaling
        if CAPPED:  # softcap * tanh(score / softcap) (Gemma 2)
            scores_GL = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores_GL / softcap) + 1.0))
        scores_GL = tl.where(seen_L[None, :], scores_GL, float("-inf"))
        # At least one token of a tile is seen, so this is a number from the first tile on.
        higher_G = tl.maximum(top_G, tl.max(scores_GL, 1))
        weights_GL = tl.exp(scores_GL - higher_G[:, None])
        before_G = tl.exp(top_G - higher_G)
        mass_G = mass_G * before_G + tl.sum(weights_GL, 1)
        value_LD = tl.load(tl.multiple_of(values_LD + at_LD, [1, 16]), mask=real_LD, other=0.0)
        taken_GD = _product(weights_GL.to(kind), value_LD, WIDE)
        sum_GD = sum_GD * before_G[:, None] + taken_GD
        top_G = higher_G

    places_G = number * HEADS + heads_G
    tl.store(tops_NH + places_G, top_G, mask=groups_G < GROUP)
    tl.store(masses_NH + places_G, mass_G, mask=groups_G < GROUP)
    tl.store(sums_NHD + places_G[:, None] * WIDTH + inside_D[None, :], sum_GD, mask=real_GD)


@_kernel
def _combine(
    sums_NHD: Any,
    tops_NH: Any,
    masses_NH: Any,
    bounds: Any,
    out_RHD: Any,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (r, h): the partial sums of a row's chunks, each brought to the largest score of all."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds + row).to(tl.int32)
    end = tl.load(bounds + row + 1).to(tl.int32)
    inside_D = tl.arange(0, BLOCK_D)
    top = tl.full((), float("-inf"), tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(first, end, PARTS):
        chunks_N = begin + tl.arange(0, PARTS)
        there_N = chunks_N < end
        places_N = chunks_N * HEADS + head
        tops_N = tl.load(tops_NH + places_N, mask=there_N, other=float("-inf"))
        masses_N = tl.load(masses_NH + places_N, mask=there_N, other=0.0)
        real_ND = there_N[:, None] & (inside_D < WIDTH)[None, :]
        sums_ND = tl.load(sums_NHD + places_N[:, None] * WIDTH + inside_D[None, :], mask=real_ND, other=0.0)
        higher = tl.maximum(top, tl.max(tops_N, 0))
        weights_N = tl.exp(tops_N - higher)
        before = tl.exp(top - higher)
        mass = mass * before + tl.sum(masses_N * weights_N, 0)
        sum_D = sum_D * before + tl.sum(sums_ND * weights_N[:, None], 0)
        top = higher
    out = (sum_D / mass).to(out_RHD.dtype.element_ty)
    tl.store(out_RHD + (row * HEADS + head) * WIDTH + inside_D, out, mask=inside_D < WIDTH)


def write_rows(
    key_TKD: Tensor, value_TKD: Tensor, slots_R3: Tensor, writes_W3: Tensor, layer: int, layers: int
) -> None:
    """Copy keys and values of packed tokens into the slots of their rows.

    Args:
        key_TKD: of the type that the slots hold.
        value_TKD: like the keys.
        slots_R3: int64, of each row: the address of its keys in layer 0, multiple of 16; the numbers between a layer and
            the next; the numbers between a head and the next. Its values are `layers` layers behind its keys.
        writes_W3: int64 (packed token, row, place in the slot); no place twice.
        layer: whose keys and values they are.
        layers: of the model.
    """
    key_TKD, value_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (key_TKD, value_TKD))
    _, heads, width = key_TKD.shape
    _write[(len(writes_W3),)](
        key_TKD,
        value_TKD,
        slots_R3,
        writes_W3,
        layer,
        *key_TKD.stride()[:2],
        *value_TKD.stride()[:2],
        LAYERS=layers,
        HEADS=heads,
        WIDTH=width,
        BLOCK_K=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(width),
    )


def read_rows(
    query_RHD: Tensor,
    slots_R3: Tensor,
    items_N3: Tensor,
    bounds: Tensor,
    rule: Rule,
    kv_heads: int,
    layer: int,
    layers: int,
) -> Tensor:
    """What each row takes from its slot, [R, H, D], where its chunks say so.

    Args:
        query_RHD: one query per row and head, of the type that the slots hold.
        slots_R3: as in `write_rows`.
        items_N3: int64, the chunks (row, first, end); empty where end is not after first.
        bounds: [R + 1] int64, row r has the chunks bounds[r] to before bounds[r + 1], at least one.
        rule: of the layer; its window is in the chunks.
        kv_heads: K
        layer: that is read.
        layers: of the model.
    """
    query_RHD = query_RHD if query_RHD.stride(2) == 1 else query_RHD.contiguous()
    rows, heads, width = query_RHD.shape
    chunks, group, block_d = len(items_N3), heads // kv_heads, max(_FEWEST, triton.next_power_of_2(width))
    sums_NHD = query_RHD.new_empty((chunks, heads, width), dtype=torch.float32)
    tops_NH, masses_NH = (query_RHD.new_empty((chunks, heads), dtype=torch.float32) for _ in range(2))
    out_RHD = query_RHD.new_empty((rows, heads, width))
    _read[(chunks, kv_heads)](
        query_RHD,
        slots_R3,
        items_N3,
        sums_NHD,
        tops_NH,
        masses_NH,
        layer,
        *query_RHD.stride()[:2],
        width**-0.5 if rule.scaling is None else rule.scaling,
        rule.softcap or 1.0,
        LAYERS=layers,
        HEADS=heads,
        GROUP=group,
        WIDTH=width,
        CAPPED=bool(rule.softcap),
        BLOCK_G=max(_FEWEST, triton.next_power_of_2(group)),
        BLOCK_L=min(max(_FEWEST, _TILE_BYTES // (block_d * query_RHD.element_size())), _LONGEST_TILE),
        BLOCK_D=block_d,
        WIDE=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2,
    )
    _combine[(rows, heads)](
        sums_NHD, tops_NH, masses_NH, bounds, out_RHD, HEADS=heads, WIDTH=width, PARTS=_PARTS, BLOCK_D=block_d
    )
    return out_RHD
