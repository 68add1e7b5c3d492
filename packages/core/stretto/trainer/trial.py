"""Test a loss, a correction or an advantage estimator on made-up tokens before a run. A fault is a phrase that follows
the name of the part in a message.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stretto.trainer.objective.corrections import Correction, Weights
from stretto.trainer.objective.decoupled_ppo import Terms
from stretto.trainer.objective.estimators import ESTIMATORS, EstimatorSection, RewardedCompletion, estimate_faults
from stretto.trainer.objective.surrogates import LossSection
from stretto.trainer.objective.tokens import LossTokens, Sequences

_LENGTHS = ((3, 1, 2), (1,))  # loss tokens of each sequence of a micro-batch
_BATCHES = (((1.0, 0.0, 0.5), (0.0, 0.0)), ((1.0,),))  # rewards of each group


def loss_faults(loss: LossSection) -> Iterator[str]:
    """Call a loss, its selection and its gradient on made-up tokens, and yield the faults of their results. Errors
    raised by the loss pass through."""
    for lengths in _LENGTHS:
        policy, tokens = _made_up(lengths)
        if (selection := loss.selection) is not None:
            kept = selection(policy.detach() - tokens.anchor_logprobs, tokens.advantages)
            yield from _column("its selection", kept, len(policy), torch.bool)
            tokens = replace(tokens, kept=kept)
        terms = loss.surrogate(policy, tokens)
        if not isinstance(terms, Terms):
            yield f"returned {type(terms).__name__}, and not Terms(objective, ratio, bounded)"
            return
        faults = [
            *_column("objective", terms.objective, len(policy), torch.float32),
            *_column("ratio", terms.ratio, len(policy), torch.float32),
            *_column("bounded", terms.bounded, len(policy), torch.bool),
        ]
        yield from faults
        if not faults and not terms.objective.requires_grad:
            yield "has an objective without a gradient: it does not depend on policy_logprobs"
        elif not faults:
            (gradient,) = torch.autograd.grad(terms.objective.sum(), policy)
            yield from _column("the gradient of its objective", gradient, len(policy), torch.float32)


def correction_faults(correction: Correction) -> Iterator[str]:
    """Call a correction on made-up tokens, and yield the faults of its results. Errors raised by it pass through."""
    for lengths in _LENGTHS:
        policy, tokens = _made_up(lengths)
        weights = correction(tokens)
        if not isinstance(weights, Weights):
            yield f"returned {type(weights).__name__}, and not Weights(weight, corrected)"
            return
        yield from _column("weight", weights.weight, len(policy), torch.float32)
        yield from _column("corrected", weights.corrected, len(policy), torch.bool)


def estimator_faults(estimator: EstimatorSection) -> Iterator[str]:
    """Call an advantage estimator on made-up rewards, and yield the faults of its results. Errors raised by it pass
    through."""
    for rewards in _BATCHES:
        groups = [[RewardedCompletion(one, 2 + at, (0, 1 + at)) for at, one in enumerate(group)] for group in rewards]
        yield from estimate_faults(estimator, groups, ESTIMATORS.bound(estimator)(groups))


def _made_up(lengths: Sequence[int]) -> tuple[Tensor, LossTokens]:
    """Made-up sequences of these lengths: the log-probabilities [N] of a policy, differentiable, and the N tokens as
    sampled by an older policy."""
    place_N = torch.arange(float(sum(lengths)))
    behavior_N = -0.2 - 0.3 * place_N
    sign_N = 1 - 2 * (place_N % 2)  # every other token has become less likely, or has a negative advantage
    tokens = LossTokens(
        behavior_logprobs=behavior_N,
        anchor_logprobs=behavior_N + 0.1 * sign_N,
        advantages=(0.5 + place_N) * sign_N,
        scale=torch.full_like(place_N, 1 / sum(lengths)),
        sequences=Sequences.of(torch.tensor(lengths)),
    )
    return (behavior_N - 0.05 * place_N).requires_grad_(), tokens


def _column(name: str, found: object, tokens: int, dtype: torch.dtype) -> Iterator[str]:
    """Yield the fault, if any, of the result `found`, which should have one number (or bool) per token."""
    if not isinstance(found, Tensor):
        yield f"{name} is {type(found).__name__}, and not a tensor"
    elif found.shape != (tokens,):
        yield f"{name} has the shape {[*found.shape]} for {tokens} tokens, and not [{tokens}]"
    elif (found.dtype == torch.bool) != (dtype == torch.bool) or found.is_complex():
        yield f"{name} is of {found.dtype}, and not of {dtype}"
    elif not bool(found.isfinite().all()):
        yield f"{name} has {found[~found.isfinite()][0].item()} in it, of finite log-probabilities and advantages"
