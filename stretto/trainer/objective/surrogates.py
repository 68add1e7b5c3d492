"""Surrogates in place of decoupled PPO's clipped term, one function per equation: what each token adds to J.

    u = policy / anchor      the proximal ratio (`decoupled_ppo.py`)
    A                        the advantage

Each takes log-probabilities [N] and gives terms [N].

Axes: N loss token, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.trainer.objective.decoupled_ppo import Terms, clipped, ppo, proximal_ratio
from stretto.trainer.objective.tokens import LossTokens, ratio_of

Surrogate = Callable[[Tensor, LossTokens], Terms]


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
    """PPO's term with one ratio per completion: sg(s) policy / sg(policy), s = exp(mean over its loss tokens of log u).

    GSPO-token, arXiv 2507.18071, equations 13 and 14: the value is that of s, the gradient s A is each token's own.
    Where all tokens of a completion have the same advantage that is GSPO, equations 5 and 7. The paper's mean over
    completions is ``aggregation = "sequence_mean"``.
    """
    mean_S = tokens.sequences.means(policy_logprobs.detach() - tokens.anchor_logprobs)
    own = (policy_logprobs - policy_logprobs.detach()).exp()
    return clipped(tokens.sequences.spread(ratio_of(mean_S)) * own, tokens.advantages, clip_low, clip_high)


def cispo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """sg(clip(u, 1 - clip_low, 1 + clip_high)) A log policy: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = proximal_ratio(policy_logprobs.detach(), tokens)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Terms(weight * tokens.advantages * policy_logprobs, ratio, weight != ratio)


def sapo(policy_logprobs: Tensor, tokens: LossTokens, *, positive: float, negative: float) -> Terms:
    """sigmoid(tau (u - 1)) (4 / tau) A, tau = `positive` where A > 0 and `negative` elsewhere; 4 / tau makes the
    gradient on the anchor that of the policy gradient.

    SAPO, arXiv 2511.20347.
    """
    ratio = proximal_ratio(policy_logprobs, tokens)
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return Terms(gate * tokens.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def topr(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """sg(taper) A log policy; taper is 1 where A >= 0, and elsewhere the completion's whole ratio, min(prod u, 1).

    Tapered off-policy REINFORCE, arXiv 2503.14286, section 3: wrong completions that have become unlikely are left
    alone, right ones are learnt however unlikely they are.
    """
    log_ratio = policy_logprobs.detach() - tokens.anchor_logprobs
    log_sequence = tokens.sequences.spread(tokens.sequences.sums(log_ratio))
    negative = tokens.advantages < 0
    taper = torch.where(negative, log_sequence.clamp(max=0.0).exp(), 1.0)
    return Terms(taper * tokens.advantages * policy_logprobs, ratio_of(log_ratio), negative & (log_sequence > 0))


def m2po(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """u A for the tokens that `m2po.py` keeps, 0 for the others, which still count in the mean.

    M2PO, arXiv 2510.01161.

    Raises:
        ValueError: nothing was chosen; `tokens.kept` is of the whole minibatch and made before its losses.
    """
    if tokens.kept is None:
        raise ValueError("m2po needs the tokens that are kept over the whole minibatch")
    left_out = ~tokens.kept
    ratio = proximal_ratio(policy_logprobs, tokens)
    return Terms((ratio * tokens.advantages).masked_fill(left_out, 0.0), ratio.detach(), left_out)


def policy_gradient(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """A log policy. REINFORCE (Williams, 1992)."""
    ratio = proximal_ratio(policy_logprobs.detach(), tokens)
    return Terms(tokens.advantages * policy_logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))
