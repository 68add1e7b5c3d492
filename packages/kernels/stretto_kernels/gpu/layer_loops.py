"""Kernels of a decoder layer's training forward and backward pass on a GPU (Triton): the functions of
`stretto_kernels.layer_loops`.

Each kernel reads its tensors once and writes its results once, in place of five to ten operations of torch that each
pass over all rows. Sums are computed in float32. A tensor of the dtype of computation is bfloat16 or float32; the
residual stream, norm weights and angles are float32.

Gradients of weights are sums over rows. Each program adds up some rows, and torch adds up the programs, so that the
same numbers give the same bits. TRITON_INTERPRET=1 runs the kernels on the CPU.

Axes: T token, N width of the model, A all heads of a row, H head, D width of a head, I width of the gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto_kernels.gpu.launching import kernel, launches_on, tl
from stretto_kernels.layer_loops import Weights

_PROGRAMS = 1024  # that share the rows of a sum over rows
_WIDEST = 1 << 14  # numbers of a row that a program holds in registers
_TILE = 2048  # numbers of heads that a program holds
_GATED = 1024  # numbers of a row that a program of the gate computes


def computes(device: torch.device, width: int) -> bool:
    """Whether the kernels can be used on this device for a model of this width, at most 16,384: a GPU of Ampere or
    newer. False in Triton's interpreter."""
    return launches_on(device) and width <= _WIDEST


@kernel
def _norm(
    x: tl.tensor,
    added: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program t writes row t of x + added to `total`, and the norm of the sum to `out`. Without `ADDS` the norm of x;
    without `NORMS` only the sum."""
    columns_N = tl.arange(0, BLOCK)
    at_N, real_N = tl.program_id(0).to(tl.int64) * WIDTH + columns_N, columns_N < WIDTH
    row_N = tl.load(x + at_N, mask=real_N, other=0.0)
    if ADDS:
        row_N += tl.load(added + at_N, mask=real_N, other=0.0).to(tl.float32)
        tl.store(total + at_N, row_N, mask=real_N)
    if NORMS:
        share = tl.rsqrt(tl.sum(row_N * row_N) / WIDTH + eps)
        normed_N = tl.load(weight + columns_N, mask=real_N, other=0.0) * (row_N * share)
        tl.store(out + at_N, normed_N.to(out.dtype.element_ty), mask=real_N)


@kernel
def _norm_back(
    x: tl.tensor,
    weight: tl.tensor,
    gradient: tl.tensor,
    beside: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    copy: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BESIDE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes the gradients of some rows of x to `out` (and, with `COPY`, in the dtype of computation to
    `copy`), and its part of the weight's gradient to its row of `sums`. `BESIDE`: another gradient of x is added."""
    columns_N = tl.arange(0, BLOCK)
    real_N = columns_N < WIDTH
    weights_N = tl.load(weight + columns_N, mask=real_N, other=0.0)
    sums_N = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at_N = tl.cast(row, tl.int64) * WIDTH + columns_N
        row_N = tl.load(x + at_N, mask=real_N, other=0.0)
        back_N = tl.load(gradient + at_N, mask=real_N, other=0.0).to(tl.float32)
        share = tl.rsqrt(tl.sum(row_N * row_N) / WIDTH + eps)
        sums_N += back_N * (row_N * share)
        back_N *= weights_N
        along = tl.sum(back_N * row_N) * share * share / WIDTH
        back_N = share * (back_N - row_N * along)
        if BESIDE:
            back_N += tl.load(beside + at_N, mask=real_N, other=0.0)
        tl.store(out + at_N, back_N, mask=real_N)
        if COPY:
            tl.store(copy + at_N, back_N.to(copy.dtype.element_ty), mask=real_N)
    tl.store(sums + tl.program_id(0) * WIDTH + columns_N, sums_N, mask=real_N)


@kernel
def _heads(
    x: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (t, b) writes a block of token t's heads, normed and rotated, to `out`: queries first, then keys. A
    head's lower and upper half are two tiles, since rotation pairs them."""
    HALF: tl.constexpr = WIDTH // 2
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_H - 1) // BLOCK_H  # of queries
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_key = block >= BLOCKS
    heads_H = tl.where(is_key, QUERIES + (block - BLOCKS) * BLOCK_H, block * BLOCK_H) + tl.arange(0, BLOCK_H)
    columns_D = tl.arange(0, BLOCK_D)
    half_D = columns_D < HALF
    real_HD = (heads_H < tl.where(is_key, QUERIES + KEYS, QUERIES))[:, None] & half_D[None, :]
    inside_HD = heads_H[:, None] * WIDTH + columns_D[None, :]
    head = x + token * STRIDE + inside_HD
    low_HD = tl.load(head, mask=real_HD, other=0.0).to(tl.float32)
    high_HD = tl.load(head + HALF, mask=real_HD, other=0.0).to(tl.float32)
    if NORMS:
        weight = tl.where(is_key, key_weight, query_weight) + columns_D
        share_H = tl.rsqrt(tl.sum(low_HD * low_HD + high_HD * high_HD, 1) / WIDTH + eps)
        low_HD *= share_H[:, None]
        high_HD *= share_H[:, None]
        low_HD *= tl.load(weight, mask=half_D, other=0.0)[None, :]
        high_HD *= tl.load(weight + HALF, mask=half_D, other=0.0)[None, :]
    angle = token * WIDTH + columns_D
    low_cos, high_cos = tl.load(cos + angle, mask=half_D), tl.load(cos + HALF + angle, mask=half_D)
    low_sin, high_sin = tl.load(sin + angle, mask=half_D), tl.load(sin + HALF + angle, mask=half_D)
    turned = out + token * ((QUERIES + KEYS) * WIDTH) + inside_HD
    low_turned = low_HD * low_cos[None, :] - high_HD * low_sin[None, :]
    high_turned = high_HD * high_cos[None, :] + low_HD * high_sin[None, :]
    tl.store(turned, low_turned.to(out.dtype.element_ty), mask=real_HD)
    tl.store(turned + HALF, high_turned.to(out.dtype.element_ty), mask=real_HD)


@kernel
def _turned_back(
    low_HD: tl.tensor, high_HD: tl.tensor, cos: tl.tensor, sin: tl.tensor, half_D: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate the gradients of a head's halves back; returns those of the halves before the rotation."""
    low_cos, high_cos = tl.load(cos, mask=half_D)[None, :], tl.load(cos + HALF, mask=half_D)[None, :]
    low_sin, high_sin = tl.load(sin, mask=half_D)[None, :], tl.load(sin + HALF, mask=half_D)[None, :]
    return low_HD * low_cos + high_HD * high_sin, high_HD * high_cos - low_HD * low_sin


@kernel
def _heads_back(
    x: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (p, b) writes the gradient of a block of heads (queries, then keys, then values) of some tokens to `out`,
    which is laid out as x, and its part of the weight's gradient to its row of `sums`. The gradient of values is
    copied."""
    HALF: tl.constexpr = WIDTH // 2
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_H - 1) // BLOCK_H  # of queries
    OTHERS: tl.constexpr = (KEYS + BLOCK_H - 1) // BLOCK_H  # of keys, and of values
    block = tl.program_id(1)
    is_key, is_value = block >= BLOCKS, block >= BLOCKS + OTHERS
    place = tl.where(is_value, block - BLOCKS - OTHERS, tl.where(is_key, block - BLOCKS, block))
    first, count = tl.where(is_value, QUERIES + KEYS, tl.where(is_key, QUERIES, 0)), tl.where(is_key, KEYS, QUERIES)
    gradient = tl.where(is_value, values, tl.where(is_key, keys, queries))
    heads_H, columns_D = place * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    half_D = columns_D < HALF
    real_HD, inside_HD = (heads_H < count)[:, None] & half_D[None, :], heads_H[:, None] * WIDTH + columns_D[None, :]
    low_sums, high_sums = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        token = tl.cast(row, tl.int64)
        turned = gradient + token * count * WIDTH + inside_HD
        low_back = tl.load(turned, mask=real_HD, other=0.0).to(tl.float32)
        high_back = tl.load(turned + HALF, mask=real_HD, other=0.0).to(tl.float32)
        at = token * STRIDE + first * WIDTH + inside_HD
        if not is_value:
            angle = token * WIDTH + columns_D
            low_back, high_back = _turned_back(low_back, high_back, cos + angle, sin + angle, half_D, HALF)
            if NORMS:
                low_HD = tl.load(x + at, mask=real_HD, other=0.0).to(tl.float32)
                high_HD = tl.load(x + at + HALF, mask=real_HD, other=0.0).to(tl.float32)
                share_H1 = tl.rsqrt(tl.sum(low_HD * low_HD + high_HD * high_HD, 1) / WIDTH + eps)[:, None]
                low_sums += low_back * (low_HD * share_H1)
                high_sums += high_back * (high_HD * share_H1)
                weight = tl.where(is_key, key_weight, query_weight) + columns_D
                low_back *= tl.load(weight, mask=half_D, other=0.0)[None, :]
                high_back *= tl.load(weight + HALF, mask=half_D, other=0.0)[None, :]
                along_H1 = tl.sum(low_back * low_HD + high_back * high_HD, 1)[:, None] * share_H1 * share_H1 / WIDTH
                low_back = share_H1 * (low_back - low_HD * along_H1)
                high_back = share_H1 * (high_back - high_HD * along_H1)
        tl.store(out + at, low_back.to(out.dtype.element_ty), mask=real_HD)
        tl.store(out + at + HALF, high_back.to(out.dtype.element_ty), mask=real_HD)
    if NORMS:
        own, mine_D = sums + (tl.program_id(0) * (BLOCKS + OTHERS) + block) * WIDTH + columns_D, half_D & ~is_value
        tl.store(own, tl.sum(low_sums, 0), mask=mine_D)
        tl.store(own + HALF, tl.sum(high_sums, 0), mask=mine_D)


@kernel
def _gate(both: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program (t, b) writes silu(gate) · up for a block of row t, of gate and up side by side in `both`."""
    columns_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at_I, real_I = tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns_I, columns_I < WIDTH
    asked_I = tl.load(both + at_I, mask=real_I, other=0.0).to(tl.float32)
    up_I = tl.load(both + WIDTH + at_I, mask=real_I, other=0.0).to(tl.float32)
    gated_I = up_I * (asked_I / (1.0 + tl.exp(-asked_I)))
    to_I = tl.program_id(0).to(tl.int64) * WIDTH + columns_I
    tl.store(out + to_I, gated_I.to(out.dtype.element_ty), mask=real_I)


@kernel
def _gate_back(
    both: tl.tensor, gradient: tl.tensor, out: tl.tensor, backs: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Program (t, b) writes a block of row t: the gradients of gate and up, side by side, to `backs`, and the gate's
    result once more to `out`."""
    columns_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_I, to_I = columns_I < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + columns_I
    at_I = tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns_I
    asked_I = tl.load(both + at_I, mask=real_I, other=0.0).to(tl.float32)
    up_I = tl.load(both + WIDTH + at_I, mask=real_I, other=0.0).to(tl.float32)
    back_I = tl.load(gradient + to_I, mask=real_I, other=0.0).to(tl.float32)
    share_I = 1.0 / (1.0 + tl.exp(-asked_I))
    silu_I = asked_I * share_I
    slope_I = share_I + silu_I * (1.0 - share_I)
    tl.store(out + to_I, (up_I * silu_I).to(out.dtype.element_ty), mask=real_I)
    tl.store(backs + at_I, (back_I * up_I * slope_I).to(backs.dtype.element_ty), mask=real_I)
    tl.store(backs + WIDTH + at_I, (back_I * silu_I).to(backs.dtype.element_ty), mask=real_I)


def _row(width: int) -> dict[str, int]:
    """Launch settings of a kernel for rows of this width: the numbers of a row that a program holds (`BLOCK`), and its
    warps."""
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def _tile(heads: int, width: int) -> dict[str, int]:
    """Launch settings of a kernel for heads of this width: the heads of a program (`BLOCK_H`), the numbers that it
    holds of half a head (`BLOCK_D`), and its warps."""
    half = 1 << (width // 2 - 1).bit_length()
    block = min(max(1, _TILE // (2 * half)), 1 << (heads - 1).bit_length())
    return {"BLOCK_H": block, "BLOCK_D": half, "num_warps": min(4, max(1, block * half // 256))}


def norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMS norm of the residual stream, times the weight, in the dtype of computation, `dtype`."""
    (rows, width), out = x_TN.shape, torch.empty_like(x_TN, dtype=dtype)
    _norm[(rows,)](x_TN, None, None, weight_N, out, eps, WIDTH=width, ADDS=False, NORMS=True, **_row(width))
    return out


def norm_of_sum(x_TN: Tensor, added_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream and a layer's output, in float32, and its RMS norm times the weight, in the dtype
    of `added_TN`."""
    (rows, width), total, out = x_TN.shape, torch.empty_like(x_TN), torch.empty_like(added_TN)
    _norm[(rows,)](x_TN, added_TN, total, weight_N, out, eps, WIDTH=width, ADDS=True, NORMS=True, **_row(width))
    return total, out


def add(x_TN: Tensor, added_TN: Tensor) -> Tensor:
    """The sum of the residual stream and a layer's output, in float32."""
    (rows, width), total = x_TN.shape, torch.empty_like(x_TN)
    _norm[(rows,)](x_TN, added_TN, total, None, None, 0.0, WIDTH=width, ADDS=True, NORMS=False, **_row(width))
    return total


def norm_back(
    x_TN: Tensor,
    weight_N: Tensor,
    eps: float,
    gradient_TN: Tensor,
    beside_TN: Tensor | None = None,
    *,
    copied: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of x again (in the dtype of computation if `copied`, else the same tensor), and of the weight,
    from the gradient of x's norm. `beside_TN`: another gradient of x, which is added; None: none."""
    (rows, width), out = x_TN.shape, torch.empty_like(x_TN)
    programs = min(rows, _PROGRAMS)
    sums = x_TN.new_empty(programs, width)
    copy = torch.empty_like(gradient_TN) if copied and gradient_TN.dtype is not torch.float32 else None
    flags = {"BESIDE": beside_TN is not None, "COPY": copy is not None}
    tensors = (x_TN, weight_N, gradient_TN, beside_TN, sums, out, copy)
    _norm_back[(programs,)](*tensors, rows, eps, WIDTH=width, **flags, **_row(width))
    return out, out if copy is None else copy, sums.sum(0)


def heads(
    x_TA: Tensor, counts: tuple[int, int], weights_D: Weights, eps: float, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and of keys (numbers: `counts`), the first columns of `x`, after an RMS norm of both
    or of neither (`weights_D` None). Returns [T, heads, D] of both: views of one tensor."""
    (rows, stride), (queries, keys), width = x_TA.shape, counts, angles[0].shape[1]
    out, tile = x_TA.new_empty(rows, queries + keys, width), _tile(max(counts), width)
    sizes = {"STRIDE": stride, "QUERIES": queries, "KEYS": keys, "WIDTH": width, "NORMS": weights_D[0] is not None}
    blocks = sum(-(-count // tile["BLOCK_H"]) for count in counts)
    _heads[(rows, blocks)](x_TA, *weights_D, *angles, out, eps, **sizes, **tile)
    return out[:, :queries], out[:, queries:]


def heads_back(
    x_TA: Tensor,
    weights_D: Weights,
    eps: float,
    angles: tuple[Tensor, Tensor],
    gradients_THD: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `x` and of the norms' weights (None without a norm), from those of the rotated queries and keys and
    of the values (`gradients_THD`)."""
    (rows, queries, width), keys, out_TA = gradients_THD[0].shape, gradients_THD[1].shape[1], torch.empty_like(x_TA)
    tile, programs = _tile(max(queries, keys), width), min(rows, _PROGRAMS)
    normed, stride = weights_D[0] is not None, x_TA.shape[1]
    sizes = {"STRIDE": stride, "QUERIES": queries, "KEYS": keys, "WIDTH": width, "NORMS": normed}
    of_queries, of_keys = (-(-count // tile["BLOCK_H"]) for count in (queries, keys))
    sums = angles[0].new_empty(programs, of_queries + of_keys, width) if normed else None
    tensors = (x_TA, *weights_D, *angles, *gradients_THD, sums, out_TA)
    _heads_back[(programs, of_queries + 2 * of_keys)](*tensors, rows, eps, **sizes, **tile)
    if sums is None:
        return out_TA, None, None
    found = sums.sum(0)
    return out_TA, _added(found[:of_queries]), _added(found[of_queries:])


def _added(sums_BD: Tensor) -> Tensor:
    return sums_BD[0] if len(sums_BD) == 1 else sums_BD.sum(0)


def gate(both_T2I: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], of gate and up side by side."""
    rows, width = both_T2I.shape[0], both_T2I.shape[1] // 2
    out = both_T2I.new_empty(rows, width)
    _gate[(rows, -(-width // _GATED))](both_T2I, out, WIDTH=width, BLOCK=_GATED)
    return out


def gate_back(both_T2I: Tensor, gradient_TI: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `gate` once more, [T, I], and the gradient of gate and up side by side, from that of the result."""
    (rows, width), out, backs = gradient_TI.shape, torch.empty_like(gradient_TI), torch.empty_like(both_T2I)
    _gate_back[(rows, -(-width // _GATED))](both_T2I, gradient_TI, out, backs, WIDTH=width, BLOCK=_GATED)
    return out, backs
