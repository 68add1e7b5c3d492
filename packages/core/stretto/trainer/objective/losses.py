"""The loss of a recipe: decoupled PPO (`decoupled_ppo.py`) with any surrogate and correction, a KL term, and an entropy
bonus.

    loss = - sum over tokens of  scale * w * surrogate(u, A)
           + reference weight * sum of scale * KL(policy || reference)
           - entropy bonus * sum of scale * entropy

Axes: N loss token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS, Correction, Weights
from stretto.trainer.objective.decoupled_ppo import negative_objective
from stretto.trainer.objective.kl import Divergence
from stretto.trainer.objective.surrogates import Selection, Surrogate
from stretto.trainer.objective.tokens import LossTokens, bounded


@dataclass(frozen=True)
class Objective:
    """The parts of a loss. `selection`, if any, is called by the trainer before `evaluate`, with the whole minibatch,
    and chooses the tokens that stay in the loss (`LossTokens.kept`)."""

    surrogate: Surrogate
    correction: Correction
    selection: Selection | None = None
    divergence: Divergence | None = None
    divergence_weight: float = 0.0
    entropy_bonus: float = 0.0


def objective(config: AlgorithmConfig) -> Objective:
    """The parts of a recipe's loss, with the recipe's numbers bound."""
    return Objective(
        surrogate=config.loss.surrogate,
        correction=CORRECTIONS.bound(config.correction),
        selection=config.loss.selection,
        divergence=config.divergence("loss"),
        divergence_weight=config.reference.weight if config.reference else 0.0,
        entropy_bonus=config.entropy_bonus,
    )


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch. `value` is minimised; `ratio`, `bounded`: as in `Terms`; `kl_reference`: summed over
    the tokens, None without the term; `sums` are diagnostics summed over the tokens:

    clipped           tokens whose term is bounded by the surrogate; in PPO, tokens without a gradient
    capped            tokens whose weight the correction has changed
    ratio             u = policy / anchor
    behavior_weight   w = anchor / behavior, after the correction
    kl_behavior       KL(behavior || policy) by the estimator (x - 1) - log x, x = policy / behavior, never negative
    outlier           tokens with x outside of [1/2, 2]
    weight            x
    square            x^2; the effective sample size of n tokens is (sum of x)^2 / (sum of x^2)
    """

    value: Tensor  # scalar, differentiable
    sums: Tensor  # [len(DIAGNOSTICS)], detached
    ratio: Tensor  # [N], u, detached
    bounded: Tensor  # [N] bool (`Terms.bounded`)
    weights: Weights
    kl_reference: Tensor | None = None  # scalar: the divergence summed over the tokens, detached; None without it


DIAGNOSTICS = ("clipped", "capped", "ratio", "behavior_weight", "kl_behavior", "outlier", "weight", "square")
_FAR = math.log(2)


def evaluate(objective: Objective, policy_logprobs: Tensor, tokens: LossTokens, entropy: Tensor | None = None) -> Loss:
    """The loss of N tokens, from their log-probabilities `policy_logprobs` [N], differentiable. The losses of a
    minibatch's micro-batches sum to the loss of the minibatch.

    `entropy` [N], differentiable, is needed for the entropy bonus, and `tokens.reference_logprobs` for the divergence:
    where one is None, its term is left out. Either is ignored if the objective has no such term. Raises RecipeError if
    a user's surrogate or correction raises.
    """
    terms = objective.surrogate(policy_logprobs, tokens)
    weights = objective.correction(tokens)
    value = negative_objective(terms, weights.weight, tokens.scale)
    kl_reference = None
    if objective.divergence is not None and tokens.reference_logprobs is not None:
        divergence = objective.divergence(policy_logprobs, tokens.reference_logprobs)
        value = value + objective.divergence_weight * (tokens.scale * divergence).sum()
        kl_reference = divergence.detach().sum()
    if objective.entropy_bonus and entropy is not None:
        value = value - objective.entropy_bonus * (tokens.scale * entropy).sum()
    with torch.no_grad():
        log_x = bounded(policy_logprobs - tokens.behavior_logprobs, lowest=-math.inf)
        x = log_x.exp()
        of_x = (log_x.expm1() - log_x, log_x.abs() > _FAR, x, x * x)
        columns = (terms.bounded, weights.corrected, terms.ratio, weights.weight, *of_x)
        sums = torch.stack([column.sum(dtype=torch.float32) for column in columns])
    return Loss(value, sums, terms.ratio, terms.bounded, weights, kl_reference)
