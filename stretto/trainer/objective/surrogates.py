"""Surrogates: what each token adds to the objective J that is maximised, one function per equation.

    u = policy / anchor      the ratio; its trust region lies around the anchor
    A                        the advantage

Every function takes log-probabilities [N] and gives [N]. Who the anchor is, what corrects for who sampled
(`corrections.py`) and how tokens are averaged (`aggregation.py`) are choices of their own; `losses.py` composes them.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.trainer.objective.tokens import LossTokens, ratio_of


class Terms(NamedTuple):
    """`bounded` marks the tokens where the loss's bound acts: clipped, truncated or left out."""

    objective: Tensor  # [N], differentiable
    ratio: Tensor  # [N], u (of the sequence, for a loss that looks at sequences), detached
    bounded: Tensor  # [N] bool


Surrogate = Callable[[Tensor, LossTokens], Terms]


def ppo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """min(u A, clip(u, 1 - clip_low, 1 + clip_high) A).

    PPO, arXiv 1707.06347, equation 7; with two bounds DAPO's clip-higher, arXiv 2503.14476, equation 10.
    """
    return _clipped(ratio_of(policy_logprobs - tokens.anchor_logprobs), tokens.advantages, clip_low, clip_high)


def dual_clip(
    policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: float, clip_high: float, clip_negative: float
) -> Terms:
    """PPO's term, and max(that, clip_negative A) where A < 0: one unlucky token cannot dominate the step.

    Dual-clip PPO, arXiv 1912.09729 (clip_negative is its c).
    """
    terms = ppo(policy_logprobs, tokens, clip_low=clip_low, clip_high=clip_high)
    negative = tokens.advantages < 0
    floor = tokens.advantages * clip_negative
    floored = negative & (terms.objective < floor)
    return Terms(torch.where(floored, floor, terms.objective), terms.ratio, terms.bounded | floored)


def gspo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """PPO's term with one ratio per answer: sg(s) policy / sg(policy), s = exp(mean over its loss tokens of log u).

    GSPO-token, arXiv 2507.18071, equations 13 and 14: the value is that of s, the gradient s A is each token's own.
    Where all tokens of an answer have the same advantage that is GSPO, equations 5 and 7. The paper's mean over answers
    is ``aggregation = "sequence_mean"``.
    """
    mean_S = tokens.sequences.means(policy_logprobs.detach() - tokens.anchor_logprobs)
    own = (policy_logprobs - policy_logprobs.detach()).exp()
    return _clipped(tokens.sequences.spread(ratio_of(mean_S)) * own, tokens.advantages, clip_low, clip_high)


def cispo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """sg(clip(u, 1 - clip_low, 1 + clip_high)) A log policy: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = ratio_of(policy_logprobs.detach() - tokens.anchor_logprobs)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Terms(weight * tokens.advantages * policy_logprobs, ratio, weight != ratio)


def sapo(policy_logprobs: Tensor, tokens: LossTokens, *, positive: float, negative: float) -> Terms:
    """sigmoid(tau (u - 1)) (4 / tau) A, tau = `positive` where A > 0 and `negative` elsewhere; 4 / tau makes the
    gradient on the anchor that of the policy gradient.

    SAPO, arXiv 2511.20347.
    """
    ratio = ratio_of(policy_logprobs - tokens.anchor_logprobs)
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return Terms(gate * tokens.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def topr(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """sg(taper) A log policy; taper is 1 where A >= 0, and elsewhere the answer's whole ratio, min(prod u, 1).

    Tapered off-policy REINFORCE, arXiv 2503.14286, section 3: wrong answers that have become unlikely are left alone,
    right ones are learnt however unlikely they are.
    """
    log_ratio = policy_logprobs.detach() - tokens.anchor_logprobs
    log_answer = tokens.sequences.spread(tokens.sequences.sums(log_ratio))
    negative = tokens.advantages < 0
    taper = torch.where(negative, log_answer.clamp(max=0.0).exp(), 1.0)
    return Terms(taper * tokens.advantages * policy_logprobs, ratio_of(log_ratio), negative & (log_answer > 0))


def m2po(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """u A for the tokens that `second_moment.py` keeps, 0 for the others, which still count in the mean.

    M2PO, arXiv 2510.01161.

    Raises:
        ValueError: nothing was chosen; `tokens.kept` is of the whole minibatch and made before its losses.
    """
    if tokens.kept is None:
        raise ValueError("m2po needs the tokens that are kept over the whole minibatch")
    left_out = ~tokens.kept
    ratio = ratio_of(policy_logprobs - tokens.anchor_logprobs)
    return Terms((ratio * tokens.advantages).masked_fill(left_out, 0.0), ratio.detach(), left_out)


def policy_gradient(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """A log policy. REINFORCE (Williams, 1992)."""
    ratio = ratio_of(policy_logprobs.detach() - tokens.anchor_logprobs)
    return Terms(tokens.advantages * policy_logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Terms:
    free = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return Terms(torch.minimum(free, clipped), ratio.detach(), clipped < free)
