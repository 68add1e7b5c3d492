"""The loss tokens of one micro-batch as flat tensors, and their assignment to sequences.

Axes: N loss token, S sequence (a trajectory with at least one loss token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Bound on log-ratios before exp, as in verl (`core_algos.py`). e^20 is 4.9e8, above every bound of a loss or a
#: correction. Above 88.7 exp overflows in float32, and 0 times infinity makes a gradient NaN. Log-probabilities logged
#: by other engines may be that far off.
LARGEST_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor, lowest: float = -LARGEST_LOG_RATIO) -> Tensor:
    """Clamp the log-ratio to ±20 (or to [lowest, 20]), with zero gradient where it is clamped. NaN keeps a NaN
    gradient, so that it is noticed; `clamp` would make the gradient 0, as would vectorised `hardtanh` (16 tokens or
    more)."""
    low = log_ratio.masked_fill(log_ratio < lowest, lowest)
    return low.masked_fill(low > LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio, which is clamped to ±20 first (`bounded`), so never infinite."""
    return bounded(log_ratio).exp()


@dataclass(frozen=True)
class Sequences:
    """Assigns flat tokens [N] to sequences. The tokens of a sequence are consecutive, and all in one micro-batch.

    Example: sequences of 2 and 3 loss tokens: ``index = [0, 0, 1, 1, 1]``, ``lengths = [2, 3]``.
    """

    index: Tensor  # [N] int64
    lengths: Tensor  # [S] int64, at least 1

    @classmethod
    def of(cls, lengths_S: Tensor, tokens: int | None = None) -> Sequences:
        """Make it from the number of loss tokens of each sequence, [S] int64. `tokens`: their sum; without it a GPU is
        waited for."""
        order_S = lengths_S.new_ones(lengths_S.shape).cumsum(0) - 1
        return cls(order_S.repeat_interleave(lengths_S, output_size=tokens), lengths_S)

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum per sequence, [N, ...] -> [S, ...], differentiable."""
        return values_N.new_zeros(len(self.lengths), *values_N.shape[1:]).index_add(0, self.index, values_N)

    def means(self, values_N: Tensor) -> Tensor:
        """Mean per sequence, [N] -> [S], differentiable."""
        return self.sums(values_N) / self.lengths

    def spread(self, values_S: Tensor) -> Tensor:
        """Give each token its sequence's value, [S] -> [N]."""
        return values_S.index_select(0, self.index)


@dataclass(frozen=True)
class LossTokens:
    """Inputs of a loss for a micro-batch, known before the policy's forward; one number per token, natural logarithms.
    `behavior`: the policy that sampled; `anchor`: the centre of the trust region. `scale`: weight in the minibatch's
    mean. `kept`: tokens that the selection leaves in; None: there is none."""

    behavior_logprobs: Tensor  # [N] by the policy that sampled the token, as logged
    anchor_logprobs: Tensor  # [N] by the policy at the trust region's centre (`decoupled_ppo.anchor_logprobs`)
    advantages: Tensor  # [N]
    scale: Tensor  # [N] weight of the token in the minibatch's mean (`aggregation.py`)
    sequences: Sequences
    kept: Tensor | None = None  # [N] bool, the tokens that M2PO leaves in (`surrogates.py`)
    reference_logprobs: Tensor | None = None  # [N] by the reference policy; None if the loss has no KL term
