"""The objective: decoupled PPO (AReaL, section 5.2, equation 5; after Hilton et al., arXiv 2110.00641).

    J = mean over tokens of  w · min(u · A, clip(u, 1 - clip_low, 1 + clip_high) · A)

    w = proximal / behavior    how likely the policy before this step was to say what was said; no gradient
    u = policy / proximal      how far the policy has moved within this step; clipped

Plain PPO is the case proximal = behavior: then w = 1 and u = policy / behavior.

Axes: N loss token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """The numbers of equation 5.

    A token whose weight w exceeds `behavior_weight_cap` gets the weight 0: it leaves the objective and still counts in
    the mean, so that leaving tokens out never enlarges the step (as in the published runs, with a cap of 5).
    """

    clip_low: float
    clip_high: float
    behavior_weight_cap: float


@dataclass(frozen=True)
class Tokens:
    """What the objective needs to know of each loss token; the logarithms are natural."""

    behavior_logprobs: Tensor  # [N] of the policy that sampled the token, as logged
    proximal_logprobs: Tensor  # [N] of the policy before this training step
    advantages: Tensor  # [N]


@dataclass(frozen=True)
class Loss:
    """`value` is to be minimised; `sums` are diagnostics summed over the tokens, to be divided by their number.

    clipped           tokens whose gradient the clip has cut off
    capped            tokens whose weight exceeded the cap
    ratio             u = policy / proximal
    behavior_weight   w = proximal / behavior, after the cap
    kl_behavior       KL(behavior || policy) by the estimator (x - 1) - log x, x = policy / behavior, never negative
    """

    value: Tensor  # []
    sums: Tensor  # [len(DIAGNOSTICS)], detached


DIAGNOSTICS = ("clipped", "capped", "ratio", "behavior_weight", "kl_behavior")


def decoupled_ppo(objective: Objective, policy_logprobs: Tensor, tokens: Tokens, total: int) -> Loss:
    """Minus the objective's sum over these N tokens, divided by `total`.

    `total` counts the loss tokens of the whole minibatch: added up over its micro-batches, the losses are the exact
    mean over its tokens, however they were packed.
    """
    ratio = (policy_logprobs - tokens.proximal_logprobs).exp()
    weight = (tokens.proximal_logprobs - tokens.behavior_logprobs).exp()
    capped = weight > objective.behavior_weight_cap
    weight = weight.masked_fill(capped, 0.0)
    free = ratio * tokens.advantages
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * tokens.advantages
    value = -(weight * torch.minimum(free, clipped)).sum() / total
    with torch.no_grad():
        log_x = policy_logprobs - tokens.behavior_logprobs
        kl = log_x.expm1() - log_x
        columns = (clipped < free, capped, ratio, weight, kl)
        sums = torch.stack([column.sum(dtype=torch.float32) for column in columns])
    return Loss(value, sums)


def ppo(objective: Objective, policy_logprobs: Tensor, tokens: Tokens, total: int) -> Loss:
    """PPO (Schulman et al., arXiv 1707.06347, equation 7): the decoupled objective with proximal = behavior."""
    anchored = Tokens(tokens.behavior_logprobs, tokens.behavior_logprobs, tokens.advantages)
    return decoupled_ppo(objective, policy_logprobs, anchored, total)
