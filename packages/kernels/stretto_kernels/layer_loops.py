"""Loops of a decoder layer's training forward and backward pass on the CPU: norm, heads, gate, sums.

Each loop goes over rows (tokens) once and keeps a row in the core's cache, in place of five to ten calls to torch that
each read and write all rows. Sums are computed in float32. A tensor of the dtype of computation is float32 or bfloat16
(`half`); the residual stream, norm weights and angles are float32. Tensors are given by address.

With several threads, each takes a share of the rows; sums over rows have a row of their own for each thread.

Axes: T token, N width of the model, A all heads of a row, D width of a head, I width of the gate.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto_kernels.compiled import AVAILABLE, F, U, compiled, exp, floats, halved, halves, inlined, widened
from stretto_kernels.fused import inverse_norm, rotate_head

#: Weights of the norms of queries and of keys.
Weights = tuple[Tensor | None, Tensor | None]

#: Numbers of a share at least; a thread's start takes as long as some ten thousand of them.
_SHARE = 1 << 17


def loop(function: Any) -> Any:
    """Decorator: a compiled loop (see `compiled`) that releases the GIL."""
    loop = compiled(function)
    if AVAILABLE:
        loop.targetoptions["nogil"] = True
    return loop


@inlined
def load(address: Any, at: Any, row: Any, half: Any) -> None:
    """Fill `row` (float32) with the numbers from index `at` on; `half`: they are bfloat16."""
    count = U(len(row))
    if half:
        numbers = halves(address, at + count)
        for n in range(count):
            row[n] = widened(numbers[at + n])
    else:
        wide = floats(address, at + count)
        for n in range(count):
            row[n] = wide[at + n]


@inlined
def store(address: Any, at: Any, row: Any, half: Any) -> None:
    """Write `row` (float32) from index `at` on; `half`: rounded to bfloat16."""
    count = U(len(row))
    if half:
        numbers = halves(address, at + count)
        for n in range(count):
            numbers[at + n] = halved(row[n])
    else:
        wide = floats(address, at + count)
        for n in range(count):
            wide[at + n] = row[n]


@inlined
def _norm_gradient(row: Any, gradient: Any, weights: Any, sums: Any, share: Any) -> None:
    """Overwrite the gradient of ``weights · share · row`` by the gradient of `row`, and add to the weights' gradient
    `sums`. `share` depends on the row."""
    count = U(len(row))
    along = F(0.0)
    for n in range(count):
        sums[n] += gradient[n] * (row[n] * share)
        gradient[n] *= weights[n]
        along += gradient[n] * row[n]
    along *= share * share / F(len(row))
    for n in range(count):
        gradient[n] = share * (gradient[n] - row[n] * along)


@loop
def _norm(
    first: Any, end: Any, part: Any, x: Any, added: Any, total: Any, weight: Any, out: Any, width: Any, eps: Any,
    half: Any,
) -> None:  # fmt: skip
    """Write x + added to `total`, and the norm of the sum to `out`, for a thread's rows (`over`). `added` 0: write only
    the norm of x. `weight` 0: write only the sum."""
    weights = floats(weight, width)
    row, more = np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(U(first), U(end)):
        at = t * U(width)
        load(x, at, row, False)
        if added != 0:
            load(added, at, more, half)
            for n in range(U(width)):
                row[n] += more[n]
            store(total, at, row, False)
        if weight != 0:
            share = inverse_norm(row, eps)
            for n in range(U(width)):
                row[n] = weights[n] * (row[n] * share)
            store(out, at, row, half)


@loop
def _norm_back(
    first: Any, end: Any, part: Any, x: Any, weight: Any, gradient: Any, beside: Any, sums: Any, out: Any, copy: Any,
    width: Any, eps: Any, half: Any,
) -> None:  # fmt: skip
    """Write the gradient of x, computed from that of x's norm, plus `beside` (0: nothing) to `out`, for a thread's rows
    (`over`), and add the gradient of the weight to row `part` of `sums`. `copy`: gets the result in the dtype of
    computation; 0: none."""
    weights = floats(weight, width)
    summed = floats(sums + 4 * part * width, width)
    row, back, more = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(U(first), U(end)):
        at = t * U(width)
        load(x, at, row, False)
        load(gradient, at, back, half)
        _norm_gradient(row, back, weights, summed, inverse_norm(row, eps))
        if beside != 0:
            load(beside, at, more, False)
            for n in range(U(width)):
                back[n] += more[n]
        store(out, at, back, False)
        if copy != 0:
            store(copy, at, back, half)


@cache
def _heads(width: int) -> Any:
    """The loop of `heads` for this width of a head. The width is a constant of the loop, because the compiler unrolls
    short rows of a known length: for large batches of heads of 16 that takes half the time."""

    @loop
    def normed_and_rotated(
        first: Any, end: Any, part: Any, x: Any, begin: Any, stride: Any, weight: Any, cos: Any, sin: Any, out: Any,
        heads: Any, eps: Any, half: Any,
    ) -> None:  # fmt: skip
        """Write a thread's rows (`over`) of heads to `out`, normed and rotated. In x, heads start at column `begin` of
        rows of `stride` numbers. `weight` 0: no norm."""
        weights = floats(weight, width)
        coss, sins = np.empty(width, np.float32), np.empty(width, np.float32)
        head, turned = np.empty(width, np.float32), np.empty(width, np.float32)
        for t in range(U(first), U(end)):
            load(cos, t * U(width), coss, False)
            load(sin, t * U(width), sins, False)
            for h in range(U(heads)):
                load(x, t * U(stride) + U(begin) + h * U(width), head, half)
                if weight != 0:
                    share = inverse_norm(head, eps)
                    for d in range(U(width)):
                        head[d] = weights[d] * (head[d] * share)
                rotate_head(head, coss, sins, turned, U(0))
                store(out, (t * U(heads) + h) * U(width), turned, half)

    return normed_and_rotated


@cache
def _heads_back(width: int) -> Any:
    """The loop of `heads_back` for this width of a head, a constant of the loop (see `_heads`)."""

    @loop
    def gradients(
        first: Any, end: Any, part: Any, x: Any, begin: Any, stride: Any, weight: Any, cos: Any, sin: Any,
        gradient: Any, sums: Any, out: Any, heads: Any, eps: Any, half: Any,
    ) -> None:  # fmt: skip
        """Write the gradient of the columns of x, computed from that of the heads, to `out`, which is laid out as x,
        for a thread's rows (`over`). With a weight (not 0), add its gradient to row `part` of `sums`."""
        weights, middle = floats(weight, width), U(width // 2)
        summed = floats(sums + 4 * part * width, width)
        coss, sins = np.empty(width, np.float32), np.empty(width, np.float32)
        head, turned, back = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        for t in range(U(first), U(end)):
            load(cos, t * U(width), coss, False)
            load(sin, t * U(width), sins, False)
            for h in range(U(heads)):
                at = t * U(stride) + U(begin) + h * U(width)
                load(gradient, (t * U(heads) + h) * U(width), turned, half)
                for d in range(middle):
                    back[d] = turned[d] * coss[d] + turned[middle + d] * sins[middle + d]
                    back[middle + d] = turned[middle + d] * coss[middle + d] - turned[d] * sins[d]
                if weight != 0:
                    load(x, at, head, half)
                    _norm_gradient(head, back, weights, summed, inverse_norm(head, eps))
                store(out, at, back, half)

    return gradients


@loop
def _gate(first: Any, end: Any, part: Any, both: Any, out: Any, width: Any, half: Any) -> None:
    """Write silu(gate) · up to `out`, of gate and up side by side in `both`, for a thread's rows (`over`)."""
    asked, up = np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(U(first), U(end)):
        at = t * U(width)
        load(both, at + at, asked, half)
        load(both, at + at + U(width), up, half)
        for n in range(U(width)):
            up[n] *= asked[n] / (F(1.0) + exp(-asked[n]))
        store(out, at, up, half)


@loop
def _gate_back(
    first: Any, end: Any, part: Any, both: Any, gradient: Any, out: Any, backs: Any, width: Any, half: Any
) -> None:
    """Write the gradient of gate and up, side by side, to `backs`, and the gate's result once more to `out`, for a
    thread's rows (`over`)."""
    asked, up, back = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(U(first), U(end)):
        at = t * U(width)
        load(both, at + at, asked, half)
        load(both, at + at + U(width), up, half)
        load(gradient, at, back, half)
        for n in range(U(width)):
            share = F(1.0) / (F(1.0) + exp(-asked[n]))
            silu = asked[n] * share
            slope = share + silu * (F(1.0) - share)
            asked[n] = back[n] * up[n] * slope
            back[n] *= silu
            up[n] *= silu
        store(out, at, up, half)
        store(backs, at + at, asked, half)
        store(backs, at + at + U(width), back, half)


def parts_of(rows: int, width: int) -> int:
    """Number of threads that share `rows` rows of `width` numbers: at most torch's, and fewer for little work."""
    return max(1, min(torch.get_num_threads(), rows, rows * width // _SHARE))


def over(looped: Any, rows: int, parts: int, *arguments: Any) -> None:
    """Run the loop `looped` over all rows, by `parts` threads. The loop gets its first row, the row after its last, the
    number of the part, and the arguments, tensors by address (0 for None). An error in any thread is raised when all
    have ended."""
    given = [0 if one is None else one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
    edges = [rows * part // parts for part in range(parts + 1)]
    shares = [(first, end, part, *given) for part, (first, end) in enumerate(pairwise(edges))]
    if parts == 1:
        looped(*shares[0])
        return
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [pool.submit(looped, *share) for share in shares[1:]]
        looped(*shares[0])
    for other in others:
        other.result()


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16


def norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMS norm of the residual stream, times the weight, in the dtype of computation, `dtype`."""
    (rows, width), out = x_TN.shape, torch.empty_like(x_TN, dtype=dtype)
    over(_norm, rows, parts_of(rows, width), x_TN, None, None, weight_N, out, width, F(eps), is_half(out))
    return out


def norm_of_sum(x_TN: Tensor, added_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream and a layer's output, in float32, and its RMS norm times the weight, in the dtype
    of `added_TN`."""
    (rows, width), total, out = x_TN.shape, torch.empty_like(x_TN), torch.empty_like(added_TN)
    over(_norm, rows, parts_of(rows, width), x_TN, added_TN, total, weight_N, out, width, F(eps), is_half(out))
    return total, out


def add(x_TN: Tensor, added_TN: Tensor) -> Tensor:
    """The sum of the residual stream and a layer's output, in float32."""
    (rows, width), total = x_TN.shape, torch.empty_like(x_TN)
    over(_norm, rows, parts_of(rows, width), x_TN, added_TN, total, None, None, width, F(0.0), is_half(added_TN))
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
    (rows, width), half, out = x_TN.shape, is_half(gradient_TN), torch.empty_like(x_TN)
    parts = parts_of(rows, width)
    sums = x_TN.new_zeros(parts, width)
    copy = torch.empty_like(gradient_TN) if half and copied else None
    tensors = (x_TN, weight_N, gradient_TN, beside_TN, sums, out, copy)
    over(_norm_back, rows, parts, *tensors, width, F(eps), half)
    return out, out if copy is None else copy, sums.sum(0)


def heads(
    x_TA: Tensor, counts: tuple[int, int], weights_D: Weights, eps: float, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and of keys, the first columns of `x`, after an RMS norm unless its weight is None.
    `counts`: numbers of both. `weights_D`: of the norms of both. `angles`: cosines and sines [T, D]. Returns [T, heads,
    D] of both."""
    (rows, stride), width = x_TA.shape, angles[0].shape[1]
    outs, begin = [x_TA.new_empty(rows, count, width) for count in counts], 0
    for out, count, weight_D in zip(outs, counts, weights_D, strict=True):
        parts, sizes = parts_of(rows, count * width), (count, F(eps), is_half(x_TA))
        over(_heads(width), rows, parts, x_TA, begin, stride, weight_D, *angles, out, *sizes)
        begin += count * width
    return outs[0], outs[1]


def heads_back(
    x_TA: Tensor,
    weights_D: Weights,
    eps: float,
    angles: tuple[Tensor, Tensor],
    gradients_THD: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of `x`, from those of the results of `heads` and of the values beside them (`gradients_THD`: queries,
    keys, values); and those of the weights [D] of queries and of keys, None without a weight."""
    stride, width = x_TA.shape[1], angles[0].shape[1]
    out_TA, begin, of_weights = torch.empty_like(x_TA), 0, list[Tensor | None]()
    looped = _heads_back(width)
    for gradient_THD, weight_D in zip(gradients_THD, weights_D, strict=False):
        rows, count, _ = gradient_THD.shape
        parts, sizes = parts_of(rows, count * width), (count, F(eps), is_half(x_TA))
        sums = angles[0].new_zeros(parts, width)
        over(looped, rows, parts, x_TA, begin, stride, weight_D, *angles, gradient_THD, sums, out_TA, *sizes)
        of_weights.append(None if weight_D is None else sums.sum(0))
        begin += count * width
    out_TA[:, begin:].copy_(gradients_THD[2].flatten(1))
    return out_TA, of_weights[0], of_weights[1]


def gate(both_T2I: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], of gate and up side by side."""
    rows, width = both_T2I.shape[0], both_T2I.shape[1] // 2
    out = both_T2I.new_empty(rows, width)
    over(_gate, rows, parts_of(rows, width), both_T2I, out, width, is_half(out))
    return out


def gate_back(both_T2I: Tensor, gradient_TI: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `gate` once more, [T, I], and the gradient of gate and up side by side, from that of the result."""
    (rows, width), out, backs = gradient_TI.shape, torch.empty_like(gradient_TI), torch.empty_like(both_T2I)
    over(_gate_back, rows, parts_of(rows, width), both_T2I, gradient_TI, out, backs, width, is_half(out))
    return out, backs
