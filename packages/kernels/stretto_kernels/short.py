"""Attention of short sequences on the CPU, without cells: a sequence's keys and values are read where they are in the
packed row, shared prefixes too, and only its own queries are computed.

All seven products are blocks of six rows by one or two vectors of columns, whose sums stay in registers::

    forward     scores = queries · keysᵀ, out = weights · values
    backward    scores again, d weights = d out · valuesᵀ, d queries = d scores · keys
                d keys = d scoresᵀ · queries, d values = weightsᵀ · d out       (`_CHUNK` queries at a time)

The transposed factors of the last two are read in place, from the first query on that sees one of a block's keys.
Threads share the key heads, so that none writes to another's gradients. A thread goes over its heads of one sequence
before the next one, because the heads of a token lie together.

Axes: T token, S sequence, H query head, K key head, D head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, code, exp, floats, inlined, written
from stretto_kernels.layer_loops import is_half, load, loop, over, parts_of, store
from stretto_kernels.panels import FLOAT, LANES, WIDE, add_products, number, read_vectors, rows_at, write_sums

Ints = npt.NDArray[np.int64]

#: Longest sequence: its keys and values stay in a core's second cache.
LONGEST = 512

_ROWS = 6  # with two vectors each: twelve sums, two weights and an input fill AVX2's registers but one
_CHUNK = 96


def _write_block(builder: Any, *places: Any, vectors: int, adds: bool) -> None:
    """Generate the LLVM code of a product of `_ROWS` rows and `vectors` vectors of columns. `places`: the eight
    arguments of `_wide`; `adds`: the product is added to what is at `out`."""
    x, stride, step, matrix, matrix_stride, depth, out, out_stride = places
    kind = code.ir.VectorType(code.ir.FloatType(), LANES)
    inputs, outs = rows_at(builder, x, stride, _ROWS), rows_at(builder, out, out_stride, _ROWS)
    zeros = [[code.ir.Constant(kind, [0.0] * LANES)] * vectors] * _ROWS
    starts = [read_vectors(builder, row, kind, vectors) for row in outs] if adds else zeros
    sums = [[code.alloca_once_value(builder, start) for start in row] for row in starts]
    with code.for_range(builder, depth) as turn:
        weights = read_vectors(builder, builder.add(matrix, builder.mul(turn.index, matrix_stride)), kind, vectors)
        now = [builder.add(row, builder.mul(turn.index, step)) for row in inputs]
        add_products(builder, now, number(0), weights, sums, FLOAT)
    write_sums(builder, sums, outs, half=False)


#: In a loop, ``_wide((x, stride, step, matrix, matrix_stride, depth, out, out_stride))`` multiplies six rows by WIDE
#: columns; `_narrow` by LANES; the other two add to what is at `out`. Rows start at address `x`, `stride` bytes apart;
#: their `depth` numbers are `step` bytes apart. The columns are the first of a matrix with `depth` rows,
#: `matrix_stride` bytes apart. Rows of sums are written `out_stride` bytes apart. All numbers are float32.
_wide, _narrow, _add_wide, _add_narrow = (
    written(partial(_write_block, vectors=vectors, adds=adds), 8) for adds in (False, True) for vectors in (2, 1)
)


@inlined
def _times(
    x: Any, stride: Any, matrix: Any, matrix_stride: Any, depth: Any, out: Any, out_stride: Any, columns: Any
) -> None:
    """Write the product of the six rows at `x`, `stride` numbers apart, and a matrix with `depth` rows, `matrix_stride`
    numbers apart, and `columns` columns to rows at `out`."""
    for c in range(0, columns, WIDE):
        given = (x, 4 * stride, 4, matrix + 4 * c, 4 * matrix_stride, depth, out + 4 * c, 4 * out_stride)
        if columns - c > LANES:
            _wide(given)
        else:
            _narrow(given)


@inlined
def _collect(x: Any, stride: Any, matrix: Any, wide: Any, depth: Any, sums: Any, columns: Any) -> None:
    """Add the product of six columns at `x`, whose `depth` numbers are `stride` numbers apart, and a matrix to six rows
    of `sums`. Rows of the matrix and of the sums have `wide` numbers, of which `columns` count."""
    for c in range(0, columns, WIDE):
        given = (x, 4, 4 * stride, matrix + 4 * c, 4 * wide, depth, sums + 4 * c, 4 * wide)
        if columns - c > LANES:
            _add_wide(given)
        else:
            _add_narrow(given)


def _padded(columns: Any) -> Any:
    """Length in memory of a row of `columns` numbers: rounded up to whole blocks, by which products are written."""
    return (columns + WIDE - 1) // WIDE * WIDE


_whole = inlined(_padded)  # for loops


@inlined
def _token(place: Any, j: Any) -> Any:
    """The packed token at position `j` of a sequence. `place`: start of its own tokens, start and length of its shared
    prefix, and its length."""
    return place[1] + j if j < place[2] else place[0] + j - place[2]


@inlined
def _as_column(row: Any, j: Any, matrix: Any, stride: Any) -> None:
    """Write a row as column `j` of a matrix with rows of `stride` numbers."""
    numbers = floats(matrix + 4 * j, len(row) * stride)
    for d in range(U(len(row))):
        numbers[d * U(stride)] = row[d]


@inlined
def _ask(address: Any, index: Any, scale: Any, row: Any, half: Any) -> None:
    load(address, U(index * len(row)), row, half)
    for d in range(U(len(row))):
        row[d] *= scale


@inlined
def _move(mixed: Any, scale: Any, out: Any, index: Any, row: Any, half: Any) -> None:
    """Write the float32 numbers at `mixed`, times `scale`, to `out` as head `index` of all heads of all tokens; `half`:
    as bfloat16. `row`: room for them, one head wide."""
    _ask(mixed, 0, scale, row, False)
    store(out, U(index * len(row)), row, half)


@inlined
def _head(place: Any, r: Any, heads: Any, k: Any, group: Any) -> Any:
    """Index, in [T, H] flattened, of query `r` of key head `k` in a sequence; `r` counts the sequence's own tokens, and
    the `group` query heads of each."""
    return _token(place, place[2] + r // group) * heads + k * group + r % group


@loop
def _attend(
    first: Any, end: Any, part: Any, query: Any, key: Any, value: Any, stride: Any, places: Any, out: Any, logs: Any,
    scratch: Any, room: Any, heads: Any, kv_heads: Any, width: Any, longest: Any, scale: Any, half: Any,
) -> None:  # fmt: skip
    """Causal attention over short sequences, for the key heads `first` to `end`; writes `out`.

    `places`: int64 [S, 4] (`_token`). `stride`: numbers from one token's values to the next. `logs`: gets the
    logarithm of each softmax's denominator, [T, H]. `scratch`: `room` numbers for each part."""
    size, most, wide, group = 2 if half else 4, _whole(longest), _whole(width), heads // kv_heads
    key_columns = scratch + 4 * part * room
    values = key_columns + 4 * most * wide
    asked = values + 4 * most * wide
    mixed = asked + 4 * _ROWS * wide
    scores = mixed + 4 * _ROWS * wide
    head = np.empty(width, np.float32)
    for s in range(len(places)):
        place = places[s]
        shared, length = place[2], place[3]
        for k in range(first, end):
            for j in range(length):
                load(key + size * k * width, U(_token(place, j) * kv_heads * width), head, half)
                _as_column(head, j, key_columns, most)
                load(value + size * k * width, U(_token(place, j) * stride), floats(values + 4 * j * wide, width), half)
            rows = (length - shared) * group
            for block in range(0, rows, _ROWS):
                last = min(rows, block + _ROWS)
                reach = shared + (last - 1) // group + 1
                for r in range(block, last):
                    row = floats(asked + 4 * (r - block) * wide, width)
                    _ask(query, _head(place, r, heads, k, group), scale, row, half)
                _times(asked, wide, key_columns, most, width, scores, most, reach)
                for r in range(block, last):
                    index = _head(place, r, heads, k, group)
                    row, count = floats(scores + 4 * (r - block) * most, reach), U(shared + r // group + 1)
                    top, total = F(-np.inf), F(0.0)
                    for j in range(count):
                        top = max(top, row[j])
                    for j in range(count):
                        row[j] = exp(row[j] - top)
                        total += row[j]
                    for j in range(count):
                        row[j] /= total
                    for j in range(count, U(reach)):
                        row[j] = F(0.0)
                    floats(logs + 4 * index, 1)[0] = top + np.log(total)
                _times(scores, most, values, wide, reach, mixed, wide, width)
                for r in range(block, last):
                    index = _head(place, r, heads, k, group)
                    store(out, U(index * width), floats(mixed + 4 * (r - block) * wide, width), half)


@inlined
def _slopes(scores: Any, changes: Any, told: Any, along: Any, count: Any) -> None:
    """Softmax backward of one query: overwrite its first `count` scores by weights, and `changes`, the gradient of
    weights, by that of scores; the rest by zeros. `told`: logarithm of the softmax's denominator. `along`: from
    `_along`."""
    for j in range(count):
        scores[j] = exp(scores[j] - told)
        changes[j] = scores[j] * (changes[j] - along)
    for j in range(count, U(len(scores))):
        scores[j] = F(0.0)
        changes[j] = F(0.0)


@inlined
def _along(out: Any, index: Any, back: Any, head: Any, half: Any) -> Any:
    """The dot product of a query's output (head `index` of `out`) with its gradient `back`. `head`: memory for it."""
    total = F(0.0)
    load(out, U(index * len(back)), head, half)
    for d in range(U(len(back))):
        total += head[d] * back[d]
    return total


@inlined
def _add(sums: Any, wide: Any, place: Any, k: Any, kv_heads: Any, width: Any, out: Any) -> None:
    """Add a sequence's `sums`, one row per token, to the gradient `out` of all tokens, at key head `k`."""
    for j in range(place[3]):
        new = floats(sums + 4 * j * wide, width)
        total = floats(out + 4 * (_token(place, j) * kv_heads + k) * width, width)
        for d in range(U(width)):
            total[d] += new[d]


@loop
def _attend_back(
    first: Any, end: Any, part: Any, query: Any, key: Any, value: Any, stride: Any, places: Any, out: Any, logs: Any,
    gradient: Any, query_back: Any, key_back: Any, value_back: Any, scratch: Any, room: Any, heads: Any, kv_heads: Any,
    width: Any, longest: Any, scale: Any, half: Any,
) -> None:  # fmt: skip
    """Write the gradient of queries to `query_back`, and add those of keys and values, in float32, to `key_back` and
    `value_back`, for the key heads `first` to `end`. `out`, `logs`: results of `_attend`. `gradient`: that of `out`."""
    size, most, wide, group = 2 if half else 4, _whole(longest), _whole(width), heads // kv_heads
    matrix, chunk_wide, chunk_most = 4 * most * wide, 4 * _CHUNK * wide, 4 * _CHUNK * most
    six = 4 * _ROWS * wide
    key_columns = scratch + 4 * part * room
    key_rows, value_columns = key_columns + matrix, key_columns + 2 * matrix
    of_keys, of_values = key_columns + 3 * matrix, key_columns + 4 * matrix + six
    weights = key_columns + 5 * matrix + 2 * six
    slopes, asked = weights + chunk_most, weights + 2 * chunk_most
    given, mixed = asked + chunk_wide, asked + 2 * chunk_wide
    head = np.empty(width, np.float32)
    for s in range(len(places)):
        place = places[s]
        shared, length = place[2], place[3]
        for k in range(first, end):
            for j in range(length):
                row = floats(key_rows + 4 * j * wide, width)
                load(key + size * k * width, U(_token(place, j) * kv_heads * width), row, half)
                _as_column(row, j, key_columns, most)
                load(value + size * k * width, U(_token(place, j) * stride), head, half)
                _as_column(head, j, value_columns, most)
            floats(of_keys, length * wide)[:], floats(of_values, length * wide)[:] = F(0.0), F(0.0)
            rows = (length - shared) * group
            for chunk in range(0, rows, _CHUNK):
                stop = min(rows, chunk + _CHUNK)
                for block in range(chunk, stop, _ROWS):
                    last = min(stop, block + _ROWS)
                    reach = shared + (last - 1) // group + 1
                    at, begin = 4 * (block - chunk) * wide, 4 * (block - chunk) * most
                    for r in range(block, last):
                        index, own = _head(place, r, heads, k, group), 4 * (r - chunk) * wide
                        _ask(query, index, scale, floats(asked + own, width), half)
                        load(gradient, U(index * width), floats(given + own, width), half)
                    _times(asked + at, wide, key_columns, most, width, weights + begin, most, reach)
                    _times(given + at, wide, value_columns, most, width, slopes + begin, most, reach)
                    for r in range(block, last):
                        index, row = _head(place, r, heads, k, group), 4 * (r - chunk) * most
                        along = _along(out, index, floats(given + 4 * (r - chunk) * wide, width), head, half)
                        count = shared + r // group + 1
                        seen = min(most, count + _ROWS)
                        told = floats(logs + 4 * index, 1)[0]
                        _slopes(floats(weights + row, seen), floats(slopes + row, seen), told, along, U(count))
                    _times(slopes + begin, most, key_rows, wide, reach, mixed, wide, width)
                    for r in range(block, last):
                        index = _head(place, r, heads, k, group)
                        _move(mixed + 4 * (r - block) * wide, scale, query_back, index, head, half)
                for j in range(0, shared + (stop - 1) // group + 1, _ROWS):
                    blind = max(0, (j - shared) * group - chunk)  # queries before the first that sees key j
                    begin, at = 4 * (blind * most + j), 4 * blind * wide
                    seeing, own = stop - chunk - blind, 4 * j * wide
                    _collect(slopes + begin, most, asked + at, wide, seeing, of_keys + own, width)
                    _collect(weights + begin, most, given + at, wide, seeing, of_values + own, width)
            _add(of_keys, wide, place, k, kv_heads, width, key_back)
            _add(of_values, wide, place, k, kv_heads, width, value_back)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: Ints, longest: int, scale: float
    ) -> Tensor:
        tokens, heads, width = query.shape
        out, logs = torch.empty_like(query), query.new_empty(tokens, heads, dtype=torch.float32)
        ctx.numbers = (heads, key.shape[1], width, longest, F(scale), is_half(query))
        ctx.places, ctx.parts = places, min(key.shape[1], parts_of(tokens, heads * width))
        most, wide = _padded(longest), _padded(width)
        room = most * (2 * wide + _ROWS) + 2 * _ROWS * wide
        given = (query, key, value, value.stride(0), places, out, logs, torch.zeros(ctx.parts, room), room)
        over(_attend, key.shape[1], ctx.parts, *given, *ctx.numbers)
        ctx.save_for_backward(query, key, value, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        gradient, own = gradient.contiguous(), torch.empty_like(query)
        sums = [torch.zeros(key.shape, dtype=torch.float32) for _ in range(2)]
        most, wide = _padded(ctx.numbers[3]), _padded(query.shape[2])
        room = most * 5 * wide + 2 * _CHUNK * (most + wide) + 3 * _ROWS * wide
        given = (query, key, value, value.stride(0), ctx.places, out, logs, gradient, own, *sums)
        over(_attend_back, key.shape[1], ctx.parts, *given, torch.zeros(ctx.parts, room), room, *ctx.numbers)
        return own, *(one.to(key.dtype) for one in sums), None, None, None


def short_attention(query: Tensor, key: Tensor, value: Tensor, places_S4: Ints, longest: int, scale: float) -> Tensor:
    """Causal attention within each sequence of a packed row, [T, H, D]; differentiable.

    Args:
        query: [T, H, D], float32 or bfloat16, contiguous.
        key: [T, K, D], contiguous, of the same dtype.
        value: [T, K, D], of the same dtype; a token's numbers are contiguous.
        places_S4: of each sequence, the start of its own tokens, the start and the length of its shared prefix, and its
            length, prefix included.
        longest: no sequence is longer; at most `LONGEST`.
        scale: factor of the scores.
    """
    found = _Short.apply(query, key, value, places_S4, longest, scale)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)
