"""Draw one token per row from logits on a GPU by a few Triton kernels, with temperature, top-k, top-p and min-p.

Several programs read a row, part by part, so that one row keeps the device busy too. No distribution is written, so no
memory of the vocabulary's size is allocated. All settings are copied from the host at once, and tokens and
log-probabilities are copied back at once::

    tops       one program per part of a row: its largest logit
    sums       one program per part: its weight
    find       one program per row: finds the part, then the token in it

    settings   uniform | temperature, 0: greedy | top-k | top-p | log of min-p      [R, 5], float64
    drawn      token | log-probability                                              [R, 2], float64

With top-k or top-p, three more come before `sums`::

    reach      one program per part: tokens within each of 16 distances from the largest logit; their weight for top-p
    gather     one program per part: copies the tokens within the least distance that has enough, if they are few
    cut        one program per row: the cutoff, among these tokens; among all if they are many

A cutoff is the largest number such that enough tokens (top-k) or enough of their mass (top-p) have a logit of at least
this number. It is among the 2^32 float32 numbers, ordered as integers, so no sorting is needed. A round of `cut` tries
8 numbers at equal distances, and leaves a range of an eighth::

    low                         high         round 1      enough tokens are left at the first five
     | x | x | x | x | x |   |   |
                     | x x x x   |           round 2      ... and so on until one number is left

Tokens as likely as the last token kept are kept too. The drawn token is the first whose
cumulative weight exceeds uniform x mass, as on the CPU: parts are searched first, then the tokens of one part.

Sums over a part are float32, sums of parts float64. TRITON_INTERPRET=1 runs the kernels on the CPU.

Axes: R row, V vocabulary, P part of a row, B token of a part, D distance, C gathered token, K cutoff to try.
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
_DISTANCES = 16
_WAYS = 8  # numbers that a round tries
_ROOM = 16_384  # most tokens of a row that are gathered
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
    """Program (r, p) writes the largest logit of part p of row r, divided by the temperature, to `tops_RP`; NaN if a
    logit of the part is NaN or plus infinity."""
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
def _asked(settings_R5: tl.tensor, row: tl.tensor, size: tl.tensor) -> Any:
    """Top-k (0: off) and top-p (1 or more: off) of a row."""
    return tl.minimum(tl.load(settings_R5 + row * 5 + 2), size.to(tl.float64)), tl.load(settings_R5 + row * 5 + 3)


@kernel
def _ranked(settings_R5: tl.tensor, row: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Whether row number `row` has top-k or top-p, and its largest logit `top` is above minus infinity (see `_top`)."""
    given = (tl.load(settings_R5 + row * 5 + 2) > 0.0) | (tl.load(settings_R5 + row * 5 + 3) < 1.0)
    return given & (top > float("-inf"))


@kernel
def _edge(top: tl.tensor, distance: tl.tensor, DISTANCES: tl.constexpr) -> tl.tensor:
    """The least logit within a distance, given by its number; within the last one all are. Each is computed exactly
    but for one rounding, so that all kernels agree."""
    below = (distance * (distance + 8)).to(tl.float32) * 0.0625  # 0.56, 1.25, ..., 19.25
    return tl.where(distance == DISTANCES - 1, float("-inf"), top - below)


@kernel
def _reach(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    reached_RP2D: tl.tensor,
    size: tl.tensor,
    DISTANCES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, p), if row r has top-k or top-p: stores the number of tokens of part p within each distance of the
    largest logit; without top-k their weight too."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    top = _top(tops_RP, row, parts, PARTS)
    if _ranked(settings_R5, row, top):
        divisor, _ = _degree(settings_R5, row)
        logits_B, places_B = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
        ones_B = tl.where(places_B < size, 1.0, 0.0)
        distances_D = tl.arange(0, DISTANCES)
        near_DB = logits_B[None, :] >= _edge(top, distances_D, DISTANCES)[:, None]
        to_D = reached_RP2D + (row * parts + part) * 2 * DISTANCES + distances_D
        tl.store(to_D, tl.sum(tl.where(near_DB, ones_B[None, :], 0.0), 1))
        if tl.load(settings_R5 + row * 5 + 2) == 0.0:
            weights_B = tl.exp(logits_B - top)
            tl.store(to_D + DISTANCES, tl.sum(tl.where(near_DB, weights_B[None, :], 0.0), 1))


@kernel
def _needed(
    settings_R5: tl.tensor,
    reached_RP2D: tl.tensor,
    row: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    DISTANCES: tl.constexpr,
    PARTS: tl.constexpr,
) -> Any:
    """The number of the least distance within which a row has enough tokens for top-k; without top-k, enough weight for
    top-p. Also the tokens within it, those of them in earlier parts than `part`, and without top-k the weight of all
    tokens. `parts`: number of parts of a row; `PARTS`: the same, rounded up to a power of two."""
    top_k, top_p = _asked(settings_R5, row, size)
    places_P, distances_D = tl.arange(0, PARTS), tl.arange(0, DISTANCES)
    from_PD = reached_RP2D + ((row * parts + places_P) * 2 * DISTANCES)[:, None] + distances_D[None, :]
    counts_PD = tl.load(from_PD, mask=(places_P < parts)[:, None], other=0.0).to(tl.int32)
    weighed = places_P < tl.where(top_k > 0.0, 0, parts)
    weights_PD = tl.load(from_PD + DISTANCES, mask=weighed[:, None], other=0.0)
    counts_D, weights_D = tl.sum(counts_PD, 0), tl.sum(weights_PD.to(tl.float64), 0)
    weight = tl.max(weights_D, 0)
    enough_D = tl.where(top_k > 0.0, counts_D.to(tl.float64) >= top_k, weights_D >= top_p * weight)
    distance = tl.min(tl.where(enough_D, distances_D, DISTANCES - 1), 0)
    counts_P = tl.sum(tl.where(distances_D[None, :] == distance, counts_PD, 0), 1)
    return distance, tl.sum(counts_P, 0), tl.sum(tl.where(places_P < part, counts_P, 0), 0), weight


@kernel
def _gather(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    reached_RP2D: tl.tensor,
    chosen_RC: tl.tensor,
    size: tl.tensor,
    ROOM: tl.constexpr,
    DISTANCES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, p) copies the logits of part p of row r within the distance that is needed to their places among
    those of the row, in the order of tokens, if the row has at most `ROOM`."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    top = _top(tops_RP, row, parts, PARTS)
    if _ranked(settings_R5, row, top):
        distance, count, before, _weight = _needed(settings_R5, reached_RP2D, row, part, parts, size, DISTANCES, PARTS)
        edge = _edge(top, distance, DISTANCES)
        if (count <= ROOM) & (tl.load(tops_RP + row * parts + part) >= edge):
            divisor, _greedy = _degree(settings_R5, row)
            logits_B, places_B = _block(logits_RV + row.to(tl.int64) * stride, part * BLOCK, size, divisor, BLOCK)
            near_B = (logits_B >= edge) & (places_B < size)
            to_B = row * ROOM + before + tl.cumsum(near_B.to(tl.int32), 0) - 1
            tl.store(chosen_RC + to_B, logits_B, mask=near_B)


@kernel
def _left(
    logits_C: tl.tensor,
    count: tl.tensor,
    divisor: tl.tensor,
    top: tl.tensor,
    cutoffs_K: tl.tensor,
    COUNT: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How much each cutoff leaves of `count` logits: tokens, or without `COUNT` their weight."""
    lefts_K = tl.zeros([WAYS], tl.float64)
    for first in range(0, count, BLOCK):
        logits_B, places_B = _block(logits_C, first, count, divisor, BLOCK)
        weights_B = tl.where(places_B < count, 1.0, 0.0) if COUNT else tl.exp(logits_B - top)
        kept_KB = _ordered(logits_B)[None, :] >= cutoffs_K[:, None]
        lefts_K += tl.sum(tl.where(kept_KB, weights_B[None, :], 0.0), 1).to(tl.float64)
    return lefts_K


@kernel
def _cutoff(
    logits_C: tl.tensor,
    count: tl.tensor,
    divisor: tl.tensor,
    top: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    COUNT: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest cutoff, from `low` on, that leaves as much as is wanted of `count` logits (`_left`)."""
    ways_K = tl.arange(0, WAYS)
    high = _ordered(top).to(tl.int64) + 1
    while high - low > 1:
        cutoffs_K = (low + (high - low) * ways_K // WAYS).to(tl.int32)
        lefts_K = _left(logits_C, count, divisor, top, cutoffs_K, COUNT, WAYS, BLOCK)
        best = tl.max(tl.where(lefts_K >= wanted, ways_K, 0), 0).to(tl.int64)
        step = high - low
        high = low + step * (best + 1) // WAYS
        low = low + step * best // WAYS
    return low


@kernel
def _cut(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    settings_R5: tl.tensor,
    tops_RP: tl.tensor,
    reached_RP2D: tl.tensor,
    chosen_RC: tl.tensor,
    cutoffs_R: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    ROOM: tl.constexpr,
    WAYS: tl.constexpr,
    DISTANCES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program r stores the cutoff of row r by top-k and top-p; rows without them keep theirs."""
    row = tl.program_id(0)
    top = _top(tops_RP, row, parts, PARTS)
    if _ranked(settings_R5, row, top):
        top_k, top_p = _asked(settings_R5, row, size)
        distance, count, _before, weight = _needed(settings_R5, reached_RP2D, row, 0, parts, size, DISTANCES, PARTS)
        low = tl.where(distance == DISTANCES - 1, -(2**31), _ordered(_edge(top, distance, DISTANCES))).to(tl.int64)
        divisor, _greedy = _degree(settings_R5, row)
        logits_C = logits_RV + row.to(tl.int64) * stride
        if count <= ROOM:
            logits_C, divisor = chosen_RC + row.to(tl.int64) * ROOM, 1.0
        else:
            count = size
        if top_k > 0.0:
            low = _cutoff(logits_C, count, divisor, top, low, top_k, True, WAYS, BLOCK)
            cutoffs_K = low.to(tl.int32) + tl.zeros([WAYS], tl.int32)
            weight = tl.max(_left(logits_C, count, divisor, top, cutoffs_K, False, WAYS, BLOCK), 0)
        if top_p < 1.0:
            low = _cutoff(logits_C, count, divisor, top, low, top_p * weight, False, WAYS, BLOCK)
        tl.store(cutoffs_R + row, low.to(tl.int32))


@kernel
def _least(
    settings_R5: tl.tensor, cutoffs_R: tl.tensor, row: tl.tensor, top: tl.tensor, FILTERS: tl.constexpr
) -> tl.tensor:
    """The least logit, as an ordered integer, that the filters of a row leave; without `FILTERS` below every logit."""
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
    """Program r draws the token of row r (greedy: the first of the largest logit) and stores it with its
    log-probability among the tokens that filters leave; token 0 and NaN if the row is no distribution (`_top`)."""
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
    infinity, or all are minus infinity, the row gets token 0 with the log-probability NaN. The host waits once, for the
    result.

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
    ranked = filters is not None and bool(np.any((filters[0] > 0) | (filters[1] < 1.0)))
    # Nothing waits for the device before the result is read: settings and launches are queued behind the logits.
    drawn = _launched(logits_RV, held.to(device, non_blocking=True), filters is not None, ranked).cpu().numpy()
    return drawn[:, 0].astype(np.int64), drawn[:, 1].astype(np.float32)


def _launched(logits_RV: Tensor, settings_R5: Tensor, filtered: bool, ranked: bool) -> Tensor:
    """Launch the kernels of a draw; returns [R, 2]: token, log-probability. `filtered`: whether a row has filters;
    `ranked`: whether one has top-k or top-p."""
    count, size = logits_RV.shape
    block = min(_BLOCK, triton.next_power_of_2(size))
    parts = triton.cdiv(size, block)
    constants = {"PARTS": triton.next_power_of_2(parts), "BLOCK": block, "num_warps": 8}
    drawn_R2 = settings_R5.new_empty((count, 2))
    tops_RP, sums_RP = logits_RV.new_empty((2, count, parts))
    cutoffs_R = torch.full((count if filtered else 0,), _LOWEST, dtype=torch.int32, device=logits_RV.device)
    given = logits_RV, logits_RV.stride(0), settings_R5, tops_RP
    _tops[(count, parts)](*given, size, BLOCK=block, num_warps=8)
    if ranked:
        reached_RP2D, chosen_RC = (tops_RP.new_empty((count, n)) for n in (parts * 2 * _DISTANCES, _ROOM))
        constants_D = constants | {"DISTANCES": _DISTANCES}
        _reach[(count, parts)](*given, reached_RP2D, size, **constants_D)
        _gather[(count, parts)](*given, reached_RP2D, chosen_RC, size, ROOM=_ROOM, **constants_D)
        tables = reached_RP2D, chosen_RC, cutoffs_R
        _cut[(count,)](*given, *tables, size, parts, ROOM=_ROOM, WAYS=_WAYS, **constants_D)
    _sums[(count, parts)](*given, cutoffs_R, sums_RP, size, FILTERS=filtered, **constants)
    _find[(count,)](*given, cutoffs_R, sums_RP, drawn_R2, size, parts, FILTERS=filtered, **constants)
    return drawn_R2
