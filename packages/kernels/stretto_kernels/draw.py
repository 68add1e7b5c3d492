"""Draw one token per row from logits on the CPU, in one loop that writes no distribution to memory.

With torch operations, a softmax, a log-softmax and a cumulative sum over the vocabulary are written for each row. The
loop reads the logits twice, and the block of the drawn token once more::

    logits     . . . . | . . . . | . . . .       find the largest
    blocks        0.9  |   0.25  |   0.85        sum the exponentials of each block
    target                  ^                    find the block, then the token in it

`gpu.draw` does the same on a GPU. Sums over a block are float32, sums of blocks float64.

Axes: R row, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stretto_kernels.compiled import F, U, compiled, exp, floats, inlined

_BLOCK = U(64)
_LEAST = F(-87.0)  # exponents below count as zero, as for tokens that a filter removed


@inlined
def _weight(logit: Any, top: Any) -> Any:
    return exp(logit - top) if logit - top > _LEAST else F(0.0)


@inlined
def _largest(logits_V: Any) -> Any:
    """The largest logit; and whether the logits are a distribution: none is NaN or infinity, and one is above minus
    infinity."""
    top, numbers = F(-np.inf), U(0)
    for v in range(U(len(logits_V))):
        numbers += U(logits_V[v] < F(np.inf))  # not true of NaN
        top = max(top, logits_V[v])
    return top, numbers == U(len(logits_V)) and top > F(-np.inf)


@inlined
def _place(logits_V: Any, top: Any, sums: Any, target: Any) -> Any:
    """The first token at which the cumulative weight exceeds `target`; if rounding leaves none, the last token of the
    block with weight. `sums`: weight of each block."""
    before, block = 0.0, U(0)
    while before + sums[block] <= target and block + U(1) < U(len(sums)):
        before += sums[block]
        block += U(1)
    found: Any = block * _BLOCK
    for v in range(found, min(found + _BLOCK, U(len(logits_V)))):
        weight = _weight(logits_V[v], top)
        if weight > F(0.0):
            found, before = v, before + weight
            if before > target:
                break
    return found


@compiled
def _draw(logits: Any, size: Any, greedy: Any, uniforms: Any, tokens: Any, logprobs: Any) -> None:
    rows, blocks = U(len(tokens)), (U(size) + _BLOCK - U(1)) // _BLOCK
    logits_RV, sums = floats(logits, rows * U(size)), np.empty(blocks, np.float64)
    for row in range(rows):
        logits_V = logits_RV[row * U(size) : (row + U(1)) * U(size)]
        top, finite = _largest(logits_V)
        tokens[row], logprobs[row] = 0, np.nan
        if not finite:
            continue
        total = 0.0
        for block in range(blocks):
            mass: Any = F(0.0)
            for v in range(block * _BLOCK, min((block + U(1)) * _BLOCK, U(size))):
                mass += _weight(logits_V[v], top)
            sums[block] = mass
            total += mass
        if greedy[row]:
            token = U(0)
            while logits_V[token] < top:
                token += U(1)
        else:
            token = _place(logits_V, top, sums, uniforms[row] * total)
        tokens[row], logprobs[row] = token, logits_V[token] - top - np.log(total)


def draw(
    logits_RV: Tensor, greedy: npt.NDArray[np.bool_], uniforms: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw a token per row from the softmax of the logits; returns token ids [R] and their log-probabilities [R]. If
    one of a row's logits is NaN or plus infinity, or all are minus infinity, the row gets token 0 with the
    log-probability NaN.

    Args:
        logits_RV: float32, on the CPU.
        greedy: [R], rows that take the likeliest token, the first of equals.
        uniforms: [R], random numbers in [0, 1).
    """
    logits_RV = logits_RV.contiguous()
    rows, size = logits_RV.shape
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    _draw(logits_RV.data_ptr(), size, greedy, uniforms, tokens, logprobs)
    return tokens, logprobs
