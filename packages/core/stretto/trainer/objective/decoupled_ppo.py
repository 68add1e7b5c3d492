"""Decoupled PPO in one file: AReaL's equation 5 (arXiv 2505.24298, section 5.2; after arXiv 2110.00641).

    J = mean over tokens of   w * min( u A, clip(u, 1 - low, 1 + high) A )

    u = policy / anchor      the proximal ratio: the anchor is the policy before this training step
    w = anchor / behavior    the behaviour weight: an older policy sampled the token
    A                        the advantage

Every loss of a recipe uses this file. `surrogates.py` has other terms in place of the clip, `corrections.py` bounds w,
`aggregation.py` has other means, and `losses.py` adds a KL term and an entropy bonus.

Axes: N loss token. All probabilities are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from stretto.doors.door import declare
from stretto.trainer.objective.tokens import LossTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

Anchor = Literal["recomputed", "interpolated", "behavior"]
ClipLow = Annotated[float, Field(gt=0, le=1, description="ratios below 1 - clip_low are clipped")]
ClipHigh = Annotated[float, Field(gt=0, description="ratios above 1 + clip_high are clipped")]


def anchor_logprobs(
    anchor: Anchor, policy: Tensor, before: Tensor | None, behavior: Tensor, staleness: Tensor
) -> Tensor:
    """log anchor, [N]: log-probabilities by the policy at the centre of the trust region. `policy`, `before` and
    `behavior`: log-probabilities [N] by the present policy, the policy before this training step, and the policy that
    sampled. `staleness`: versions from the one that sampled to the one before the step, [N].

    recomputed     the policy before this training step; needs `before`
    interpolated   an estimate of the former from the versions (A-3PO), without another forward pass
    behavior       the policy that sampled the token: u is PPO's ratio and w is 1
    """
    match anchor:
        case "recomputed":
            assert before is not None, "computed before the first update"
            return before
        case "interpolated":
            return interpolated(policy, behavior, staleness)
        case "behavior":
            return behavior


def interpolated(policy_logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """log behavior + d / (d + 1) (log policy - log behavior), [N], d = `staleness` in versions.

    A-3PO, arXiv 2512.06547: the share is (v_prox - v_behavior) / (v_policy - v_behavior). The version b before the step
    is d steps after the version that sampled, and the policy that becomes b + 1 is d + 1 steps after it. A token that
    version b sampled keeps the logged value.
    """
    share = staleness / (staleness + 1)
    return behavior_logprobs + share * (policy_logprobs - behavior_logprobs)


def proximal_ratio(policy_logprobs: Tensor, tokens: LossTokens) -> Tensor:
    """u = policy / anchor, [N], differentiable."""
    return ratio_of(policy_logprobs - tokens.anchor_logprobs)


class Terms(NamedTuple):
    """The surrogate objective per token, differentiable. `ratio`: u, of the token or of its sequence, detached.
    `bounded` marks tokens whose term is clipped, truncated or left out."""

    objective: Tensor  # [N], differentiable
    ratio: Tensor  # [N], u (of the whole sequence in sequence-level surrogates), detached
    bounded: Tensor  # [N] bool


@declare(anchors=("recomputed", "interpolated"))
def decoupled_ppo(
    policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
) -> Terms:
    """PPO's clip around the policy before the step (AReaL, equation 5).

    min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) of each token, u = policy / anchor, A its advantage.
    """
    return clipped(proximal_ratio(policy_logprobs, tokens), tokens.advantages, clip_low, clip_high)


@declare(anchors=("behavior",))
def ppo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> Terms:
    """PPO's clip around the policy that sampled.

    The term of `decoupled_ppo`; PPO, arXiv 1707.06347, equation 7, and with two bounds DAPO's clip-higher, arXiv
    2503.14476, equation 10.
    """
    return clipped(proximal_ratio(policy_logprobs, tokens), tokens.advantages, clip_low, clip_high)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Terms:
    """PPO's term, min(u A, clip(u, 1 - low, 1 + high) A), for a ratio u per token or per sequence."""
    free = ratio * advantages
    bound = ratio.clamp(1 - low, 1 + high) * advantages
    return Terms(free.minimum(bound), ratio.detach(), bound < free)


def behavior_weight(tokens: LossTokens) -> Tensor:
    """w = anchor / behavior, [N], without a gradient."""
    return ratio_of(tokens.anchor_logprobs - tokens.behavior_logprobs)


def token_mean(lengths: Sequence[int]) -> list[float]:
    """The same coefficient for each trajectory, 1 / number of all loss tokens: a long trajectory weighs more (DAPO,
    arXiv 2503.14476, equation 8; AReaL).

    >>> token_mean([1, 3])
    [0.25, 0.25]
    """
    return [1 / sum(lengths)] * len(lengths)


def negative_objective(terms: Terms, weight: Tensor, scale: Tensor) -> Tensor:
    """-J, a scalar: the negated sum over tokens of scale * w * term. For the mean of the equation, scale is 1 / number
    of tokens."""
    return -(weight * scale * terms.objective).sum()
