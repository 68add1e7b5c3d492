"""Stateless sampling: a token is a function of the logits, the completion's seed and the token's position.

So a completion does not depend on the rest of the batch, the engine, or the number of interruptions.

Axes: R row, K likeliest tokens in descending order, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.records import Likeliest, Sampling
from stretto.model.truncation import Truncation, truncate
from stretto_kernels.compiled import compiled, computes, inlined
from stretto_kernels.draw import draw
from stretto_kernels.gpu.draw import DRAWS, draw_on_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-52


class BrokenLogits(FloatingPointError):
    """Some completions have logits that are not finite, so no token can be drawn from them."""

    def __init__(self, requests: frozenset[str]) -> None:
        """`requests`: ids of the affected requests."""
        self.requests = requests
        super().__init__(requests)

    def __str__(self) -> str:
        return "the model's logits are not finite: its weights are broken, or too large for engine.dtype"


@dataclass(frozen=True)
class Filtered:
    """The rows of a step that have a grammar, top-k, top-p or min-p, with their settings. `rows`: their indices in the
    step's logits. `allowed`: bits of the tokens that their grammars allow; None: no row has a grammar."""

    rows: npt.NDArray[np.int64]  # indices of rows of the step's logits, at least one
    truncation: Truncation
    allowed: npt.NDArray[np.int32] | None = None  # [rows, W], bits of the tokens that grammars allow; None: no grammar

    def among(self, places: npt.NDArray[np.int64]) -> Filtered | None:
        """The filtered rows that are also in `places` (ascending row indices of the logits), renumbered as indices into
        ``logits[places]``; None if there are none."""
        kept = np.isin(self.rows, places).nonzero()[0]
        if not len(kept):
            return None
        allowed = None if self.allowed is None else self.allowed[kept]
        return Filtered(np.searchsorted(places, self.rows[kept]), self.truncation.rows(kept), allowed)


class SamplingColumns:
    """Sampling settings of the engine's rows, as one array per setting."""

    def __init__(self, rows: int) -> None:
        self.seeds = np.zeros(rows, np.uint64)
        self.temperatures = np.zeros(rows, np.float32)
        self._truncation = Truncation(np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows))
        self._filtered = np.zeros(rows, np.bool_)

    def set(self, row: int, seed: int, sampling: Sampling) -> None:
        """Store the settings of a new completion in a row; at temperature 0 without top-k, top-p and min-p."""
        self.seeds[row] = seed
        self.temperatures[row] = sampling.temperature
        plain = not sampling.filtered  # a greedy row with a grammar has no other filter
        self._truncation.top_k[row] = 0 if plain else sampling.top_k
        self._truncation.top_p[row] = 1.0 if plain else sampling.top_p
        self._truncation.min_p[row] = 0.0 if plain else sampling.min_p
        self._filtered[row] = sampling.filtered or bool(sampling.grammar)

    def filtered(self, order_R: npt.NDArray[np.int64]) -> Filtered | None:
        """The rows of `order_R` (row of each line of the logits) with a filter or grammar, but not yet the tokens that
        grammars allow; None if there are no such rows."""
        places = self._filtered[order_R].nonzero()[0]
        return Filtered(places, self._truncation.rows(order_R[places])) if len(places) else None


@inlined
def mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit flips half of the output bits on average."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@compiled
def uniforms(seeds: Any, places: Any) -> Any:
    """One float64 in [0, 1) per row: output number `places` (integers [R], from 0) of the SplitMix64 generator that
    starts at ``mix(seeds)`` (uint64 [R])."""
    x = mix(mix(seeds) + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (x >> np.uint64(12)).astype(np.float64) * _TO_UNIT


def sample(
    logits_RV: Tensor,
    temperatures: npt.NDArray[np.float32],
    seeds: npt.NDArray[np.uint64],
    places: npt.NDArray[np.int64],
    filtered: Filtered | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw one token per row.

    Args:
        logits_RV: float32.
        temperatures: [R]; 0 takes the likeliest token.
        seeds: [R], one per completion.
        places: [R], tokens of the completion before this one.
        filtered: rows with a grammar, top-k, top-p or min-p; None: no row has one.

    Returns:
        Token ids [R], and their log-probabilities [R] under the sampled distribution: the softmax of ``logits /
            temperature`` over the tokens that the filters leave. At temperature 0 that would always be 0; the
            log-probability at temperature 1 is given instead. A row with non-finite logits gets any token and the
            log-probability NaN.
    """
    greedy, targets = temperatures == 0.0, uniforms(seeds, places)
    if draws(logits_RV.device):
        if filtered is None or filtered.allowed is None:
            rows = places[:0] if filtered is None else filtered.rows
            filters = None if filtered is None else filtered.truncation.settings
            return draw_on_device(logits_RV, temperatures, targets, rows, filters)
        plain = np.where(greedy, np.float32(0.0), np.float32(1.0))
        return draw_on_device(tempered(logits_RV, temperatures, filtered), plain, targets, places[:0], None)
    logits_RV = tempered(logits_RV, temperatures, filtered)
    if computes(logits_RV.device, logits_RV.dtype):
        return draw(logits_RV, greedy, targets)
    return draw_by_torch(logits_RV, greedy, targets)


def draws(device: torch.device) -> bool:
    """Whether a Triton kernel draws from logits on this device."""
    return DRAWS and device.type == "cuda"


def draw_by_torch(
    logits_RV: Tensor, greedy: npt.NDArray[np.bool_], targets: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw one token per row with torch operations.

    Args:
        logits_RV: after temperature and filters (`tempered`).
        greedy: [R], rows that take the likeliest token.
        targets: [R], one random number in [0, 1) per row; a greedy row ignores its own.

    Returns:
        Token ids [R] and their log-probabilities [R]. A row with non-finite logits gets any token and the
            log-probability NaN.
    """
    logprobs_RV = logits_RV.log_softmax(-1)
    # Not exp() of the line above: it is slow where it underflows, as at every token removed by a filter.
    cumulative_RV = logits_RV.softmax(-1).cumsum(-1, dtype=torch.float64)
    targets_R1 = torch.from_numpy(targets).to(logits_RV.device)[:, None] * cumulative_RV[:, -1:]
    # The first token whose cumulative probability exceeds the target, so never one of probability zero. With 52 random
    # bits the target stays below the total after rounding, too; a NaN target gives any place, or one past the last.
    tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True).clamp(max=logits_RV.shape[1] - 1)
    if greedy.any():
        likeliest_R1 = logits_RV.argmax(-1, keepdim=True)
        tokens_R1 = torch.where(torch.from_numpy(greedy).to(tokens_R1.device)[:, None], likeliest_R1, tokens_R1)
    return tokens_R1[:, 0].cpu().numpy(), logprobs_RV.gather(1, tokens_R1)[:, 0].cpu().numpy()


def tempered(logits_RV: Tensor, temperatures: npt.NDArray[np.float32], filtered: Filtered | None) -> Tensor:
    """Divide each row of logits by its temperature (by 1 if that is 0) and apply the filters (None: no row has any).
    The argument is not changed; it is returned itself if nothing is to be done."""
    if (temperatures != 1.0).any():
        divisors = torch.from_numpy(np.where(temperatures == 0.0, np.float32(1.0), temperatures))
        logits_RV = logits_RV / divisors.to(logits_RV.device)[:, None]
    return logits_RV if filtered is None else _filter(logits_RV, filtered)


def _filter(logits_RV: Tensor, filtered: Filtered) -> Tensor:
    if len(filtered.rows) == len(logits_RV):
        return truncate(logits_RV, filtered.truncation, allowed_RW=filtered.allowed)
    rows = torch.from_numpy(filtered.rows).to(logits_RV.device)
    return logits_RV.index_copy(0, rows, truncate(logits_RV[rows], filtered.truncation, allowed_RW=filtered.allowed))


def top_logprobs(
    logits_RV: Tensor, counts: npt.NDArray[np.int64], temperatures: npt.NDArray[np.float32], filtered: Filtered | None
) -> list[Likeliest]:
    """The likeliest tokens of the distributions from which `sample` draws.

    Args:
        logits_RV: float32.
        counts: [R], number of tokens wanted for each row.
        temperatures: [R]; at 0, the distribution at temperature 1 is meant.
        filtered: rows with a grammar, top-k, top-p or min-p; None: none.

    Returns:
        For each row, (token, log-probability) pairs, the likeliest first; fewer than wanted where the filters or the
            vocabulary leave fewer.
    """
    kept_RV = tempered(logits_RV, temperatures, filtered)
    logprobs_RK, tokens_RK = kept_RV.log_softmax(-1).topk(min(int(counts.max()), logits_RV.shape[1]))
    removed = torch.finfo(kept_RV.dtype).min  # logit of tokens removed by filters
    left_R = (kept_RV.gather(1, tokens_RK) > removed).sum(-1)
    ends_R = np.minimum(counts, left_R.cpu().numpy())
    return [
        tuple(zip(tokens[:end], logprobs[:end], strict=True))
        for tokens, logprobs, end in zip(tokens_RK.tolist(), logprobs_RK.tolist(), ends_R.tolist(), strict=True)
    ]
