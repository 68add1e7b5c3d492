"""`algorithm.correction`: the weight of each token that corrects for the policy that sampled it, one function per
equation.

    w = anchor / behavior

multiplies the token's term of the objective, without a gradient. If the anchor is the policy that sampled, w is 1 and
no correction is needed. A weight of 0 removes a token from the objective, but the token *still counts in the mean*, so
that removing tokens never enlarges the step. `CORRECTIONS` has the names of a recipe.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from stretto.doors.door import Door, Section
from stretto.trainer.objective.decoupled_ppo import behavior_weight
from stretto.trainer.objective.tokens import LossTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

Low = Annotated[float, Field(ge=0, lt=1, description="smallest weight anchor / behavior")]
High = Annotated[float, Field(gt=1, description="largest weight anchor / behavior")]
LowMean = Annotated[float, Field(ge=0, lt=1, description="smallest geometric mean of anchor / behavior")]
HighMean = Annotated[float, Field(gt=1, description="largest geometric mean of anchor / behavior")]
Nats = Annotated[float, Field(gt=0, description="largest binary divergence, in nats")]
_SURE = 1e-6  # probabilities are clamped this far from 0 and 1, where a binary divergence is infinite


class Weights(NamedTuple):
    """Result of a correction, for the loss tokens of a micro-batch: the factor of each token's term in the objective,
    and whether it differs from w = anchor / behavior."""

    weight: Tensor  # [N], factor of each token's term in the objective
    corrected: Tensor  # [N] bool: tokens whose weight differs from w


Correction = Callable[[LossTokens], Weights]


def mask(tokens: LossTokens, *, low: Low = 0.0, high: High = math.inf) -> Weights:
    """Tokens whose weight is outside the bounds get weight 0 (IcePop). By default all weights are unchanged.

    w = anchor / behavior within [low, high], else 0. IcePop (Ring-1T, arXiv 2510.18855); AReaL's published runs have
    low 0, high 5.
    """
    weight = behavior_weight(tokens)
    outside = (weight > high) | (weight < low) if low > 0 else weight > high
    return Weights(weight.masked_fill(outside, 0.0), outside)


def truncate(tokens: LossTokens, *, high: High = 2.0) -> Weights:
    """Weights above the bound become the bound (TIS).

    min(w, high), w = anchor / behavior. Truncated importance sampling: IMPALA's rho-bar, arXiv 1802.01561, section 4.1;
    called TIS when it corrects for an engine that differs from the trainer.
    """
    weight = behavior_weight(tokens)
    return Weights(weight.clamp(max=high), weight > high)


def uncorrected(tokens: LossTokens) -> Weights:
    """Every weight is 1: the anchor is treated as the policy that sampled.

    PPO around recomputed old log-probabilities, as in trainers that treat the policy before the step as the sampling
    policy. Biased by the difference of the two.
    """
    weight = behavior_weight(tokens)
    return Weights(weight.new_ones(weight.shape), weight != 1)


def kpop(tokens: LossTokens, *, threshold: Nats = 0.1) -> Weights:
    """Tokens about which the two policies disagree get weight 0.

    w = p / q, or 0 where D(p || q) or D(q || p) is above `threshold`. p and q: the token's probability by the anchor
    and by the policy that sampled it. D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)): the token against all
    others.

    KPop (Guo et al., 2026, "Taming training-inference mismatch with adaptive masking regions"). The allowed range of w
    is wide for rare tokens and narrow for likely tokens.
    """
    p = tokens.anchor_logprobs.exp().clamp(_SURE, 1 - _SURE)
    q = tokens.behavior_logprobs.exp().clamp(_SURE, 1 - _SURE)
    token, others = (p / q).log(), ((1 - p) / (1 - q)).log()
    forward, backward = p * token + (1 - p) * others, -q * token - (1 - q) * others
    outside = forward.maximum(backward) > threshold
    return Weights(behavior_weight(tokens).masked_fill(outside, 0.0), outside)


def sequence_mask(tokens: LossTokens, *, low: LowMean = 0.99, high: HighMean = 1.01) -> Weights:
    """Completions whose geometric mean weight is outside the bounds get weight 0.

    w = anchor / behavior, or 0 for all tokens of a completion whose geometric mean of w is outside [low, high].
    Geometric sequence rejection (Liu et al., 2025, "When speed kills stability"; arXiv 2512.23075). Because it is a
    mean, the same bounds suit long and short completions.
    """
    mean_S = ratio_of(tokens.sequences.means(tokens.anchor_logprobs - tokens.behavior_logprobs))
    outside = tokens.sequences.spread((mean_S < low) | (mean_S > high))
    return Weights(behavior_weight(tokens).masked_fill(outside, 0.0), outside)


_HERE = __name__
#: The corrections of a recipe. One more is a function of this file, and its row here.
CORRECTIONS = Door(
    key="algorithm.correction",
    what="correction",
    arguments=("tokens",),
    built_in={
        "mask": f"{_HERE}:mask",
        "truncate": f"{_HERE}:truncate",
        "none": f"{_HERE}:uncorrected",
        "kpop": f"{_HERE}:kpop",
        "sequence_mask": f"{_HERE}:sequence_mask",
    },
    section=Section,
    returns=Weights,
)
