"""Attention of short sequences on the CPU, without cells: a sequence's keys and values are read where they are in the
packed row, shared prefixes too, and only its own queries are computed.

All seven products are blocks of six rows by one panel, whose sums stay in registers (`_block`)::

    forward     scores = queries · keysᵀ, out = weights · values
    backward    scores again, d weights = d out · valuesᵀ, d queries = d scores · keys
                d keys = d scoresᵀ · queries, d values = weightsᵀ · d out       (`_CHUNK` queries at a time)

A panel has `WIDE` columns of a matrix, row by row. Threads share the key heads, so that none writes to another's
gradients.

Axes: T token, S sequence, H query head, K key head, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.compiled import F, U, code, exp, floats, inlined, written
from stretto_kernels.layer_loops import is_half, load, loop, over, parts_of, store
from stretto_kernels.panels import FLOAT, LANES, WIDE, add_products, number, rows_at, weights_at, write_sums

Ints = npt.NDArray[np.int64]

#: Longest sequence: its keys and values stay in a core's second cache.
LONGEST = 512

_ROWS = 6  # with two vectors each: twelve sums, two weights and an input fill AVX2's registers but one
_CHUNK = 96


def _write_block(builder: Any, x: Any, stride: Any, panel: Any, depth: Any, out: Any, out_stride: Any) -> None:
    """Generate the LLVM code of `_block`, which multiplies `_ROWS` rows by one panel."""
    zeros = code.ir.Constant(code.ir.VectorType(code.ir.FloatType(), LANES), [0.0] * LANES)
    sums = [[code.alloca_once_value(builder, zeros) for _ in range(2)] for _ in range(_ROWS)]
    rows = rows_at(builder, x, stride, _ROWS)
    with code.for_range(builder, depth) as turn:
        weights = weights_at(builder, builder.add(panel, builder.mul(turn.index, number(4 * WIDE))), FLOAT)
        add_products(builder, rows, turn.index, weights, sums, FLOAT)
    write_sums(builder, sums, rows_at(builder, out, out_stride, _ROWS), half=False)


#: In a loop, ``_block((x, stride, panel, depth, out, out_stride))`` multiplies six rows of `depth` numbers at address
#: `x`, `stride` bytes apart, by a panel, and writes rows of WIDE sums. All numbers are float32.
_block: Any = written(_write_block, 6)


@inlined
def _times(x: Any, stride: Any, panels: Any, size: Any, depth: Any, out: Any, out_stride: Any, columns: Any) -> None:
    """Multiply the six rows at `x`, `stride` numbers apart, by all panels, `size` numbers apart, of a matrix with
    `depth` rows and `columns` columns; writes rows to `out`."""
    for p in range((columns + WIDE - 1) // WIDE):
        _block((x, 4 * stride, panels + 4 * p * size, depth, out + 4 * p * WIDE, 4 * out_stride))


def _padded(columns: Any) -> Any:
    """The number of columns of a matrix in panels, those that are empty included."""
    return (columns + WIDE - 1) // WIDE * WIDE


_whole = inlined(_padded)  # for loops


@inlined
def _token(place: Any, j: Any) -> Any:
    """The packed token at position `j` of the sequence (start, start of its shared prefix, length of that, length)."""
    return place[1] + j if j < place[2] else place[0] + j - place[2]


@inlined
def _as_column(row: Any, j: Any, panels: Any) -> None:
    """Write a row as column `j` of a matrix in panels."""
    numbers = floats(panels + 4 * (j // WIDE * len(row) * WIDE + j % WIDE), len(row) * WIDE)
    for d in range(U(len(row))):
        numbers[d * U(WIDE)] = row[d]


@inlined
def _as_row(row: Any, j: Any, panels: Any, size: Any) -> None:
    """Write a row as row `j` of a matrix in panels of `size` numbers."""
    for p in range((len(row) + WIDE - 1) // WIDE):
        numbers = floats(panels + 4 * (p * size + j * WIDE), WIDE)
        for lane in range(U(min(WIDE, len(row) - p * WIDE))):
            numbers[lane] = row[U(p * WIDE) + lane]


@inlined
def _ask(address: Any, index: Any, scale: Any, row: Any, half: Any) -> None:
    load(address, U(index * len(row)), row, half)
    for d in range(U(len(row))):
        row[d] *= scale


@inlined
def _move(mixed: Any, scale: Any, out: Any, index: Any, row: Any, half: Any) -> None:
    """Write the numbers at `mixed`, scaled, as head `index` of all heads."""
    _ask(mixed, 0, scale, row, False)
    store(out, U(index * len(row)), row, half)


@inlined
def _head(place: Any, r: Any, heads: Any, k: Any, group: Any) -> Any:
    """Index, among all heads of all tokens, of query `r` of a sequence and key head `k`: `group` heads of each
    token."""
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
    keys = scratch + 4 * part * room
    values = keys + 4 * most * wide
    asked = values + 4 * most * wide
    mixed = asked + 4 * _ROWS * wide
    scores = mixed + 4 * _ROWS * wide
    head = np.empty(width, np.float32)
    for k in range(first, end):
        for s in range(len(places)):
            place = places[s]
            shared, length = place[2], place[3]
            for j in range(length):
                load(key + size * k * width, U(_token(place, j) * kv_heads * width), head, half)
                _as_column(head, j, keys)
                load(value + size * k * width, U(_token(place, j) * stride), head, half)
                _as_row(head, j, values, most * WIDE)
            rows = (length - shared) * group
            for block in range(0, rows, _ROWS):
                last = min(rows, block + _ROWS)
                reach = shared + (last - 1) // group + 1
                for r in range(block, last):
                    row = floats(asked + 4 * (r - block) * wide, width)
                    _ask(query, _head(place, r, heads, k, group), scale, row, half)
                _times(asked, wide, keys, width * WIDE, width, scores, most, reach)
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
                    row[count:] = F(0.0)
                    floats(logs + 4 * index, 1)[0] = top + np.log(total)
                _times(scores, most, values, most * WIDE, reach, mixed, wide, width)
                for r in range(block, last):
                    index = _head(place, r, heads, k, group)
                    store(out, U(index * width), floats(mixed + 4 * (r - block) * wide, width), half)


@inlined
def _slopes(scores: Any, changes: Any, told: Any, along: Any, count: Any) -> None:
    """Overwrite the first `count` scores by weights, and the gradient of weights, `changes`, by that of scores; the
    rest by zeros. `told`: logarithm of the softmax's denominator. `along`: see `_along`."""
    for j in range(count):
        scores[j] = exp(scores[j] - told)
        changes[j] = scores[j] * (changes[j] - along)
    scores[count:], changes[count:] = F(0.0), F(0.0)


@inlined
def _collect(x: Any, panels: Any, depth: Any, mixed: Any, wide: Any, width: Any, sums: Any, far: Any) -> None:
    """Add to the sums of `far` tokens, [far, wide], the products of the rows of `x`, one for each token, and a matrix
    in panels with `depth` queries as rows. `mixed`: memory for the products of six tokens."""
    for j in range(0, far, _ROWS):
        _times(x + 4 * j * _CHUNK, _CHUNK, panels, _CHUNK * WIDE, depth, mixed, wide, width)
        count = U(min(_ROWS, far - j) * wide)
        new, total = floats(mixed, count), floats(sums + 4 * j * wide, count)
        for n in range(count):
            total[n] += new[n]


@inlined
def _along(out: Any, index: Any, back: Any, half: Any) -> Any:
    """The dot product of a query's output with its gradient."""
    head, total = np.empty(len(back), np.float32), F(0.0)
    load(out, U(index * len(back)), head, half)
    for d in range(U(len(back))):
        total += head[d] * back[d]
    return total


@inlined
def _spread(row: Any, address: Any) -> None:
    """Write a row as a column of a matrix with rows of `_CHUNK` numbers."""
    column = floats(address, len(row) * _CHUNK)
    for j in range(U(len(row))):
        column[j * U(_CHUNK)] = row[j]


@inlined
def _add(sums: Any, wide: Any, place: Any, k: Any, kv_heads: Any, width: Any, out: Any) -> None:
    """Add the sums of a sequence's tokens to the gradient of all tokens."""
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
    matrix, six, transposed = 4 * most * wide, 4 * _ROWS * wide, 4 * (most + _ROWS) * _CHUNK
    key_columns = scratch + 4 * part * room
    key_rows, value_columns = key_columns + matrix, key_columns + 2 * matrix
    of_keys, of_values = key_columns + 3 * matrix, key_columns + 4 * matrix
    weights = key_columns + 5 * matrix
    slopes, queries = weights + transposed, weights + 2 * transposed
    gradients = queries + 4 * _CHUNK * wide
    asked = gradients + 4 * _CHUNK * wide
    given, mixed, scores = asked + six, asked + 2 * six, asked + 3 * six
    changes, head = scores + 4 * _ROWS * most, np.empty(width, np.float32)
    for k in range(first, end):
        for s in range(len(places)):
            place = places[s]
            for j in range(place[3]):
                load(key + size * k * width, U(_token(place, j) * kv_heads * width), head, half)
                _as_column(head, j, key_columns)
                _as_row(head, j, key_rows, most * WIDE)
                load(value + size * k * width, U(_token(place, j) * stride), head, half)
                _as_column(head, j, value_columns)
            floats(of_keys, place[3] * wide)[:], floats(of_values, place[3] * wide)[:] = F(0.0), F(0.0)
            rows = (place[3] - place[2]) * group
            for chunk in range(0, rows, _CHUNK):
                stop = min(rows, chunk + _CHUNK)
                far = place[2] + (stop - 1) // group + 1
                for block in range(chunk, stop, _ROWS):
                    last = min(stop, block + _ROWS)
                    reach = place[2] + (last - 1) // group + 1
                    for r in range(block, last):
                        index, at = _head(place, r, heads, k, group), 4 * (r - block) * wide
                        _ask(query, index, scale, floats(asked + at, width), half)
                        _ask(gradient, index, F(1.0), floats(given + at, width), half)
                        _as_row(floats(asked + at, width), r - chunk, queries, _CHUNK * WIDE)
                        _as_row(floats(given + at, width), r - chunk, gradients, _CHUNK * WIDE)
                    _times(asked, wide, key_columns, width * WIDE, width, scores, most, reach)
                    _times(given, wide, value_columns, width * WIDE, width, changes, most, reach)
                    for r in range(block, last):
                        index, at = _head(place, r, heads, k, group), 4 * (r - block) * most
                        row, change, told = floats(scores + at, far), floats(changes + at, far), logs + 4 * index
                        along = _along(out, index, floats(given + 4 * (r - block) * wide, width), half)
                        _slopes(row, change, floats(told, 1)[0], along, U(place[2] + r // group + 1))
                        _spread(row, weights + 4 * (r - chunk))
                        _spread(change, slopes + 4 * (r - chunk))
                    _times(changes, most, key_rows, most * WIDE, reach, mixed, wide, width)
                    for r in range(block, last):
                        index = _head(place, r, heads, k, group)
                        _move(mixed + 4 * (r - block) * wide, scale, query_back, index, head, half)
                _collect(slopes, queries, stop - chunk, mixed, wide, width, of_keys, far)
                _collect(weights, gradients, stop - chunk, mixed, wide, width, of_values, far)
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
        room = most * (5 * wide + 2 * _ROWS) + 2 * (most + _ROWS) * _CHUNK + (2 * _CHUNK + 3 * _ROWS) * wide
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
