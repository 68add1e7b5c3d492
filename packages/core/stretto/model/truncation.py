"""The filters of the sampling distribution: grammar, top-k, top-p and min-p, in this order, on logits after the
temperature.

Engine and trainer both call `truncate`, so there is one definition of the sampling distribution.

Top-k, top-p and min-p each keep the tokens whose logit is at least a *cutoff*; the highest of the three cutoffs
decides. Hence

- tokens exactly as likely as the last token kept are kept too: the result depends only on probabilities, never on token
  ids or the sort order of equal logits;
- at least the likeliest token is kept, whatever the settings.

Axes: R row, S likeliest tokens in descending order, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.records import Sampling

#: A nucleus is searched among the `_FIRST_RANKED` likeliest tokens, and if it is larger, among `_MORE` times as many.
#: Sorting a full row of 8,192 takes ten times as long as finding its first 128.
_FIRST_RANKED = 128
_MORE = 16


@dataclass(frozen=True)
class Truncation:
    """Settings of top-k, top-p and min-p for each row, or arrays of length 1 for all rows."""

    top_k: npt.NDArray[np.int64]  # [R], 0: off
    top_p: npt.NDArray[np.float64]  # [R], 1: off
    min_p: npt.NDArray[np.float64]  # [R], 0: off

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        """Take the settings of `sampling`, for all rows."""
        return cls(np.array([sampling.top_k]), np.array([sampling.top_p]), np.array([sampling.min_p]))

    @property
    def settings(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return self.top_k, self.top_p, self.min_p

    def rows(self, rows: npt.NDArray[np.int64]) -> Self:
        """Return the settings of the rows with these indices; settings for all rows stay as they are."""
        if len(self.top_k) == 1:
            return self
        return type(self)(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def truncate(
    logits_RV: Tensor,
    truncation: Truncation,
    always_R: Tensor | None = None,
    allowed_RW: npt.NDArray[np.int32] | None = None,
) -> Tensor:
    """Set the logits [R, V] of excluded tokens to the lowest finite number, so that their probability is zero.

    Differentiable; the set of kept tokens is treated as constant. Minus infinity would make entropies NaN.

    Args:
        logits_RV: float32, after the temperature. NaN stays NaN.
        truncation: settings of the rows.
        always_R: one token per row that top-k, top-p and min-p keep, however unlikely. A grammar may still exclude it.
        allowed_RW: one bit per token, the lowest first, set if the row's grammar allows it; None if no row has a
            grammar.
    """
    if allowed_RW is not None:
        logits_RV = logits_RV.masked_fill(~_as_bools(allowed_RW, logits_RV), torch.finfo(logits_RV.dtype).min)
    outside_RV = logits_RV.detach() < cutoffs(logits_RV.detach(), truncation)
    if always_R is not None:
        outside_RV = outside_RV.scatter(1, always_R[:, None], False)
    return logits_RV.masked_fill(outside_RV, torch.finfo(logits_RV.dtype).min)


def cutoffs(logits_RV: Tensor, truncation: Truncation) -> Tensor:
    """Compute the cutoff of each row, [R, 1]: tokens with lower logits are excluded by top-k, top-p or min-p."""
    highest_R1 = logits_RV.amax(-1, keepdim=True)
    cutoff_R1 = highest_R1 + _column(truncation.min_p, logits_RV).log().to(logits_RV.dtype)
    if truncation.top_k.any():
        first = int(max(truncation.top_k.max(), _FIRST_RANKED if (truncation.top_k == 0).any() else 0))
    elif (truncation.top_p < 1).any():
        first = _FIRST_RANKED
    else:
        return cutoff_R1
    return torch.maximum(cutoff_R1, _ranked_cutoffs(logits_RV, logits_RV.softmax(-1), truncation, first))


def _ranked_cutoffs(logits_RV: Tensor, shares_RV: Tensor, truncation: Truncation, ranked: int) -> Tensor:
    """Compute the cutoffs of top-k and top-p, [R, 1]; -inf where both are off. Only the `ranked` likeliest tokens are
    sorted, and more where a nucleus is larger. `shares_RV`: softmax of the logits."""
    size = min(ranked, logits_RV.shape[1])
    logits_RS, tokens_RS = logits_RV.topk(size)
    top_k_R1, top_p_R1 = _column(truncation.top_k, logits_RV), _column(truncation.top_p, logits_RV)
    last_R1 = (top_k_R1 - 1).clamp(0, size - 1).expand(len(logits_RV), 1)
    cutoff_R1 = logits_RS.gather(1, last_R1).masked_fill(top_k_R1 == 0, -torch.inf)
    # top-p is a share of the mass left by top-k, including ties with its last token.
    left_RV = shares_RV.masked_fill(logits_RV < cutoff_R1, 0.0)
    wanted_R1 = top_p_R1 * left_RV.sum(-1, keepdim=True, dtype=torch.float64)
    reached_RS = shares_RV.gather(1, tokens_RS).cumsum(-1, dtype=torch.float64)
    place_R1 = (reached_RS < wanted_R1).sum(-1, keepdim=True)
    nucleus_R1 = logits_RS.gather(1, place_R1.clamp(max=size - 1))
    all_R1 = (place_R1 == size) | (top_p_R1 >= 1.0)
    short_R = ((place_R1 == size) & (top_k_R1 == 0) & (top_p_R1 < 1.0))[:, 0]
    cutoff_R1 = torch.where(all_R1, cutoff_R1, torch.maximum(cutoff_R1, nucleus_R1))
    if size == logits_RV.shape[1] or not bool(short_R.any()):
        return cutoff_R1
    rows = short_R.nonzero()[:, 0]
    more_R1 = _ranked_cutoffs(logits_RV[rows], shares_RV[rows], truncation.rows(rows.cpu().numpy()), ranked * _MORE)
    return cutoff_R1.index_copy(0, rows, more_R1)


def _as_bools(bits_RW: npt.NDArray[np.int32], like_RV: Tensor) -> Tensor:
    """Unpack bits to a bool tensor with the shape and device of `like_RV`."""
    bytes_RB = torch.from_numpy(bits_RW.view(np.uint8)).to(like_RV.device)
    places = torch.arange(8, dtype=torch.uint8, device=like_RV.device)
    return (bytes_RB[:, :, None] >> places & 1).flatten(1)[:, : like_RV.shape[1]].bool()


def _column(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
