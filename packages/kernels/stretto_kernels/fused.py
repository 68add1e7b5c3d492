"""Small operations of a layer as single loops on the CPU: norm, rotary embedding of heads, gate.

    norm      sum = x + y;  out = weight · sum / √(mean sum² + eps)      in place of seven calls to torch
    rotate    out = head · cos + turned(head) · sin, after a norm        in place of twelve calls
    gate      out = silu(gate) · up                                      in place of two calls

Numbers are rounded at the same points as by torch's calls, so in bfloat16 the results equal the module's except for the
order of sums. `steps.trace` puts the loops into a traced forward. The tensors of a call must be on the CPU and all in
float32 or all in bfloat16, weights contiguous; nothing here checks this.

Axes: T token, N width of the model, H head, D width of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, compiled, exp, floats, halved, halves, inlined, integers, rounded, widened


@inlined
def inverse_norm(numbers: Any, eps: Any) -> Any:
    """1 / √(mean of squares + eps) of an array."""
    total = F(0.0)
    for n in range(U(len(numbers))):
        total += numbers[n] * numbers[n]
    return F(1.0) / np.sqrt(total / F(len(numbers)) + eps)


@compiled
def _norm(x: Any, y: Any, weight: Any, total: Any, out: Any, rows: Any, width: Any, eps: Any) -> None:
    """Write x + y to `total`, and its RMS norm to `out`, row by row. All tensors are given by address; `y` 0: nothing
    is added, and `total` must be `x`."""
    size = rows * width
    xs, ys, totals, outs = floats(x, size), floats(y, size), floats(total, size), floats(out, size)
    weights = floats(weight, width)
    for row in range(U(rows)):
        first, end = row * U(width), (row + U(1)) * U(width)
        if y != 0:
            for n in range(first, end):
                totals[n] = xs[n] + ys[n]
        share = inverse_norm(totals[first:end], eps)
        for n in range(U(width)):
            outs[first + n] = weights[n] * (totals[first + n] * share)


@compiled
def _norm_halves(x: Any, y: Any, weight: Any, total: Any, out: Any, rows: Any, width: Any, eps: Any) -> None:
    size = rows * width
    xs, ys, totals, outs = halves(x, size), halves(y, size), halves(total, size), halves(out, size)
    weights, wide = halves(weight, width), np.empty(width, np.float32)
    for row in range(U(rows)):
        first = row * U(width)
        if y != 0:
            for n in range(U(width)):
                totals[first + n] = halved(widened(xs[first + n]) + widened(ys[first + n]))
        for n in range(U(width)):
            wide[n] = widened(totals[first + n])
        share = inverse_norm(wide, eps)
        for n in range(U(width)):
            outs[first + n] = halved(widened(weights[n]) * rounded(wide[n] * share))


@inlined
def rotate_head(head: Any, cos: Any, sin: Any, out: Any, at: Any) -> None:
    """Write the rotary embedding of `head` to ``out[at:]``. The embedding rotates by halves: sin multiplies (-second
    half, first half)."""
    half = U(len(head) // 2)
    for d in range(half):
        out[at + d] = head[d] * cos[d] - head[half + d] * sin[d]
        out[at + half + d] = head[half + d] * cos[half + d] + head[d] * sin[half + d]


@compiled
def _rotate(
    x: Any, weight: Any, cos: Any, sin: Any, places: Any, out: Any, rows: Any, heads: Any, width: Any, eps: Any
) -> None:
    """Write the heads of all rows to `out`, normed and rotated. All tensors are given by address; `weight` 0: no norm.
    `places`: int64, for each row its row of `cos` and `sin`; address 0: the row itself."""
    size = rows * heads * width
    xs, weights, outs = floats(x, size), floats(weight, width), floats(out, size)
    head, rows_of_angles = np.empty(width, np.float32), integers(places, rows)
    for row in range(U(rows)):
        angles = 4 * width * (np.int64(row) if places == 0 else rows_of_angles[row])
        coss, sins = floats(cos + angles, width), floats(sin + angles, width)
        for h in range(U(heads)):
            at = (row * U(heads) + h) * U(width)
            for d in range(U(width)):
                head[d] = xs[at + d]
            if weight != 0:
                share = inverse_norm(head, eps)
                for d in range(U(width)):
                    head[d] = weights[d] * (head[d] * share)
            rotate_head(head, coss, sins, outs, at)


@compiled
def _rotate_halves(
    x: Any, weight: Any, cos: Any, sin: Any, places: Any, out: Any, rows: Any, heads: Any, width: Any, eps: Any
) -> None:
    size = rows * heads * width
    xs, weights, outs = halves(x, size), halves(weight, width), halves(out, size)
    head, half, rows_of_angles = np.empty(width, np.float32), U(width // 2), integers(places, rows)
    for row in range(U(rows)):
        angles = 2 * width * (np.int64(row) if places == 0 else rows_of_angles[row])
        coss, sins = halves(cos + angles, width), halves(sin + angles, width)
        for h in range(U(heads)):
            at = (row * U(heads) + h) * U(width)
            for d in range(U(width)):
                head[d] = widened(xs[at + d])
            if weight != 0:
                share = inverse_norm(head, eps)
                for d in range(U(width)):
                    head[d] = rounded(widened(weights[d]) * rounded(head[d] * share))
            for d in range(half):
                late = half + d
                left = rounded(head[d] * widened(coss[d])) - rounded(head[late] * widened(sins[d]))
                right = rounded(head[late] * widened(coss[late])) + rounded(head[d] * widened(sins[late]))
                outs[at + d], outs[at + half + d] = halved(left), halved(right)


@compiled
def _gate(gate: Any, up: Any, out: Any, size: Any) -> None:
    gates, ups, outs = floats(gate, size), floats(up, size), floats(out, size)
    for n in range(U(size)):
        outs[n] = gates[n] / (F(1.0) + exp(-gates[n])) * ups[n]


@compiled
def _gate_halves(gate: Any, up: Any, out: Any, size: Any) -> None:
    gates, ups, outs = halves(gate, size), halves(up, size), halves(out, size)
    for n in range(U(size)):
        number = widened(gates[n])
        outs[n] = halved(rounded(number / (F(1.0) + exp(-number))) * widened(ups[n]))


def norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """RMS norm of `x` over the last axis, times the weight; `eps` is added to the mean of squares."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    loop = _norm if x.dtype is torch.float32 else _norm_halves
    width, address = len(weight_N), x.data_ptr()
    loop(address, 0, weight_N.data_ptr(), address, out.data_ptr(), x.numel() // width, width, F(eps))
    return out


def norm_of_sum(x: Tensor, y: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm over the last axis (`eps` is added to the mean of squares), times the weight."""
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    loop = _norm if x.dtype is torch.float32 else _norm_halves
    width, rows = len(weight_N), x.numel() // len(weight_N)
    loop(x.data_ptr(), y.data_ptr(), weight_N.data_ptr(), total.data_ptr(), out.data_ptr(), rows, width, F(eps))
    return total, out


def rotate(x: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads `x` [1, T, H, D]; `cos` and `sin`: [1, T, D]. Returns [1, H, T, D].
    `weight_D`: weight of an RMS norm of each head before it; None: no norm."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    _, tokens, heads, width = x.shape
    out, weight = torch.empty_like(x), 0 if weight_D is None else weight_D.data_ptr()
    loop = _rotate if x.dtype is torch.float32 else _rotate_halves
    loop(x.data_ptr(), weight, cos.data_ptr(), sin.data_ptr(), 0, out.data_ptr(), tokens, heads, width, F(eps))
    return out.transpose(1, 2)


def gate(asked: Tensor, up: Tensor) -> Tensor:
    """silu(asked) · up."""
    asked, up = asked.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    loop = _gate if up.dtype is torch.float32 else _gate_halves
    loop(asked.data_ptr(), up.data_ptr(), out.data_ptr(), up.numel())
    return out
