"""The compiled loop of a program (`steps.program`): executes its steps on addresses.

Between two attentions a step treats each token alone. So a few tokens at a time go through all steps up to the next
attention, and what these hand on stays in the core's cache::

    steps      norm  multiply  rotate | attend | multiply  norm  multiply  gate ... | attend
    tokens     0..95   0..95    0..95                 0..95 ...
               96..    96..     96..     all          96.. ...
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto_kernels import decode_attention, fused, panels
from stretto_kernels.compiled import body, compiled, halves, inlined, integers
from stretto_kernels.decode_attention import NARROW
from stretto_kernels.panels import FLOAT

#: Operations of steps; CALL is done by Python.
EMBED, NORM, ROTATE, GATE, MULTIPLY, ATTEND, CALL = range(7)
#: Places of every program; the address of NOTHING is 0.
NOTHING, TOKEN_IDS, POSITIONS, LOGITS = range(4)
_ROWS = 96  # tokens that go through steps together

_norm, _norm_halves = body(fused._norm), body(fused._norm_halves)
_rotate, _rotate_halves = body(fused._rotate), body(fused._rotate_halves)
_gate, _gate_halves = body(fused._gate), body(fused._gate_halves)
_attend = body(decode_attention._attend)
_multiply = body(panels._multiply)


@inlined
def _embed(ids: Any, weight: Any, out: Any, rows: Any, width: Any, vocabulary: Any, half: Any) -> None:
    """Copy the rows `ids` of a weight to `out`; NaN for an id outside the vocabulary. Tensors are given by address.
    `half`: None for float32, 1 for bfloat16."""
    tokens, size = integers(ids, rows), width * (4 if half is None else 2)
    for row in range(rows):
        known = 0 <= tokens[row] < vocabulary
        source = halves(weight + (tokens[row] if known else 0) * size, size // 2)
        target = halves(out + row * size, size // 2)
        for n in range(size // 2):
            target[n] = source[n] if known else np.uint16(0x7FFF)


@inlined
def _attend_buckets(step: Any, at: Any, table: Any, ends: Any, start: Any, half: Any) -> None:
    """Attention `step` of the newest tokens, which begin at token `start`, bucket by bucket. The arguments are those of
    `run`."""
    heads, kv_heads, width, layer, window = step[6], step[7], step[8], step[10], step[11]
    scaling, softcap = np.int32(step[12]).view(np.float32), np.int32(step[13]).view(np.float32)
    size, kind = width * (4 if half is None else 2), FLOAT if half is None else NARROW
    first = 0
    for bucket in range(len(table)):
        rows, length = table[bucket, 0], table[bucket, 1]
        cache = table[bucket, 3 + 2 * layer], table[bucket, 4 + 2 * layer]
        skipped, kv_skipped = (start + first) * heads * size, (start + first) * kv_heads * size
        query, out = at[step[1]] + skipped, at[step[4]] + skipped
        new = at[step[2]] + kv_skipped, at[step[3]] + kv_skipped
        shape, ends_R = (rows, heads, kv_heads, length, width), ends[first : first + rows]
        _attend(query, new, cache, out, ends_R, shape, window, scaling, softcap, kind)
        first += rows


@inlined
def _execute(step: Any, at: Any, begin: Any, rows: Any, half: Any) -> None:
    """Execute a step that is no attention (product, norm, rotation, gate, embedding) for `rows` tokens from token
    `begin` on. `at`: addresses by place. `half`: None for float32, 1 for bfloat16."""
    op, n, m, k = step[0], step[6], step[7], step[8]
    size, eps = 4 if half is None else 2, np.int32(k).view(np.float32)
    skipped = begin * size * n * (m if op == ROTATE else 1)
    x, y, weight, out, total = at[step[1]] + skipped, at[step[2]], at[step[3]], at[step[4]] + skipped, at[step[5]]
    if op == MULTIPLY:
        _multiply(x, weight, y, at[step[4]] + begin * size * m, rows, n, m, k)
    elif op == NORM:
        added = y + skipped if y != 0 else y
        if half is None:
            _norm(x, added, weight, total + skipped, out, rows, n, eps)
        else:
            _norm_halves(x, added, weight, total + skipped, out, rows, n, eps)
    elif op == ROTATE:
        if half is None:
            _rotate(x, weight, y, total, at[POSITIONS] + 8 * begin, out, rows, n, m, eps)
        else:
            _rotate_halves(x, weight, y, total, at[POSITIONS] + 8 * begin, out, rows, n, m, eps)
    elif op == GATE:
        if half is None:
            _gate(x, y + skipped, out, rows * n)
        else:
            _gate_halves(x, y + skipped, out, rows * n)
    elif op == EMBED:
        _embed(at[step[1]] + 8 * begin, weight, out, rows, n, m, half)


@compiled
def run(
    steps: Any, at: Any, first: Any, end: Any, tokens: Any, last: Any, table: Any, ends: Any, start: Any, half: Any
) -> None:
    """Execute the steps from `first` to `end` (exclusive) of a program; results are written to the addresses `at`.

    Args:
        steps: for each step: operation; places of two inputs, a weight, two outputs; three sizes; whether it is for the
            last rows only; layer, window, scaling, soft cap of an attention. Fractions are the bits of a float32.
        at: addresses by place.
        tokens, last: number of tokens, and of last rows.
        table: for each bucket: rows, length of a slot, slots, then addresses of keys and values of each layer.
        ends: for each row of the buckets: number of its tokens.
        start: the first row's newest token.
        half: None for float32, 1 for bfloat16.
    """
    number = first
    while number < end:
        if steps[number, 0] == ATTEND:
            _attend_buckets(steps[number], at, table, ends, start, half)
            number += 1
            continue
        stop = number + 1
        while stop < end and steps[stop, 0] != ATTEND and steps[stop, 9] == steps[number, 9]:
            stop += 1
        rows = last if steps[number, 9] else tokens
        for begin in range(0, rows, _ROWS):
            for place in range(number, stop):
                _execute(steps[place], at, begin, min(_ROWS, rows - begin), half)
        number = stop
