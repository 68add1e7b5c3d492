"""Decode attention on the CPU: rows of any length in one call, each read to its own end.

A step has one query per row and head. Dense kernels pad the rows of a bucket to the longest, and their overhead per row
and head exceeds the arithmetic. This loop reads the KV cache only once, the least that is possible, and fetches it
ahead: values while their keys are multiplied, the keys of the next key head while values are mixed. Each of a key
head's queries fetches its share of the values, because a core waits when it has asked for too many::

    scores    one query · LANES keys         LANES vectors of sums; then the sum of each, as one vector
    mix       one or two heads' weights · values       sums of all numbers of a head stay in registers

It also appends the newest entry of each row. KV entries are float32 or bfloat16, sums float32. A vector of bfloat16
entries is multiplied in pairs, or read as two vectors of float32 (`panels.weights_at`): the even numbers, then the odd.

Axes: R row, S slot, H query heads, K key/value heads, G query heads of a key head, L tokens of a slot, D width of a
head.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, code, compiled, exp, floats, halved, halves, inlined, tanh, widened, written
from stretto_kernels.panels import (
    FLOAT,
    KINDS,
    LANES,
    PAIRED,
    WIDENED,
    add_products,
    added,
    fetch,
    number,
    read_vectors,
    rows_at,
    split,
    write_sums,
)
from stretto_kernels.rule import Rule

#: Values that stand for no window and for no soft cap.
NO_WINDOW = np.iinfo(np.int64).max
NO_CAP = 0.0
#: Kind of arithmetic for bfloat16 entries on this CPU.
NARROW = PAIRED if PAIRED in KINDS else WIDENED

_BLOCK = 32  # tokens; their values take 8 KiB at a width of 64
_VECTOR = 4 * LANES  # bytes
_FETCHED = 4  # vectors that are fetched together


def _sums_of_each(builder: Any, vectors: list[Any]) -> Any:
    """Generate code that sums the numbers of each of LANES vectors; returns a vector of these LANES sums."""
    ir = code.ir
    near = [lane + at for lane in range(0, LANES, 4) for at in (0, 2, LANES, LANES + 2)]
    far = [start + 4 * four + at for start in (0, LANES) for four in range(0, LANES // 4, 2) for at in range(4)]
    for places, step in ((near, 1), (near, 1), (far, 4), (far, 4))[: LANES.bit_length() - 1]:
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), LANES), [at + by for at in places]) for by in (0, step)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
    return vectors[0]


def _vectors_at(builder: Any, address: Any, kind: int, count: int, paired: bool) -> list[Any]:
    """Generate the loads of `count` vectors from memory. Vectors of bfloat16 stay pairs of numbers if `paired`;
    otherwise each becomes two vectors of float32."""
    ir = code.ir
    held = ir.VectorType(ir.FloatType() if kind == FLOAT else ir.IntType(32), LANES)
    vectors = read_vectors(builder, address, held, count)
    return vectors if kind == FLOAT or paired else [part for one in vectors for part in split(builder, one)]


def _write_scores(builder: Any, wanted: Any, *places: Any) -> None:
    """Generate the code of `_scores`, which writes the products of a query with LANES keys to `out`: a branch for each
    kind of arithmetic. `wanted` selects one when the code runs."""
    query, keys, gap, vectors, out, ahead, lines = places
    floating = code.ir.VectorType(code.ir.FloatType(), LANES)
    for kind in KINDS:
        with builder.if_then(builder.icmp_signed("==", wanted, number(kind))):
            sums = [code.alloca_once_value(builder, code.ir.Constant(floating, [0.0] * LANES)) for _ in range(LANES)]
            rows = rows_at(builder, keys, gap, LANES)
            with code.for_range(builder, vectors) as loop:
                at = builder.mul(loop.index, number(_VECTOR))
                where = builder.add(query, builder.mul(at, number(2 if kind == WIDENED else 1)))
                asked = _vectors_at(builder, where, FLOAT, 2, True) if kind == WIDENED else None
                asked = asked or _vectors_at(builder, where, kind, 1, True)
                for row, held in zip(rows, sums, strict=True):
                    key = _vectors_at(builder, builder.add(row, at), kind, 1, kind == PAIRED)
                    for one, other in zip(asked, key, strict=True):
                        builder.store(added(builder, builder.load(held), one, other), held)
                coming = builder.add(ahead, builder.mul(at, lines))
                for first in range(0, LANES, _FETCHED):
                    with builder.if_then(builder.icmp_signed(">", lines, number(first))):
                        for line in range(first, first + _FETCHED):
                            fetch(builder, builder.add(coming, number(line * _VECTOR)))
            total = _sums_of_each(builder, [builder.load(held) for held in sums])
            builder.store(total, builder.inttoptr(out, total.type.as_pointer()), align=4)


def _write_mix(builder: Any, wanted: Any, heads: Any, vectors: Any, *places: Any) -> None:
    """Generate the code of `_mix`, which adds weighted values to heads' totals: a branch for each kind, number of
    heads, and number of vectors of memory. The arguments select one."""
    values, gap, count, weights, stride, totals, total_stride, ahead = places
    floating = code.ir.VectorType(code.ir.FloatType(), LANES)
    for half, own, most in product((0, 1), (1, 2), (1, 2, 4)):
        if half and most == 4:
            continue
        same = [builder.icmp_signed("==", one, number(other)) for one, other in ((heads, own), (vectors, most))]
        kinds = builder.icmp_signed("!=" if half else "==", wanted, number(FLOAT))
        with builder.if_then(builder.and_(builder.and_(*same), kinds)):
            outs, rows = rows_at(builder, totals, total_stride, own), rows_at(builder, weights, stride, own)
            starts = [read_vectors(builder, out, floating, most * (half + 1)) for out in outs]
            sums = [[code.alloca_once_value(builder, one) for one in start] for start in starts]
            with code.for_range(builder, count) as loop:
                at = builder.mul(loop.index, gap)
                value = _vectors_at(builder, builder.add(values, at), WIDENED if half else FLOAT, most, False)
                add_products(builder, rows, loop.index, value, sums, FLOAT)
                for part in range(most):
                    fetch(builder, builder.add(builder.add(ahead, at), number(part * _VECTOR)))
            write_sums(builder, sums, outs, half=False)


#: In a loop, ``_scores((kind, query, keys, gap, vectors, out, ahead, lines))`` writes the products of a query and LANES
#: keys, `gap` bytes apart, to `out`. Each has `vectors` vectors of memory; a query's are float32 for WIDENED, the even
#: numbers of a vector before the odd. `lines` times `vectors` vectors are fetched from the address `ahead` on.
_scores: Any = written(_write_scores, 8)

#: In a loop, ``_mix((kind, heads, vectors, values, gap, count, weights, stride, totals, total_stride, ahead))`` adds
#: `count` values, `gap` bytes apart, times the weights of each of 1 or 2 heads, `stride` bytes apart, to the heads'
#: totals, `total_stride` bytes apart. Of a value it takes `vectors` vectors of memory: 1, 2 or, of float32, 4.
_mix: Any = written(_write_mix, 11)


@inlined
def _order(bits: Any) -> Any:
    """The bits of a float32 number as an integer in the order of such numbers, and back. The compiler vectorises the
    largest of integers, but not of floats, among which there may be NaN."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@inlined
def _weigh(scores: Any, scaling: Any, softcap: Any) -> None:
    """Replace scores, in place, by the softmax of the scaled and, if `softcap` > 0, capped scores."""
    largest, mass = np.int32(-0x80000000), F(0.0)
    for p in range(U(len(scores))):
        scores[p] *= scaling
        if softcap > F(0.0):  # softcap * tanh(score / softcap) (Gemma 2)
            scores[p] = softcap * tanh(scores[p] / softcap)
        largest = max(largest, np.int32(_order(np.int32(F(scores[p]).view(np.int32)))))
    top = np.int32(_order(largest)).view(np.float32)
    for p in range(U(len(scores))):
        scores[p] = exp(scores[p] - top)
        mass += scores[p]
    share = F(1.0) / mass
    for p in range(U(len(scores))):
        scores[p] *= share


@inlined
def _copy(source: Any, width: Any, target: Any, wide: Any, count: Any, size: Any) -> None:
    """Copy `count` rows of `width` numbers of `size` bytes from the address `source` to rows of `wide` numbers at
    `target`."""
    step, to_step = width * size // 2, wide * size // 2
    numbers, outs = halves(source, count * step), halves(target, count * to_step)
    for row in range(U(count)):
        for n in range(U(step)):
            outs[row * U(to_step) + n] = numbers[row * U(step) + n]


@inlined
def _split_place(n: Any) -> Any:
    """Index of number `n` of a head where each vector of bfloat16 is two of float32: its even numbers, then its odd."""
    return n // U(2 * LANES) * U(2 * LANES) + n % U(2) * U(LANES) + n % U(2 * LANES) // U(2)


@inlined
def _ask(query: Any, width: Any, target: Any, wide: Any, kind: Any) -> None:
    """Copy the query at the address `query` to the address `target`, in the layout that `_scores` reads."""
    if kind == WIDENED:
        numbers, outs = halves(query, width), floats(target, wide)
        for n in range(U(width)):
            outs[_split_place(n)] = widened(numbers[n])
    else:
        _copy(query, width, target, wide, 1, 4 if kind == FLOAT else 2)


@inlined
def _answer(totals: Any, wide: Any, out: Any, width: Any, kind: Any) -> None:
    """Copy a head's output from the address `totals` to the address `out`, in the cache's dtype."""
    numbers, outs, narrow = floats(totals, wide), floats(out, width), halves(out, width)
    for n in range(U(width)):
        if kind == FLOAT:
            outs[n] = numbers[n]
        else:
            narrow[n] = halved(numbers[_split_place(n)])


@compiled
def _attend(
    query: Any, new: Any, cache: Any, out: Any, ends: Any, shape: Any, window: Any, scaling: Any, softcap: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Write to `out` the attention of row r to the positions ends[r] - window <= p < ends[r] of slot r. `new` and
    `cache`: (address of keys, address of values). New entries are first written at ends[r] - 1, unless their keys have
    the address 0. `shape`: (rows, query heads, key heads, slot length, head width). `kind`: FLOAT, or NARROW for
    bfloat16.

    Entries are read in place. Where they do not fill vectors, or a slot is shorter than LANES, blocks of them are
    copied to `spare`, with zeros behind each."""
    rows, heads, kv_heads, length, width = shape
    group, size = heads // kv_heads, 4 if kind == FLOAT else 2
    vectors = (width * size + _VECTOR - 1) // _VECTOR
    wide, room, gap = vectors * _VECTOR // size, length + LANES, vectors * _VECTOR
    copied = wide != width or length < LANES
    weights, totals = np.empty((group, room), np.float32), np.empty((group, wide), np.float32)
    asked, spare = np.zeros((group, wide), np.float32), np.zeros(_BLOCK * gap // 4, np.float32)
    own, most = width * size, 4 if size == 4 and vectors % 4 == 0 else 2 if vectors % 2 == 0 else 1
    lines = (LANES + group - 1) // group  # a query's share of what a block of keys fetches
    for place in range(rows * kv_heads):
        at_weights, at_totals = np.int64(weights.ctypes.data), np.int64(totals.ctypes.data)
        at_asked, at_spare = np.int64(asked.ctypes.data), np.int64(spare.ctypes.data)
        end = ends[place // kv_heads]
        first = max(end - window, 0)
        keys, values = cache[0] + place * length * own, cache[1] + place * length * own
        if new[0] != 0:
            _copy(new[0] + place * own, width, keys + (end - 1) * own, width, 1, size)
            _copy(new[1] + place * own, width, values + (end - 1) * own, width, 1, size)
        for g in range(group):
            _ask(query + (place * group + g) * own, width, at_asked + 4 * g * wide, wide, kind)
        for block in range(first, end, LANES):
            begin = block if copied else min(block, length - LANES)
            source, ahead = keys + begin * own, values + begin * own
            if copied:
                _copy(source, width, at_spare, wide, min(LANES, end - block), size)
                source, ahead = at_spare, at_spare
            for g in range(group):
                to = at_weights + 4 * (g * room + begin)
                following = ahead + g * lines * gap
                _scores((kind, at_asked + 4 * g * wide, source, gap, vectors, to, following, lines))
        for g in range(group):
            _weigh(weights[g, first:end], scaling, softcap)
        totals[:] = F(0.0)
        for block in range(first, end, _BLOCK):
            count = min(_BLOCK, end - block)
            source, ahead = values + block * own, keys + (length + block) * own
            if copied:
                _copy(source, width, at_spare, wide, count, size)
                source, ahead = at_spare, at_spare
            for g in range(0, group, 2):
                for v in range(0, vectors, most):
                    skipped, by_head = v * _VECTOR, at_weights + 4 * (g * room + block)
                    to = at_totals + 4 * g * wide + skipped * 4 // size
                    following = (ahead if g == 0 else source) + skipped
                    _mix((
                        kind, min(2, group - g), most, source + skipped, gap, count, by_head, 4 * room, to, 4 * wide,
                        following,
                    ))  # fmt: skip
        for g in range(group):
            _answer(at_totals + 4 * g * wide, wide, out + (place * group + g) * own, width, kind)


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
    _, kv_heads, length, _ = keys_SKLD.shape
    _attend(
        query_RHD.data_ptr(),
        tuple(x.data_ptr() for x in new) or (0, 0),
        (keys_SKLD.data_ptr(), values_SKLD.data_ptr()),
        out_RHD.data_ptr(),
        ends,
        (*query_RHD.shape[:2], kv_heads, length, width),
        NO_WINDOW if rule.window is None else rule.window,
        F(width**-0.5 if rule.scaling is None else rule.scaling),
        F(NO_CAP if rule.softcap is None else rule.softcap),
        FLOAT if dtype is torch.float32 else NARROW,
    )
    return out_RHD
