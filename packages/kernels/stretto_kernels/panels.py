"""Matrix products with a weight stored in panels, for few and for many tokens; a tile of a product stays in registers.

    weight [N, K]         panels [N / 16, K, 16]
    0 0 0 0 0 0           0 1 2 3 ...     0 1 2 3 ...     the weights of 16 outputs, input by input, in the order
    1 1 1 1 1 1    ─►                                     in which a tile reads them; missing outputs of
    2 2 2 2 2 2                                           the last panel are zeros
    . . .

Libraries are optimised for products of hundreds of rows. A decode step has few rows, and reads every weight from
memory. Here each weight is read once for up to 96 tokens, and while a panel is multiplied the next panel is prefetched.
A bfloat16 weight takes half the bytes of a float32 weight, also on CPUs without bfloat16 instructions; with them, pairs
of inputs are multiplied. All sums are float32, and the same for any number of tokens.

Axes: T token, K input width, N output width, P panel, W outputs of a panel: 16, with AVX-512 32.

    inputs [6, K]        panel [K, 16]          sums [6, 16]
    a . . . . .  row     b b b b ... one input  a·b a·b a·b ...      12 vectors of sums, two of weights, one input:
    a . . . . .          . . . .                a·b a·b a·b ...      15 of the 16 registers of AVX2, 27 of AVX-512's 32
                                                                     with 12 rows

LLVM code is needed because numba does not control which numbers stay in registers. Each weight is read once for all
rows of a tile. bfloat16 weights are converted in registers (`WIDENED`): 32 bits hold a number of the first vector in
the lower half and a number of the second in the upper half. A processor with AVX512_BF16 multiplies bfloat16 itself
(`PAIRED`): 32 bits hold an output's weights for two inputs, and one instruction adds both products to its sum. A sum
adds its products in the order of the inputs, so it does not depend on the tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, abilities, code, compiled, floats, halves, inlined, widened, written
from stretto_kernels.large_pages import piece

#: Number of float32 numbers in a vector register.
LANES = 16 if "+avx512f" in abilities() else 8
#: Number of outputs of a panel.
WIDE = 2 * LANES
#: Largest number of rows of a tile.
ROWS = 12 if LANES == 16 else 6
_LINE = 64  # bytes that are fetched together
#: Number of panels of a tile with one row. With a single panel each addition would wait for the one before.
MANY = 4
#: Kinds of tiles: float32; bfloat16 converted to float32; bfloat16 multiplied in pairs of inputs.
FLOAT, WIDENED, PAIRED = range(3)
#: Kinds that this processor computes.
KINDS = (FLOAT, WIDENED, PAIRED) if "+avx512bf16" in abilities() else (FLOAT, WIDENED)


class _BFloat(code.ir.Type if code else object):  # type: ignore[misc]
    """LLVM's type of a bfloat16 number, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _broadcast(builder: Any, number: Any) -> Any:
    ir = code.ir
    empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def read_vectors(builder: Any, address: Any, kind: Any, count: int) -> list[Any]:
    """Generate the loads of `count` vectors of the LLVM type `kind`, with numbers of 32 bits, one behind the other."""
    return [_read(builder, builder.add(address, number(4 * LANES * part)), kind) for part in range(count)]


def weights_at(builder: Any, address: Any, kind: int) -> list[Any]:
    """Generate the loads of the two vectors of a panel's weights: for one input, as float32; if paired, for two inputs,
    as 32 bits."""
    ir = code.ir
    floating, whole = (ir.VectorType(number, LANES) for number in (ir.FloatType(), ir.IntType(32)))
    if kind != WIDENED:
        held = whole if kind == PAIRED else floating
        return read_vectors(builder, address, held, 2)
    return split(builder, _read(builder, address, whole))


def split(builder: Any, both: Any) -> list[Any]:
    """Two vectors of float32 from one of bfloat16, which is held as 32-bit integers: its even numbers and its odd."""
    ir = code.ir
    floating, whole = (ir.VectorType(number, LANES) for number in (ir.FloatType(), ir.IntType(32)))
    parts = (
        builder.shl(both, ir.Constant(whole, [16] * LANES)),
        builder.and_(both, ir.Constant(whole, [0xFFFF0000] * LANES)),
    )
    return [builder.bitcast(part, floating) for part in parts]


def added(builder: Any, held: Any, inputs: Any, weights: Any) -> Any:
    """Generate `held` + `inputs` · `weights` for one input (for two if they are pairs of bfloat16 in 32 bits)."""
    ir = code.ir
    if inputs.type.element == ir.FloatType():
        product = builder.fmul(inputs, weights, flags=("contract",))
        return builder.fadd(held, product, flags=("contract",))
    pairs = ir.VectorType(_BFloat(), 2 * LANES)
    kind = ir.FunctionType(held.type, [held.type, pairs, pairs])
    dot = code.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}")
    return builder.call(dot, [held, builder.bitcast(inputs, pairs), builder.bitcast(weights, pairs)])


def fetch(builder: Any, address: Any) -> None:
    """Generate a prefetch of the memory at an address, which need not be valid."""
    ir = code.ir
    word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    fetch = code.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, pointer), *(ir.Constant(word, n) for n in (0, 3, 1))])


def number(value: int) -> Any:
    """An LLVM constant: a 64-bit integer."""
    return code.ir.Constant(code.ir.IntType(64), value)


def _tile(builder: Any, places: list[Any], rows: int, panels: int, kind: int) -> None:
    """Generate the code that writes bias + x · weights for a tile of `rows` rows and `panels` panels. `places`: the
    arguments of `tile` from `x` on."""
    half = kind != FLOAT
    x, stride, weight, panel, depth, bias, out, out_stride, ahead, pace = places
    floating = code.ir.VectorType(code.ir.FloatType(), LANES)
    added = read_vectors(builder, bias, floating, 2 * panels)
    sums = [[code.alloca_once_value(builder, start) for start in added] for _ in range(rows)]
    inputs = rows_at(builder, x, stride, rows)
    with code.for_range(builder, depth) as loop:
        if panels == 1:
            coming = builder.add(ahead, builder.mul(loop.index, pace))
            for line in range(2):  # a single tile has to fetch all of the two vectors that it reads
                fetch(builder, builder.add(coming, number(line * _LINE)))
        first = builder.add(weight, builder.mul(loop.index, number(WIDE * (2 if kind == WIDENED else 4))))
        starts = rows_at(builder, first, panel, panels)
        vectors = [vector for start in starts for vector in weights_at(builder, start, kind)]
        add_products(builder, inputs, loop.index, vectors, sums, kind)
    write_sums(builder, sums, rows_at(builder, out, out_stride, rows), half)


def rows_at(builder: Any, address: Any, stride: Any, rows: int) -> list[Any]:
    """Generate the addresses of `rows` rows, `stride` bytes apart."""
    return [builder.add(address, builder.mul(stride, number(row))) for row in range(rows)]


def add_products(builder: Any, rows: list[Any], at: Any, weights: list[Any], sums: list[list[Any]], kind: int) -> None:
    """Generate the additions, to the sums of each row (vectors, by address), of the products of the row's input number
    `at`, or for PAIRED its pair, and `weights` (`weights_at`). `rows`: addresses of their inputs."""
    ir = code.ir
    for row, sums_of_row in zip(rows, sums, strict=True):
        place = builder.add(row, builder.mul(at, number(4)))
        one = _broadcast(builder, _read(builder, place, ir.IntType(32) if kind == PAIRED else ir.FloatType()))
        for vector, held in zip(weights, sums_of_row, strict=True):
            builder.store(added(builder, builder.load(held), one, vector), held)


def write_sums(builder: Any, sums: list[list[Any]], rows: list[Any], half: bool) -> None:
    """Generate the stores of the sums (vectors, by address) to rows, given by address; with `half` as bfloat16."""
    for start, sums_of_row in zip(rows, sums, strict=True):
        for part, held in enumerate(sums_of_row):
            _write(builder, builder.load(held), builder.add(start, number(part * LANES * (2 if half else 4))), half)


def _write(builder: Any, numbers: Any, address: Any, half: bool) -> None:
    """Generate the store of a vector at an address; with `half` as bfloat16, rounded to nearest, ties to even."""
    ir = code.ir
    if half:
        whole = ir.VectorType(ir.IntType(32), LANES)
        bits, shift = builder.bitcast(numbers, whole), ir.Constant(whole, [16] * LANES)
        odd = builder.and_(builder.lshr(bits, shift), ir.Constant(whole, [1] * LANES))
        up = builder.add(builder.add(bits, odd), ir.Constant(whole, [0x7FFF] * LANES))
        numbers = builder.trunc(builder.lshr(up, shift), ir.VectorType(ir.IntType(16), LANES))
    builder.store(numbers, builder.inttoptr(address, numbers.type.as_pointer()), align=2 if half else 4)


def _tiles(builder: Any, rows: Any, wanted: Any, *places: Any) -> None:
    """Generate the code of all tiles, with branches that select one by `rows` and the kind `wanted`. `rows` 0 selects
    the tile of one row and `MANY` panels."""
    for kind in KINDS:
        with builder.if_then(builder.icmp_signed("==", wanted, number(kind))):
            for count in range(ROWS + 1):
                with builder.if_then(builder.icmp_signed("==", rows, number(count))):
                    _tile(builder, list(places), max(count, 1), 1 if count else MANY, kind)


#: In a loop, ``tile((rows, kind, x, stride, weight, panel, depth, bias, out, out_stride, ahead, pace))`` multiplies
#: `rows` rows of `depth` inputs at address `x`, `stride` bytes apart, by the panel at address `weight`, adds the
#: float32 numbers at address `bias` and writes rows of WIDE outputs to address `out`, `out_stride` bytes apart.
#: `rows` 0: one row by MANY panels of `panel` bytes. Inputs are float32; for PAIRED pairs of bfloat16, `depth` of them.
#: `ahead`: address to prefetch, which advances by `pace` bytes with each input or pair.
tile: Any = written(_tiles, 12)

_BLOCK = 96  # tokens whose inputs stay in the core's cache while a panel is read


@compiled
def _pack(weight: Any, out: Any, depth: Any, width: Any, kind: Any) -> None:
    """Copy the weight [width, depth] into panels [P, depth, WIDE] at `out`, with zeros for missing outputs. Both are
    addresses of float32 numbers for the `kind` FLOAT, else of bfloat16.

    FLOAT keeps the outputs of a panel in order. WIDENED puts output n of a panel's first half beside output n of its
    second half. PAIRED puts the weights of one output for two inputs beside each other; `depth` must be even.
    """
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
    `width` numbers. `numbers` and `out`: addresses of both; `half`: of bfloat16 numbers, else of float32."""
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
    """The float32 numbers to add to the outputs of all panels: zeros where there is no bias (address 0) or output."""
    added = np.zeros(panels * WIDE, np.float32)
    if bias != 0:
        for n in range(U(width)):
            added[n] = widened(halves(bias, width)[n]) if half else floats(bias, width)[n]
    return added


@compiled
def _multiply(x: Any, weight: Any, bias: Any, out: Any, rows: Any, depth: Any, width: Any, kind: Any) -> None:
    """Write inputs [rows, depth] times a weight in panels to `out`; tensors are given by address. `bias` 0: none is
    added."""
    half, step = kind != FLOAT, 2 if kind == PAIRED else 1  # inputs that are multiplied at once
    size, panels = 2 if half else 4, (width + WIDE - 1) // WIDE
    panel, added, spare = WIDE * depth * size, _biases(bias, panels, width, half), np.empty(ROWS * WIDE, np.float32)
    wide = np.empty(min(rows, _BLOCK) * depth if kind == WIDENED else 0, np.float32)
    gap = depth * (2 if kind == PAIRED else 4)  # bytes from one row of inputs to the next
    for first in range(0, rows, _BLOCK):
        end, inputs = min(first + _BLOCK, rows), x + first * gap
        if kind == WIDENED:
            narrow = halves(x, rows * depth)
            for n in range(U((end - first) * depth)):
                wide[n] = widened(narrow[U(first * depth) + n])
            inputs = np.int64(wide.ctypes.data)
        tiles, place = (end - first + ROWS - 1) // ROWS, 0
        while place < panels:
            many = rows == 1 and (place + MANY) * WIDE <= width
            now, row, added_at = weight + place * panel, first, np.int64(added.ctypes.data) + place * WIDE * 4
            for left in range(tiles, 0, -1):
                count = (end - row + left - 1) // left  # tiles of about equal height
                at, to = inputs + (row - first) * gap, out + (row * width + place * WIDE) * size
                ahead, pace, whole = now + panel + (tiles - left) * (panel // tiles), WIDE * size * step // tiles, True
                stride = width * size
                if (place + 1) * WIDE > width:
                    to, stride, whole = np.int64(spare.ctypes.data), WIDE * size, False
                high = 0 if many else count
                tile((high, kind, at, gap, now, panel, depth // step, added_at, to, stride, ahead, pace))
                if not whole:
                    _cut(to, out + row * width * size, count, width, place * WIDE, half)
                row += count
            place += MANY if many else 1


def kind_of(dtype: torch.dtype, depth: int) -> int:
    """Kind of tile that multiplies `depth` inputs of this dtype: FLOAT for float32; for bfloat16 PAIRED if the CPU has
    such tiles and `depth` is even, else WIDENED."""
    if dtype is not torch.bfloat16:
        return FLOAT
    return PAIRED if PAIRED in KINDS and depth % 2 == 0 else WIDENED


def in_panels(weight_NK: Tensor, out_PKW: Tensor | None = None) -> Tensor:
    """Copy a weight, float32 or bfloat16, into panels [P, K, W]; returns them: `out_PKW` if it is given, else a new
    tensor."""
    weight_NK = weight_NK.contiguous()
    width, depth = weight_NK.shape
    if out_PKW is None:
        out_PKW = piece((-(-width // WIDE), depth, WIDE), weight_NK.dtype)
    _pack(weight_NK.data_ptr(), out_PKW.data_ptr(), depth, width, kind_of(weight_NK.dtype, depth))
    return out_PKW


def multiply_panels(x: Tensor, weight_PKW: Tensor, bias_N: Tensor | None, width: int) -> Tensor:
    """x · weightᵀ + bias (None: 0), [..., N], with a weight in panels (`in_panels`), which must have the dtype of `x`.
    `width`: N."""
    x = x.contiguous()
    depth = x.shape[-1]
    out = x.new_empty((*x.shape[:-1], width))
    bias = 0 if bias_N is None else bias_N.data_ptr()
    kind = kind_of(x.dtype, depth)
    _multiply(x.data_ptr(), weight_PKW.data_ptr(), bias, out.data_ptr(), x.numel() // depth, depth, width, kind)
    return out
