"""Decode attention on a GPU (Triton): rows of any length in one launch, each read to its own end, with the fastest
tile of a small table.

A decode step must read the KV cache at least once. The tokens to read are cut into chunks of about equal length
by the caller. One program per chunk and key head reads for all query heads that share the key head::

    read      chunk (row, first, end)  x  key head     ->  partial sum [G, D], largest score and mass [G]
    combine   row  x  query head                       ->  the row's partial sums, weighted and added

This is flash-decoding (Dao et al. 2023) with a split by length. KV entries are given by address, so that one launch
reads any number of length buckets, and a CUDA graph stays valid when buckets are reallocated.

Products use the cache's dtype, sums float32. TRITON_INTERPRET=1 runs the same kernels on the CPU.

Axes: T packed token, R row, W written token, N chunk, H query heads, K key/value heads, G = H / K, L tokens of a slot,
D width of a head.

The tile determines the order of sums and so their rounding; all engines of a run must use the same tile. The first
engine measures while it holds the lock of a file of the run, and the others read its choice from the file. Without a
file the first tile of the table is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stretto_kernels.choices import RUN_SECONDS, locked, read_choices, write_choices
from stretto_kernels.gpu.launching import kernel, launches_on, tl, triton
from stretto_kernels.rule import Rule

log = logging.getLogger(__name__)

FILE = "tiles.json"
_GAIN = 1.03  # least speedup over the first tile for another tile to be chosen


class Tile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tile of a GPU program: what it reads at a time. `size`: bytes of keys, and the same of values. `warps`: of the
    program; twice as many for float32, whose products do not use tensor cores. `stages`: tiles that are loaded
    ahead."""

    size: int = 16 * 1024
    warps: int = 4
    stages: int = 2


TABLE = (Tile(), Tile(32 * 1024), Tile(16 * 1024, 8), Tile(8 * 1024, 4, 3), Tile(16 * 1024, 4, 3))


def chosen(name: str, seconds: Callable[[Tile], float], record: Path | None) -> Tile:
    """Choose the tile for the case `name` (device, dtype, shape): the one in the file `record`, else the fastest of
    `TABLE` if it gains 3 % over the default, `TABLE[0]`; the choice is then written to the file. Other tiles that the
    device cannot run are skipped. The default, unmeasured, if `record` is None, or lacks the case and cannot be
    written. `seconds`: measures a tile."""
    if record is None:
        return TABLE[0]
    with locked(record, RUN_SECONDS) as written:
        known = read_choices(record, Tile)
        if name in known:
            return known[name]
        if not written:  # another engine may measure otherwise
            return TABLE[0]
        found = _fastest(seconds)
        write_choices(record, {**known, name: found})
    return found


def _fastest(seconds: Callable[[Tile], float]) -> Tile:
    """The fastest tile of `TABLE`; the first one if no other gains enough."""
    times = {TABLE[0]: seconds(TABLE[0])}
    for tile in TABLE[1:]:
        try:
            times[tile] = seconds(tile)
        except Exception as error:  # triton raises its own kinds where registers or shared memory do not suffice
            log.info("%s cannot be run: %s", tile, error)
    best = min(times, key=times.__getitem__)
    return best if times[best] * _GAIN < times[TABLE[0]] else TABLE[0]


#: Supported dtypes of KV entries.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Chunk lengths are multiples of this number of tokens; shorter chunks are not worth a program and a partial sum.
GRAIN = 64

_ALIGNED = 16  # bytes that a thread reads at once
_FEWEST = 16  # least rows and columns of a tensor-core product; padding is not read
_LONGEST_TILE = 128  # most tokens of a tile
_WRITTEN = 16  # tokens that a program of `_write` copies
_PARTS = 16  # most partial sums that `_combine` adds at once
_PARTS_OF_A_WARP = 4


def triton_version() -> str:
    return str(triton.__version__)


def reads_ragged(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels can be used for KV entries of this dtype on this device: bfloat16, float16 or float32 on a
    GPU of Ampere or newer, and heads of `head_dim` numbers that take a multiple of 16 bytes. False in Triton's
    interpreter."""
    return launches_on(device) and dtype in DTYPES and head_dim * dtype.itemsize % _ALIGNED == 0


@kernel
def _write(
    keys_TKD: tl.tensor,
    values_TKD: tl.tensor,
    slots_R4: tl.tensor,
    writes_W3: tl.tensor,
    count: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (w, k) copies the KV entries of a block of written tokens, for key head k, to their rows' slots.
    `writes_W3`: (token, row, place in the slot)."""
    numbers_W, head = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W), tl.program_id(1)
    there_W = numbers_W < count
    tokens_W = tl.load(writes_W3 + 3 * numbers_W, mask=there_W, other=0)
    rows_W = tl.load(writes_W3 + 3 * numbers_W + 1, mask=there_W, other=0)
    places_W = tl.load(writes_W3 + 3 * numbers_W + 2, mask=there_W, other=0)
    pointer = tl.pointer_type(keys_TKD.dtype.element_ty)
    to_W = head * tl.load(slots_R4 + 4 * rows_W + 2) + places_W * WIDTH
    key_to_W = tl.load(slots_R4 + 4 * rows_W).to(pointer) + to_W
    value_to_W = tl.load(slots_R4 + 4 * rows_W + 1).to(pointer) + to_W

    inside_1D = tl.arange(0, BLOCK_D)[None, :]
    real_WD = there_W[:, None] & (inside_1D < WIDTH)
    keys_WD = tl.load(keys_TKD + (tokens_W * key_token + head * key_head)[:, None] + inside_1D, mask=real_WD)
    tl.store(tl.multiple_of(key_to_W[:, None] + inside_1D, [1, 16]), keys_WD, mask=real_WD)
    values_WD = tl.load(values_TKD + (tokens_W * value_token + head * value_head)[:, None] + inside_1D, mask=real_WD)
    tl.store(tl.multiple_of(value_to_W[:, None] + inside_1D, [1, 16]), values_WD, mask=real_WD)


@kernel
def _product(left: tl.tensor, right: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Matrix product with float32 sums. `WIDE`: convert the operands to float32, because Triton's interpreter has no
    bfloat16 product."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@kernel
def _tanh(x: tl.tensor) -> tl.tensor:
    """tanh x with a relative error of 2e-7 (Cephes, tanhf.c). Near 0, where 1 - 2 / (e^2x + 1) would cancel, a series
    is used."""
    square = x * x
    series = square * -5.70498872745e-3 + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(square < 0.625 * 0.625, x + x * square * series, tl.where(x > 0.0, far, -far))


@kernel
def _scores(
    query_GD: tl.tensor,
    key_LD: tl.tensor,
    seen_L: tl.tensor,
    scaling: tl.tensor,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Scores of a tile of keys; minus infinity where `seen_L` is false."""
    scores_GL = _product(query_GD, tl.trans(key_LD), WIDE) * scaling
    if SOFTCAP > 0.0:  # softcap * tanh(score / softcap) (Gemma 2)
        scores_GL = SOFTCAP * _tanh(scores_GL / SOFTCAP)
    return tl.where(seen_L[None, :], scores_GL, float("-inf"))


@kernel
def _read(
    query_RHD: tl.tensor,
    slots_R4: tl.tensor,
    items_N3: tl.tensor,
    sums_NHD: tl.tensor,
    tops_NH: tl.tensor,
    masses_NH: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    scaling: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Program (n, k): partial attention of key head k's query heads over the tokens of chunk n.

    An empty chunk stores nothing. Stores the largest score, the mass (the sum of exp(score - largest score)), and the
    sum of the values weighted by these exponentials.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items_N3 + 3 * number)
    first = tl.load(items_N3 + 3 * number + 1).to(tl.int32)
    end = tl.load(items_N3 + 3 * number + 2).to(tl.int32)
    if first >= end:
        return
    kind = query_RHD.dtype.element_ty
    start = kv_head * tl.load(slots_R4 + 4 * row + 2)
    keys_LD = tl.load(slots_R4 + 4 * row).to(tl.pointer_type(kind)) + start
    values_LD = tl.load(slots_R4 + 4 * row + 1).to(tl.pointer_type(kind)) + start

    groups_G, inside_D = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads_G = kv_head * GROUP + groups_G
    real_GD = (groups_G < GROUP)[:, None] & (inside_D < WIDTH)[None, :]
    query = query_RHD + row * query_row + heads_G[:, None] * query_head + inside_D[None, :]
    query_GD = tl.load(query, mask=real_GD, other=0.0)

    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass_G, sum_GD = tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(first, end, BLOCK_L):
        tokens_L = begin + tl.arange(0, BLOCK_L)
        seen_L = tokens_L < end
        real_LD = seen_L[:, None] & (inside_D < WIDTH)[None, :]
        at_LD = tokens_L[:, None] * WIDTH + inside_D[None, :]
        # The compiler cannot know the alignment of an address: rows start at multiples of 16 bytes.
        key_LD = tl.load(tl.multiple_of(keys_LD + at_LD, [1, 16]), mask=real_LD, other=0.0)
        value_LD = tl.load(tl.multiple_of(values_LD + at_LD, [1, 16]), mask=real_LD, other=0.0)
        scores_GL = _scores(query_GD, key_LD, seen_L, scaling, SOFTCAP, WIDE)
        # Every tile has at least one visible token, so this is finite from the first tile on.
        higher_G = tl.maximum(top_G, tl.max(scores_GL, 1))
        weights_GL = tl.exp(scores_GL - higher_G[:, None])
        before_G = tl.exp(top_G - higher_G)
        mass_G = mass_G * before_G + tl.sum(weights_GL, 1)
        sum_GD = sum_GD * before_G[:, None] + _product(weights_GL.to(kind), value_LD, WIDE)
        top_G = higher_G

    places_G = number * GROUP * tl.num_programs(1) + heads_G
    tl.store(tops_NH + places_G, top_G, mask=groups_G < GROUP)
    tl.store(masses_NH + places_G, mass_G, mask=groups_G < GROUP)
    tl.store(sums_NHD + places_G[:, None] * WIDTH + inside_D[None, :], sum_GD, mask=real_GD)


@kernel
def _combine(
    sums_NHD: tl.tensor,
    tops_NH: tl.tensor,
    masses_NH: tl.tensor,
    bounds: tl.tensor,
    out_RHD: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (r, h): combine the partial sums of the chunks of row r for query head h, rescaled to the largest score
    of all chunks, and write the attention output."""
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


def write_rows(key_TKD: Tensor, value_TKD: Tensor, slots_R4: Tensor, writes_W3: Tensor) -> None:
    """Copy KV entries of packed tokens into their rows' slots.

    Args:
        key_TKD: keys of the packed tokens, in the slots' dtype.
        value_TKD: values, like the keys.
        slots_R4: int64, for each row: address of its keys, address of its values (multiples of 16), and the stride
            between heads, in elements; the fourth number is not read.
        writes_W3: int64 (packed token, row, position in the slot); every position occurs once.
    """
    key_TKD, value_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (key_TKD, value_TKD))
    _, heads, width = key_TKD.shape
    count, strides = len(writes_W3), (*key_TKD.stride()[:2], *value_TKD.stride()[:2])
    sizes = {"WIDTH": width, "BLOCK_W": _WRITTEN, "BLOCK_D": triton.next_power_of_2(width)}
    _write[(triton.cdiv(count, _WRITTEN), heads)](key_TKD, value_TKD, slots_R4, writes_W3, count, *strides, **sizes)


def read_rows(
    query_RHD: Tensor,
    slots_R4: Tensor,
    items_N3: Tensor,
    bounds: Tensor,
    rule: Rule,
    kv_heads: int,
    tile: Tile = TABLE[0],
) -> Tensor:
    """Attention of each row to the chunks of its slot, [R, H, D].

    Args:
        query_RHD: one query per row and head, of the slots' dtype.
        slots_R4: int64, for each row: address of its keys, address of its values, and the stride between heads, in
            elements; the fourth number is not read.
        items_N3: int64, the chunks (row, first token, end); a chunk with end <= first is empty.
        bounds: [R + 1] int64; row r has the chunks bounds[r] to bounds[r + 1] - 1, at least one.
        rule: attention settings of the layer; the chunks already respect its window.
        kv_heads: number K of key/value heads.
        tile: tile size of the kernel.
    """
    query_RHD = query_RHD if query_RHD.stride(2) == 1 else query_RHD.contiguous()
    rows, heads, width = query_RHD.shape
    chunks, group, block_d = len(items_N3), heads // kv_heads, max(_FEWEST, triton.next_power_of_2(width))
    sums_NHD = query_RHD.new_empty((chunks, heads, width), dtype=torch.float32)
    tops_NH, masses_NH = (query_RHD.new_empty((chunks, heads), dtype=torch.float32) for _ in range(2))
    out_RHD = query_RHD.new_empty((rows, heads, width))
    found = (sums_NHD, tops_NH, masses_NH)
    tensors = (query_RHD, slots_R4, items_N3, *found)
    _read[(chunks, kv_heads)](
        *tensors,
        *query_RHD.stride()[:2],
        width**-0.5 if rule.scaling is None else rule.scaling,
        GROUP=group,
        WIDTH=width,
        SOFTCAP=rule.softcap or 0.0,
        BLOCK_G=max(_FEWEST, triton.next_power_of_2(group)),
        BLOCK_L=min(max(_FEWEST, tile.size // (block_d * query_RHD.element_size())), _LONGEST_TILE),
        BLOCK_D=block_d,
        WIDE=triton.knobs.runtime.interpret,
        num_warps=tile.warps if query_RHD.element_size() == 2 else 2 * tile.warps,
        num_stages=tile.stages,
    )
    parts = min(max(_PARTS_OF_A_WARP, triton.next_power_of_2(triton.cdiv(chunks, rows))), _PARTS)
    sizes = {"HEADS": heads, "WIDTH": width, "PARTS": parts, "BLOCK_D": block_d, "num_warps": parts // _PARTS_OF_A_WARP}
    _combine[(rows, heads)](*found, bounds, out_RHD, **sizes)
    return out_RHD
