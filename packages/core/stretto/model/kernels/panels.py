"""Matrix products with a weight stored in panels, for few and for many tokens.

    weight [N, K]         panels [N / 16, K, 16]
    0 0 0 0 0 0           0 1 2 3 ...     0 1 2 3 ...     the weights of 16 outputs, input by input, in the order
    1 1 1 1 1 1    ─►                                     in which `kernels.tile` reads them; missing outputs of
    2 2 2 2 2 2                                           the last panel are zeros
    . . .

Libraries are optimised for products of hundreds of rows. A decode step has few rows, and reads every weight from
memory. Here each weight is read once for up to 96 tokens, and while a panel is multiplied the next panel is prefetched.
A bfloat16 weight takes half the bytes of a float32 weight, also on CPUs without bfloat16 instructions; with them, pairs
of inputs are multiplied. All sums are float32, and the same for any number of tokens.

Axes: T token, K input width, N output width, P panel, W outputs of a panel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.model.kernels.compiled import F, U, compiled, floats, halves, inlined, widened
from stretto.model.kernels.tile import FLOAT, KINDS, LANES, MANY, PAIRED, ROWS, WIDE, WIDENED, tile

_BLOCK = 96  # tokens whose inputs stay in the core's cache while a panel is read


@compiled
def _pack(weight: Any, out: Any, depth: Any, width: Any, kind: Any) -> None:
    """Copy the weight [width, depth] into panels; tensors are given by address. Beside each other are, of WIDENED,
    output n of a panel's first half and of its second; of PAIRED, an output's weights for two inputs."""
    size, panels = width * depth, (width + WIDE - 1) // WIDE
    numbers, outs = floats(weight, size), floats(out, panels * depth * WIDE)
    narrow, narrow_outs = halves(weight, size), halves(out, panels * depth * WIDE)
    for panel in range(panels):
        for k in range(depth):
            to, first = U((panel * depth + k) * WIDE), panel * WIDE
            for lane in range(WIDE):
                place = U((first + lane) * depth + k)
                if kind != FLOAT:
                    at = to + U(lane % LANES * 2 + lane // LANES)
                    if kind == PAIRED:
                        at = U((panel * depth + k // 2 * 2) * WIDE + lane * 2 + k % 2)
                    narrow_outs[at] = narrow[place] if first + lane < width else np.uint16(0)
                else:
                    outs[to + U(lane)] = numbers[place] if first + lane < width else F(0.0)


@inlined
def _cut(numbers: Any, out: Any, rows: Any, width: Any, start: Any, half: Any) -> None:
    """Copy `rows` rows of WIDE numbers, without the columns beyond the end, to the columns from `start` on of rows of
    `width` numbers. Both are given by address."""
    narrow, narrow_outs = halves(numbers, rows * WIDE), halves(out, rows * width)
    wide, outs = floats(numbers, rows * WIDE), floats(out, rows * width)
    for row in range(U(rows)):
        for n in range(U(width - start)):
            at, to = row * U(WIDE) + n, row * U(width) + U(start) + n
            if half:
                narrow_outs[to] = narrow[at]
            else:
                outs[to] = wide[at]


@inlined
def _biases(bias: Any, panels: Any, width: Any, half: Any) -> Any:
    """The bias in float32, padded with zeros to whole panels; all zeros if the address `bias` is 0."""
    added = np.zeros(panels * WIDE, np.float32)
    if bias != 0:
        for n in range(U(width)):
            added[n] = widened(halves(bias, width)[n]) if half else floats(bias, width)[n]
    return added


@compiled
def _multiply(x: Any, weight: Any, bias: Any, out: Any, rows: Any, depth: Any, width: Any, kind: Any) -> None:
    """Multiply inputs [rows, depth] by a weight in panels; tensors are given by address. `bias` 0: none is added."""
    half, step = kind != FLOAT, 2 if kind == PAIRED else 1  # inputs that are multiplied at once
    size, panels = 2 if half else 4, (width + WIDE - 1) // WIDE
    panel, added, spare = WIDE * depth * size, _biases(bias, panels, width, half), np.empty(ROWS * WIDE, np.float32)
    wide = np.empty(min(rows, _BLOCK) * depth if kind == WIDENED else 0, np.float32)
    stride_in = depth * (2 if kind == PAIRED else 4)
    for first in range(0, rows, _BLOCK):
        end, inputs = min(first + _BLOCK, rows), x + first * stride_in
        if kind == WIDENED:
            narrow = halves(x, rows * depth)
            for n in range(U((end - first) * depth)):
                wide[n] = widened(narrow[U(first * depth) + n])
            inputs = np.int64(wide.ctypes.data)
        tiles, place = (end - first + ROWS - 1) // ROWS, 0
        while place < panels:
            many = rows == 1 and (place + MANY) * WIDE <= width
            now, row, bias_of_panel = weight + place * panel, first, np.int64(added.ctypes.data) + place * WIDE * 4
            for left in range(tiles, 0, -1):
                count = (end - row + left - 1) // left  # tiles of about equal height
                at, to = inputs + (row - first) * stride_in, out + (row * width + place * WIDE) * size
                ahead, pace, whole = now + panel + (tiles - left) * (panel // tiles), WIDE * size * step // tiles, True
                stride = width * size
                if (place + 1) * WIDE > width:
                    to, stride, whole = np.int64(spare.ctypes.data), WIDE * size, False
                tile(
                    (
                        0 if many else count,
                        kind,
                        at,
                        stride_in,
                        now,
                        panel,
                        depth // step,
                        bias_of_panel,
                        to,
                        stride,
                        ahead,
                        pace,
                    )
                )
                if not whole:
                    _cut(to, out + row * width * size, count, width, place * WIDE, half)
                row += count
            place += MANY if many else 1


def _kind(dtype: torch.dtype, depth: int) -> int:
    """Kind of the tiles for products of `depth` inputs. Pairs need an even number."""
    if dtype is not torch.bfloat16:
        return FLOAT
    return PAIRED if PAIRED in KINDS and depth % 2 == 0 else WIDENED


def in_panels(weight_NK: Tensor, out_PKW: Tensor | None = None) -> Tensor:
    """Copy a weight, float32 or bfloat16, into panels [P, K, W]: into `out_PKW` if it is given, else a new tensor."""
    weight_NK = weight_NK.contiguous()
    width, depth = weight_NK.shape
    if out_PKW is None:
        out_PKW = weight_NK.new_empty((-(-width // WIDE), depth, WIDE))
    _pack(weight_NK.data_ptr(), out_PKW.data_ptr(), depth, width, _kind(weight_NK.dtype, depth))
    return out_PKW


def multiply_panels(x: Tensor, weight_PKW: Tensor, bias_N: Tensor | None, width: int) -> Tensor:
    """x · weightᵀ + bias, [..., N], with a weight in panels (`in_panels`), which must have the dtype of `x`. `width`:
    N."""
    x = x.contiguous()
    depth = x.shape[-1]
    out = x.new_empty((*x.shape[:-1], width))
    bias = 0 if bias_N is None else bias_N.data_ptr()
    kind = _kind(x.dtype, depth)
    _multiply(x.data_ptr(), weight_PKW.data_ptr(), bias, out.data_ptr(), x.numel() // depth, depth, width, kind)
    return out
