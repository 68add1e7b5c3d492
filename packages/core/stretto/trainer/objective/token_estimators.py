"""Token-level advantage estimators, called by `estimators.py`, and `advantages_of`, the only caller of estimators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from stretto.core.errors import Problem, RecipeError
from stretto.doors.loading import is_own
from stretto.trainer.objective import returns
from stretto.trainer.objective.estimators import (
    ESTIMATORS,
    EstimatorSection,
    Groups,
    RewardedCompletion,
    TokenScores,
    estimate_faults,
)
from stretto.trainer.objective.returns import Column, Doubles


def reinforce_pp(groups: Groups, gamma: float, eps: float) -> TokenScores:
    """Discounted returns, normalised over all loss tokens of the batch. `eps`: added to the deviation."""
    return _normalised([[_discounted(completion, gamma) for completion in one] for one in groups], eps)


def gae(groups: Groups, gamma: float, lam: float, eps: float | None) -> TokenScores:
    """Generalised advantage estimation, normalised over all loss tokens of the batch unless `eps` is None. `eps`: added
    to the deviation."""
    found = [[generalised(completion, gamma, lam) for completion in one] for one in groups]
    return found if eps is None else _normalised(found, eps)


def advantages_of(estimator: EstimatorSection, groups: Groups) -> TokenScores:
    """The advantage of each loss token of each completion of each group. `groups`: the whole batch. Raises RecipeError
    if a user's estimator raises, or returns a wrong shape or a non-finite number."""
    own = is_own(estimator.kind)
    found: Any = ESTIMATORS.bound(estimator)(_as_lists(groups) if own else groups)
    if own and (fault := next(estimate_faults(estimator, groups, found), "")):
        raise RecipeError([Problem(ESTIMATORS.key, f"{estimator.kind!r} {fault}")])
    per_token: TokenScores = found
    if estimator.along:
        return per_token
    return [
        [np.full(len(completion.trained), score, np.float64) for completion, score in zip(one, scores, strict=True)]
        for one, scores in zip(groups, found, strict=True)
    ]


def _as_lists(groups: Groups) -> Groups:
    """Replace arrays by lists, since users' estimators get Python numbers."""
    return [
        [
            replace(one, trained=_listed(one.trained), values=_listed(one.values), kl=_listed(one.kl))
            for one in completions
        ]
        for completions in groups
    ]


def _listed(column: Column) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column


def targets(estimator: EstimatorSection, completion: RewardedCompletion) -> Doubles:
    """Number to add to the critic's value at each loss token to get its target (the return): the advantage before
    normalisation, with the estimator's gamma and lam (1 if it has none)."""
    return generalised(completion, getattr(estimator, "gamma", 1.0), getattr(estimator, "lam", 1.0))


def generalised(completion: RewardedCompletion, gamma: float, lam: float) -> Doubles:
    """Generalised advantage estimate of each loss token of one completion, before any normalisation. Without a critic's
    values: the sum of later rewards, discounted by gamma * lam per token."""
    if not len(completion.values):
        return _discounted(completion, gamma * lam)
    return _trained(returns.gae(_rewards(completion), completion.values, gamma, lam), completion)


def _rewards(completion: RewardedCompletion) -> Doubles:
    """The reward of each sampled token: minus its KL, plus the completion's reward at the last token and earlier
    rewards at their tokens."""
    costs = completion.kl
    found = -np.asarray(costs, np.float64) if len(costs) else np.zeros(completion.tokens)
    for t, reward in (*completion.earlier, (-1, completion.reward)) if len(found) else ():
        found[t] += reward
    return found


def _discounted(completion: RewardedCompletion, decay: float) -> Doubles:
    if not len(completion.kl) and not completion.earlier:
        return returns.terminal(completion.reward, completion.tokens, completion.trained, decay)
    found = returns.gae(_rewards(completion), np.zeros(completion.tokens), decay, lam=1.0)
    return _trained(found, completion)


def _trained(found: Doubles, completion: RewardedCompletion) -> Doubles:
    """The numbers of the loss tokens, of numbers for all sampled tokens."""
    return found if len(completion.trained) == len(found) else found[np.asarray(completion.trained, np.int64)]


def _normalised(per_token: TokenScores, eps: float) -> TokenScores:
    """Normalise numbers by their mean and deviation over all loss tokens of the batch."""
    flat = iter(returns.reinforce_pp([completion for group in per_token for completion in group], eps))
    return [[next(flat) for _ in group] for group in per_token]
