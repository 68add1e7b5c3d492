"""Draw one token per row from logits on a GPU by a few Triton kernels, with temperature, top-k, top-p and min-p.

Several programs read a row, part by part, so that one row keeps the device busy too. No distribution is written, so no
memory of the vocabulary's size is allocated. All settings are copied from the host at once, and tokens and
log-probabilities are copied back at once::

    tops       one program per part of a row: its largest logit
    narrow     one program per part: weights above the cutoffs to try; a few rounds for each filter
    sums       one program per part: its weight
    find       one program per row: finds the part, then the token in it

    settings   uniform | temperature, 0: greedy | top-k | top-p | log of min-p      [R, 5], float64
    drawn      token | log-probability                                              [R, 2], float64

A cutoff is the largest number such that enough tokens (top-k) or enough of their mass (top-p) have a logit of at least
this number. It is among the 2^32 float32 numbers, ordered as integers, so no sorting is needed. A round tries 16
numbers at equal distances, and leaves a range of a sixteenth::

    low                         high         round 1      enough tokens are left at the first five
     | x | x | x | x | x |   |   |
                     | x x x x   |           round 2      ... and so on until one number is left

Tokens as likely as the last token kept are kept too. The drawn token is the first whose
cumulative weight exceeds uniform x mass, as on the CPU: parts are searched first, then the tokens of one part.

Sums over a part are float32, sums of parts float64. TRITON_INTERPRET=1 runs the kernels on the CPU.

Axes: R row, V vocabulary, P part of a row, B token of a part, K number to try as a cutoff.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto_kernels.gpu.launching import kernel, tl, triton

#: Top-k (0: off), top-p (1: off) and min-p (0: off) of each row with filters.
Filters = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]

#: Whether the kernels can be launched.
DRAWS = triton is not None

_BLOCK = 2048  # tokens of a part
_WAYS = 16  # numbers that a round tries
_ROUNDS = 8  # 16^8 = 2^32
_SETTINGS = 5
_LOWEST = -(2**31)


@kernel
def _block(logits_V: tl.tensor, first: tl.tensor, size: tl.tensor, divisor: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Logits of the block from token `first` on, divided by `divisor` (-inf from token `size` on, the end of the
    vocabulary); and their token ids."""
    places_B = first + tl.arange(0, BLOCK)
    logits_B = tl.load(logits_V + places_B, mask=places_B < size, other=float("-inf"))
    return tl.div_rn(logits_B, divisor) + 0.0, places_B  # + 0.0: the zeros are equal as integers too


@kernel
def _degree(settings_R5: tl.tensor, row: tl.tensor) -> Any:
    """The number by which the logits of a row are divided, and whether the row takes the likeliest token."""
    temperature = tl.load(settings_R5 + row * 5 + 1).to(tl.float32)
    greedy = temperature == 0.0
    return tl.where(greedy, 1.0, temperature), greedy


@kernel
def _ordered(logits: tl.tensor) -> tl.tensor:
    """Map float32 numbers to 32-bit integers with the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
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


@kernel
def _top(tops_RP: tl.tensor, row: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The largest logit of a row; minus infinity if one of its logits is NaN or plus infinity. `parts`: number of parts
    of a row; `PARTS`: the same, rounded up to a power of two."""
    places_P = tl.arange(0, PARTS)
    tops_P = tl.load(tops_RP + row * parts + places_P, mask=places_P < parts, other=float("-inf"))
    odd = tl.sum((tops_P != tops_P).to(tl.int32), 0)
    return tl.where(odd > 0, float("-inf"), tl.max(tl.where(tops_P == tops_P, tops_P, float("-inf")), 0))


@kernel
def _narrowed(
    ranges_R3: tl.tensor,
    lefts_RPK: tl.tensor,
    row: tl.tensor,
    parts: tl.tensor,
    WAYS: tl.constexpr,
    PARTS: tl.constexpr,
) -> Any:
    """The range of possible cutoffs of a row after a round: its lowest number, which leaves enough; the number after
    its last; and how many tokens, or how much weight, are wanted. `parts` of a row; `PARTS`: rounded up to a power of
    two."""
    low, high = tl.load(ranges_R3 + row * 3).to(tl.int64), tl.load(ranges_R3 + row * 3 + 1).to(tl.int64)
    wanted = tl.load(ranges_R3 + row * 3 + 2)
    places_P, ways_K = tl.arange(0, PARTS), tl.arange(0, WAYS)
    places_PK = (row * parts + places_P)[:, None] * WAYS + ways_K[None, :]
    lefts_PK = tl.load(lefts_RPK + places_PK, mask=(places_P < parts)[:, None], other=0.0)
    lefts_K = tl.sum(lefts_PK.to(tl.float64), 0)
    # Below zero it is a share of the weight at the lowest number, which is known from the first round on.
    wanted = tl.where(wanted < 0.0, -wanted * tl.sum(tl.where(ways_K == 0, lefts_K, 0.0), 0), wanted)
    best = tl.max(tl.where(lefts_K >= wanted, ways_K, 0), 0).to(tl.int64)
    return low + (high - low) * best // WAYS, low + (high - low) * (best + 1) // WAYS, wanted


@kernel
def _wanted(settings_R5: tl.tensor, row: tl.tensor, size: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """A row's top-k (`COUNT`), a number of tokens, or its top-p, the negative of a share of their weight; 0: no such
    filter."""
    if COUNT:
        wanted = tl.minimum(tl.load(settings_R5 + row * 5 + 2), size.to(tl.float64))
    else:
        share = tl.load(settings_R5 + row * 5 + 3)
        wanted = tl.where(share < 1.0, -share, 0.0)
    return wanted


@kernel
def _narrow(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    cutoffs_R: tl.tensor,
    ranges_R3: tl.tensor,
    lefts_RPK: tl.tensor,
    next_ranges_R3: tl.tensor,
    next_lefts_RPK: tl.tensor,
    size: tl.tensor,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WAYS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A round of the search for cutoffs. Program (r, p): how much of part p of row r is at least each number to try:
    tokens, or without `COUNT` their weight. The range is that of the round before, at first all from the row's cutoff
    so far."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    top = _top(tops_RP, row, parts, PARTS)
    wanted = _wanted(settings_R5, row, size, COUNT)
    if (wanted != 0.0) & (top > float("-inf")):
        if FIRST:
            low, high = tl.load(cutoffs_R + row).to(tl.int64), _ordered(top).to(tl.int64) + 1
        else:
            low, high, wanted = _narrowed(ranges_R3, lefts_RPK, row, parts, WAYS, PARTS)
        if part == 0:
            tl.store(next_ranges_R3 + row * 3, low.to(tl.float64))
            tl.store(next_ranges_R3 + row * 3 + 1, high.to(tl.float64))
            tl.store(next_ranges_R3 + row * 3 + 2, wanted)
        ways_K = tl.arange(0, WAYS)
        cutoffs_K = (low + (high - low) * ways_K // WAYS).to(tl.int32)
        divisor, _ = _degree(settings_R5, row)
        logits_B, places_B = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
        if COUNT:
            weights_B = tl.where(places_B < size, 1.0, 0.0)
        else:
            weights_B = tl.where(places_B < size, tl.exp(logits_B - top), 0.0)
        kept_KB = _ordered(logits_B)[None, :] >= cutoffs_K[:, None]
        lefts_K = tl.sum(tl.where(kept_KB, weights_B[None, :], 0.0), 1)
        tl.store(next_lefts_RPK + (row * parts + part) * WAYS + ways_K, lefts_K)


@kernel
def _settle(
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    cutoffs_R: tl.tensor,
    ranges_R3: tl.tensor,
    lefts_RPK: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    COUNT: tl.constexpr,
    WAYS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Program r stores the cutoff of row r after the last round of a filter; rows without this filter keep theirs."""
    row = tl.program_id(0)
    if (_wanted(settings_R5, row, size, COUNT) != 0.0) & (_top(tops_RP, row, parts, PARTS) > float("-inf")):
        low, _, _ = _narrowed(ranges_R3, lefts_RPK, row, parts, WAYS, PARTS)
        tl.store(cutoffs_R + row, low.to(tl.int32))


@kernel
def _least(
    settings_R5: tl.tensor, cutoffs_R: tl.tensor, row: tl.tensor, top: tl.tensor, FILTERS: tl.constexpr
) -> tl.tensor:
    """The least logit, as an ordered integer, that the filters of a row leave."""
    if FILTERS:
        least = tl.maximum(tl.load(cutoffs_R + row), _ordered(top + tl.load(settings_R5 + row * 5 + 4).to(tl.float32)))
    else:
        least = tl.full((), -(2**31), tl.int32)
    return least


@kernel
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
    """Program (r, p): the weight of part p of row r: the sum of exp(logit - largest logit) over the tokens that filters
    leave."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    divisor, _ = _degree(settings_R5, row)
    top = _top(tops_RP, row, parts, PARTS)
    weight = tl.full((), 0.0, tl.float32)
    if top > float("-inf"):
        logits_B, places_B = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
        kept_B = (places_B < size) & (_ordered(logits_B) >= _least(settings_R5, cutoffs_R, row, top, FILTERS))
        weight = tl.sum(tl.where(kept_B, tl.exp(logits_B - top), 0.0), 0)
    tl.store(sums_RP + row * parts + part, weight)


@kernel
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


@kernel
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
    """Program r draws the token of row r and stores it with its log-probability; token 0 and NaN if the row is no
    distribution (`_top`)."""
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
        cutoff = _least(settings_R5, cutoffs_R, row, top, FILTERS)
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
    filters: Filters | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw a token per row from the softmax of logits / temperature over the tokens that the filters leave; returns
    token ids [R] and their log-probabilities [R] in that distribution. If one of a row's logits is NaN or plus
    infinity, or all are minus infinity, the log-probability is NaN, of token 0. The host waits once, for the result.

    Args:
        logits_RV: float32.
        temperatures: [R]; 0 takes the likeliest token, with its log-probability at temperature 1.
        uniforms: [R], random numbers in [0, 1).
        rows: indices of the rows that have filters.
        filters: filter settings of these rows; None: no row has filters.
    """
    count = len(logits_RV)
    device = logits_RV.device
    held = torch.zeros((count, _SETTINGS), dtype=torch.float64, pin_memory=device.type == "cuda")
    settings = held.numpy()
    settings[:, 0], settings[:, 1], settings[:, 3], settings[:, 4] = uniforms, temperatures, 1.0, -np.inf
    if filters is not None:
        top_k, top_p, min_p = filters
        settings[rows, 2], settings[rows, 3] = top_k, top_p
        with np.errstate(divide="ignore"):
            settings[rows, 4] = np.log(min_p)
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    kinds = (filters[0] > 0, filters[1] < 1.0) if filters is not None else ()
    used = filters is not None, *(bool(np.any(kind)) for kind in kinds)
    # Nothing waits for the device before the result is read: settings and launches are queued behind the logits.
    drawn = _launched(logits_RV, held.to(device, non_blocking=True), used).cpu().numpy()
    return drawn[:, 0].astype(np.int64), drawn[:, 1].astype(np.float32)


def _launched(logits_RV: Tensor, settings_R5: Tensor, filters: tuple[bool, ...]) -> Tensor:
    """Launch the kernels of a draw; returns token and log-probability of each row, [R, 2]. `filters`: whether a row has
    filters; and if so, whether one has top-k, and top-p."""
    count, size = logits_RV.shape
    block = min(_BLOCK, triton.next_power_of_2(size))
    parts = triton.cdiv(size, block)
    constants = {"PARTS": triton.next_power_of_2(parts), "BLOCK": block, "num_warps": 8}
    drawn_R2 = settings_R5.new_empty((count, 2))
    tops_RP, sums_RP = logits_RV.new_empty((2, count, parts))
    cutoffs_R = torch.full((count if filters[0] else 0,), _LOWEST, dtype=torch.int32, device=logits_RV.device)
    given = logits_RV, logits_RV.stride(0), settings_R5, tops_RP
    _tops[(count, parts)](*given, size, BLOCK=block, num_warps=8)
    for by_count, wanted in zip((True, False), filters[1:], strict=False):
        if wanted:
            _cut(given, cutoffs_R, size, by_count, constants)
    _sums[(count, parts)](*given, cutoffs_R, sums_RP, size, FILTERS=filters[0], **constants)
    _find[(count,)](*given, cutoffs_R, sums_RP, drawn_R2, size, parts, FILTERS=filters[0], **constants)
    return drawn_R2


def _cut(given: tuple[Any, ...], cutoffs_R: Tensor, size: int, by_count: bool, constants: dict[str, int]) -> None:
    """Raise each row's cutoff to that of its top-k (`by_count`) or top-p; rows without this filter keep theirs."""
    *_, settings_R5, tops_RP = given
    count, parts = tops_RP.shape
    ranges_2R3, lefts_2RPK = settings_R5.new_empty((2, count, 3)), tops_RP.new_empty((2, count, parts, _WAYS))
    kinds = {"COUNT": by_count, "WAYS": _WAYS}
    for number in range(_ROUNDS):
        old, new = (number + 1) % 2, number % 2
        tables = ranges_2R3[old], lefts_2RPK[old], ranges_2R3[new], lefts_2RPK[new]
        _narrow[(count, parts)](*given, cutoffs_R, *tables, size, FIRST=number == 0, **kinds, **constants)
    last = ranges_2R3[(_ROUNDS - 1) % 2], lefts_2RPK[(_ROUNDS - 1) % 2]
    known = {name: value for name, value in constants.items() if name != "BLOCK"}
    _settle[(count,)](settings_R5, tops_RP, cutoffs_R, *last, size, parts, **kinds, **known)
