"""Draw one token per row from logits: on the CPU in one loop that writes no distribution to memory, on a GPU by a few
Triton kernels, with temperature, top-k, top-p and min-p.

With torch operations, a softmax, a log-softmax and a cumulative sum over the vocabulary are written for each row. The
CPU's loop reads the logits twice, and the block of the drawn token once more::

    logits     . . . . | . . . . | . . . .       find the largest
    blocks        0.9  |   0.25  |   0.85        sum the exponentials of each block
    target                  ^                    find the block, then the token in it

On a GPU several programs read a row, part by part, so that one row keeps the device busy too. No distribution is
written, so no memory of the vocabulary's size is allocated. All settings are copied from the host at once, and tokens
and log-probabilities are copied back at once::

    tops       one program per part of a row: its largest logit
    cutoffs    one program per row, if there are filters
    sums       one program per part: its weight
    find       one program per row: finds the part, then the token in it

    settings   uniform | temperature, 0: greedy | top-k | top-p | log of min-p      [R, 5], float64
    drawn      token | log-probability                                              [R, 2], float64

A cutoff is the largest number such that enough tokens (top-k) or enough of their mass (top-p) have a logit of at least
this number. It is found by bisection over the 2^32 float32 numbers, ordered as integers, so no sorting is needed.
Tokens as likely as the last token kept are kept too, as in `model.truncation`. The drawn token is the first whose
cumulative weight exceeds uniform x mass, as on the CPU: blocks are searched first, then the tokens of one
block.

Sums over a part are float32, sums of parts float64. TRITON_INTERPRET=1 runs the kernel on the CPU.

Axes: R row, V vocabulary, B token of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.model.kernels.compiled import F, U, compiled, exp, floats, inlined
from stretto.model.truncation import Truncation

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
    """The first token at which the cumulative weight exceeds `target`. `sums`: weight of each block."""
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
    """Draw a token per row from the softmax of the logits; returns token ids [R] and their log-probabilities [R]. The
    log-probability is NaN for a row whose logits are no distribution.

    Args:
        logits_RV: float32, on the CPU.
        greedy: [R], rows that take the likeliest token.
        uniforms: [R], random numbers in [0, 1).
    """
    logits_RV = logits_RV.contiguous()
    rows, size = logits_RV.shape
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    _draw(logits_RV.data_ptr(), size, greedy, uniforms, tokens, logprobs)
    return tokens, logprobs


try:
    import triton
    import triton.language as tl
except ImportError:  # optional on a machine without a GPU
    triton = tl = None

#: Whether the kernel can be launched.
DRAWS = triton is not None

_TRITON_BLOCK = 2048
_BITS = 32
_SETTINGS = 5


def _kernel(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


@_kernel
def _block(logits_V: tl.tensor, first: tl.tensor, size: tl.tensor, divisor: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Logits of the block from token `first` on, divided by `divisor` (-inf beyond the vocabulary); and their token
    ids."""
    places_B = first + tl.arange(0, BLOCK)
    logits_B = tl.load(logits_V + places_B, mask=places_B < size, other=float("-inf"))
    return tl.div_rn(logits_B, divisor) + 0.0, places_B  # + 0.0: the zeros are equal as integers too


@_kernel
def _degree(settings_R5: tl.tensor, row: tl.tensor) -> Any:
    """The number by which the logits of a row are divided, and whether it takes the likeliest token."""
    temperature = tl.load(settings_R5 + row * 5 + 1).to(tl.float32)
    greedy = temperature == 0.0
    return tl.where(greedy, 1.0, temperature), greedy


@_kernel
def _ordered(logits: tl.tensor) -> tl.tensor:
    """Map float32 numbers to 32-bit integers with the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@_kernel
def _tops(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, p): the largest logit of part p of row r; NaN if a logit is NaN or plus infinity."""
    row, part = tl.program_id(0), tl.program_id(1)
    divisor, _ = _degree(settings_R5, row)
    logits_B, _ = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
    odd = tl.sum((logits_B != logits_B).to(tl.int32) + (logits_B == float("inf")).to(tl.int32), 0)
    top = tl.max(tl.where(logits_B == logits_B, logits_B, float("-inf")), 0)
    tl.store(tops_RP + row * tl.num_programs(1) + part, tl.where(odd > 0, float("nan"), top))


@_kernel
def _top(tops_RP: tl.tensor, row: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The largest logit of a row; minus infinity if its logits are no distribution."""
    places_P = tl.arange(0, PARTS)
    tops_P = tl.load(tops_RP + row * parts + places_P, mask=places_P < parts, other=float("-inf"))
    odd = tl.sum((tops_P != tops_P).to(tl.int32), 0)
    return tl.where(odd > 0, float("-inf"), tl.max(tl.where(tops_P == tops_P, tops_P, float("-inf")), 0))


@_kernel
def _sums(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    cutoffs_R: tl.tensor,
    sums_RP: tl.tensor,
    size: tl.tensor,
    FILTERS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, p): the weight of part p of row r, that is the sum of exp(logit - largest logit)."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    divisor, _ = _degree(settings_R5, row)
    top = _top(tops_RP, row, parts, PARTS)
    weight = tl.full((), 0.0, tl.float32)
    if top > float("-inf"):
        logits_B, places_B = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
        kept_B = places_B < size
        if FILTERS:
            kept_B = kept_B & (_ordered(logits_B) >= tl.load(cutoffs_R + row))
        weight = tl.sum(tl.where(kept_B, tl.exp(logits_B - top), 0.0), 0)
    tl.store(sums_RP + row * parts + part, weight)


@_kernel
def _left(
    logits_V: tl.tensor,
    size: tl.tensor,
    divisor: tl.tensor,
    top: tl.tensor,
    cutoff: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Number of the tokens whose logit is at least `cutoff` (as an ordered integer); without `COUNT` the sum of their
    weights exp(logit - top)."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, size, BLOCK):
        logits_B, places_B = _block(logits_V, first, size, divisor, BLOCK)
        kept_B = (_ordered(logits_B) >= cutoff) & (places_B < size)
        if COUNT:
            total += tl.sum(kept_B.to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(kept_B, tl.exp(logits_B - top), 0.0), 0).to(tl.float64)
    return total


@_kernel
def _cutoff(
    logits_V: tl.tensor,
    size: tl.tensor,
    divisor: tl.tensor,
    top: tl.tensor,
    lowest: tl.tensor,
    wanted: tl.tensor,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest cutoff, at least `lowest`, for which `_left` is at least `wanted`; `lowest` must satisfy this."""
    low, high = lowest.to(tl.int64), _ordered(top).to(tl.int64) + 1
    for _ in range(BITS):
        middle = low + (high - low) // 2
        enough = _left(logits_V, size, divisor, top, middle.to(tl.int32), COUNT, BLOCK) >= wanted
        moves = middle > low
        low = tl.where(enough & moves, middle, low)
        high = tl.where(enough | (not moves), high, middle)
    return low.to(tl.int32)


@_kernel
def _cutoffs(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    cutoffs_R: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program r: the least logit, as an ordered integer, that the filters of row r leave."""
    row = tl.program_id(0)
    logits_V, settings = logits_RV + row.to(tl.int64) * stride, settings_R5 + row * 5
    divisor, _ = _degree(settings_R5, row)
    top = _top(tops_RP, row, parts, PARTS)
    cutoff = tl.full((), -(2**31), tl.int32)
    if top > float("-inf"):
        top_k, top_p = tl.load(settings + 2), tl.load(settings + 3)
        if top_k > 0.0:
            few = tl.minimum(top_k, size.to(tl.float64))
            cutoff = _cutoff(logits_V, size, divisor, top, cutoff, few, True, BITS, BLOCK)
        if top_p < 1.0:
            mass = top_p * _left(logits_V, size, divisor, top, cutoff, False, BLOCK)
            cutoff = _cutoff(logits_V, size, divisor, top, cutoff, mass, False, BITS, BLOCK)
        cutoff = tl.maximum(cutoff, _ordered(top + tl.load(settings + 4).to(tl.float32)))
    tl.store(cutoffs_R + row, cutoff)


@_kernel
def _place_of(
    logits_V: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    divisor: tl.tensor,
    top: tl.tensor,
    cutoff: tl.tensor,
    rest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first token of a part at which the cumulative weight exceeds `rest`; by rounding perhaps none: the last token
    with a weight."""
    logits_B, places_B = _block(logits_V, first, size, divisor, BLOCK)
    kept_B = (_ordered(logits_B) >= cutoff) & (places_B < size)
    weights_B = tl.where(kept_B, tl.exp(logits_B - top), 0.0)
    reached_B = (tl.cumsum(weights_B.to(tl.float64), 0) > rest) & (weights_B > 0.0)
    here = tl.min(tl.where(reached_B, places_B, size), 0)
    return tl.where(here < size, here, tl.max(tl.where(weights_B > 0.0, places_B, 0), 0))


@_kernel
def _find(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    cutoffs_R: tl.tensor,
    sums_RP: tl.tensor,
    drawn_R2: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    FILTERS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program r draws the token of row r and stores it with its log-probability."""
    row, places_P = tl.program_id(0), tl.arange(0, PARTS)
    logits_V = logits_RV + row.to(tl.int64) * stride
    divisor, greedy = _degree(settings_R5, row)
    top = _top(tops_RP, row, parts, PARTS)
    if top == float("-inf"):  # no distribution
        tl.store(drawn_R2 + row * 2, tl.full((), 0.0, tl.float64))
        tl.store(drawn_R2 + row * 2 + 1, tl.full((), float("nan"), tl.float64))
        return
    sums_P = tl.load(sums_RP + row * parts + places_P, mask=places_P < parts, other=0.0).to(tl.float64)
    ends_P = tl.cumsum(sums_P, 0)
    total = tl.max(ends_P, 0)
    if greedy:
        tops_P = tl.load(tops_RP + row * parts + places_P, mask=places_P < parts, other=float("-inf"))
        part = tl.min(tl.where(tops_P == top, places_P, PARTS), 0)
        logits_B, places_B = _block(logits_V, part * BLOCK, size, divisor, BLOCK)
        token = tl.min(tl.where(logits_B == top, places_B, size), 0)
    else:
        target = tl.load(settings_R5 + row * 5) * total
        part = tl.min(tl.where((ends_P > target) & (sums_P > 0.0), places_P, PARTS), 0)
        last = tl.max(tl.where(sums_P > 0.0, places_P, 0), 0)
        part = tl.minimum(part, last)
        rest = target - tl.sum(tl.where(places_P == part - 1, ends_P, 0.0), 0)
        cutoff = tl.full((), -(2**31), tl.int32)
        if FILTERS:
            cutoff = tl.load(cutoffs_R + row)
        token = _place_of(logits_V, part * BLOCK, size, divisor, top, cutoff, rest, BLOCK)
    logit = tl.div_rn(tl.load(logits_V + token), divisor)
    logprob = logit.to(tl.float64) - top.to(tl.float64) - tl.log(total)
    tl.store(drawn_R2 + row * 2, token.to(tl.float64))
    tl.store(drawn_R2 + row * 2 + 1, logprob)


def draw_on_device(
    logits_RV: Tensor,
    temperatures: npt.NDArray[np.float32],
    uniforms: npt.NDArray[np.float64],
    rows: npt.NDArray[np.int64],
    truncation: Truncation | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw a token per row from the softmax of logits / temperature over the tokens that the filters leave; returns
    token ids [R] and their log-probabilities [R]. The log-probability is NaN for a row whose logits are no
    distribution. The host waits once, for the result.

    Args:
        logits_RV: float32.
        temperatures: [R]; 0 takes the likeliest token, with its log-probability at temperature 1.
        uniforms: [R], random numbers in [0, 1).
        rows: indices of the rows that have filters.
        truncation: filter settings of these rows; None: no row has filters.
    """
    count = len(logits_RV)
    device = logits_RV.device
    held = torch.zeros((count, _SETTINGS), dtype=torch.float64, pin_memory=device.type == "cuda")
    settings = held.numpy()
    settings[:, 0], settings[:, 1], settings[:, 3], settings[:, 4] = uniforms, temperatures, 1.0, -np.inf
    if truncation is not None:
        settings[rows, 2], settings[rows, 3] = truncation.top_k, truncation.top_p
        with np.errstate(divide="ignore"):
            settings[rows, 4] = np.log(truncation.min_p)
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    # Nothing waits for the device before the result is read: settings and launches are queued behind the logits.
    drawn = _launched(logits_RV, held.to(device, non_blocking=True), truncation is not None).cpu().numpy()
    return drawn[:, 0].astype(np.int64), drawn[:, 1].astype(np.float32)


def _launched(logits_RV: Tensor, settings_R5: Tensor, filters: bool) -> Tensor:
    """Launch the kernels of a draw; returns [R, 2]."""
    count, size = logits_RV.shape
    block = min(_TRITON_BLOCK, triton.next_power_of_2(size))
    parts = triton.cdiv(size, block)
    constants = {"PARTS": triton.next_power_of_2(parts), "BLOCK": block, "num_warps": 8}
    drawn_R2 = torch.empty((count, 2), dtype=torch.float64, device=logits_RV.device)
    tops_RP, sums_RP = torch.empty((2, count, parts), dtype=torch.float32, device=logits_RV.device)
    cutoffs_R = torch.empty(count if filters else 0, dtype=torch.int32, device=logits_RV.device)
    given = logits_RV, logits_RV.stride(0), settings_R5, tops_RP
    _tops[(count, parts)](*given, size, BLOCK=block, num_warps=8)
    if filters:
        _cutoffs[(count,)](*given, cutoffs_R, size, parts, BITS=_BITS + 1, **constants)
    _sums[(count, parts)](*given, cutoffs_R, sums_RP, size, FILTERS=filters, **constants)
    _find[(count,)](*given, cutoffs_R, sums_RP, drawn_R2, size, parts, FILTERS=filters, **constants)
    return drawn_R2
