"""`algorithm.advantages`: the estimators with their numbers, and the one place that calls them.

An estimator maps the completions of each group to one number per completion; one declared `along` gives one number per
loss token instead, in the same nesting. One that `compares` gives no signal for a group of one. `ESTIMATORS` has the
names of a recipe; the equations are in `advantages.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from stretto.core.errors import Problem, RecipeError
from stretto.doors.door import Door, Section, declare, fact
from stretto.doors.loading import is_own
from stretto.trainer.config import CriticConfig
from stretto.trainer.objective import advantages
from stretto.trainer.objective.advantages import Column, Doubles, Whole

Eps = Annotated[float, Field(gt=0, allow_inf_nan=False, description="added to a deviation before dividing by it")]
Discount = Annotated[float, Field(ge=0, le=1, description="discount per token")]
Lambda = Annotated[float, Field(ge=0, le=1, description="lambda")]
Normalised = Annotated[bool, Field(description="subtract the mean over all loss tokens, divide by their deviation")]
WithCritic = Annotated[CriticConfig | None, Field(description="a critic, trained beside the policy")]


@dataclass(frozen=True)
class RewardedCompletion:
    """Sampled tokens that share one reward, as an estimator's input; `trainer.batch.credit` decides which.

    Example: ``RewardedCompletion(reward=1.0, tokens=3, trained=(1, 2))``
    """

    reward: float  # shaped
    tokens: int  # sampled
    trained: Whole  # the loss tokens: indices among the sampled tokens, ascending
    values: Column = ()  # by the critic, of the state before each token (`advantages.gae`); or empty
    kl: Column = ()  # weighted KL of each token, in the unit of the reward; or empty
    earlier: Sequence[tuple[int, float]] = ()  # rewards before the last token, each with the index of its token

    @property
    def rewards(self) -> Doubles:
        """Rewards token by token: minus the KL, plus the reward at the last token."""
        found = -np.asarray(self.kl, np.float64) if len(self.kl) else np.zeros(self.tokens)
        for t, reward in (*self.earlier, (-1, self.reward)) if len(found) else ():
            found[t] += reward
        return found

    @property
    def total(self) -> float:
        """The reward minus the KL of all tokens."""
        return self.reward - (math.fsum(np.asarray(self.kl).tolist()) if len(self.kl) else 0.0)


Groups = Sequence[Sequence[RewardedCompletion]]
Scores = list[list[float]]  # of each completion of each group
TokenScores = Sequence[Sequence[Column]]  # of each loss token of each completion of each group


@declare(compares=True)
def group(groups: Groups, *, eps: Eps = 1e-6) -> Scores:
    """(r - group mean) / group deviation (GRPO)."""
    return advantages.group_normalised(_rewards(groups), eps)


@declare(compares=True)
def group_mean(groups: Groups) -> Scores:
    """r - group mean (Dr. GRPO)."""
    return advantages.group_centred(_rewards(groups))


@declare(compares=True)
def leave_one_out(groups: Groups) -> Scores:
    """r - mean of the others (RLOO)."""
    return advantages.leave_one_out(_rewards(groups))


@declare(compares=True)
def lite_ppo(groups: Groups, *, eps: Eps = 1e-6) -> Scores:
    """(r - group mean) / batch deviation."""
    return advantages.lite_ppo(_rewards(groups), eps)


def batch(groups: Groups, *, eps: Eps = 1e-6) -> Scores:
    """(r - mean) / deviation over all loss tokens of the batch (AReaL)."""
    return advantages.batch_normalised(_rewards(groups), _lengths(groups), eps)


@declare(along=True)
def reinforce_pp(groups: Groups, *, gamma: Discount = 1.0, eps: Eps = 1e-6) -> TokenScores:
    """Discounted returns, normalised over all loss tokens of the batch (REINFORCE++)."""
    return _normalised([[_discounted(completion, gamma) for completion in one] for one in groups], eps)


@declare(compares=True)
def reinforce_pp_baseline(groups: Groups, *, eps: Eps = 1e-6) -> Scores:
    """r - group mean, normalised over all loss tokens of the batch (REINFORCE++ with a baseline)."""
    return advantages.reinforce_pp_baseline(_rewards(groups), _lengths(groups), eps)


@declare(along=True)
def gae(
    groups: Groups,
    *,
    gamma: Discount = 1.0,
    lam: Lambda = 1.0,
    normalised: Normalised = False,
    eps: Eps = 1e-6,
    critic: WithCritic = None,
) -> TokenScores:
    """Generalised advantage estimation; without a critic that is the terminal reward, discounted."""
    found = [[generalised(completion, gamma, lam) for completion in one] for one in groups]
    return _normalised(found, eps) if normalised else found


def reward(groups: Groups) -> Scores:
    """The reward itself."""
    return _rewards(groups)


class _Credit(BaseModel):
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="turn: a turn has the rewards of its own and of later turns, not those of earlier ones",
    )


class EstimatorSection(Section, _Credit):
    """An estimator with its parameters."""

    @property
    def compares(self) -> bool:
        """Whether it compares within a group, so that a group of one has no signal."""
        return bool(fact(self.part, "compares", False))

    @property
    def along(self) -> bool:
        """Whether it gives one number per token instead of per completion."""
        return bool(fact(self.part, "along", False))


_HERE = __name__
#: The estimators of a recipe. One more is a function of this file, and its row here.
ESTIMATORS = Door(
    key="algorithm.advantages",
    what="estimator of advantages",
    arguments=("groups",),
    built_in={
        "group": f"{_HERE}:group",
        "group_mean": f"{_HERE}:group_mean",
        "leave_one_out": f"{_HERE}:leave_one_out",
        "lite_ppo": f"{_HERE}:lite_ppo",
        "batch": f"{_HERE}:batch",
        "reinforce_pp": f"{_HERE}:reinforce_pp",
        "reinforce_pp_baseline": f"{_HERE}:reinforce_pp_baseline",
        "gae": f"{_HERE}:gae",
        "reward": f"{_HERE}:reward",
    },
    section=EstimatorSection,
)


def advantages_of(estimator: EstimatorSection, groups: Groups) -> TokenScores:
    """The advantage of each loss token of each completion of each group.

    Raises:
        RecipeError: a user's estimator returned a wrong shape or a non-finite number.
    """
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
    """Columns as Python's numbers, as a user's estimator finds them."""
    return [
        [
            replace(one, trained=_listed(one.trained), values=_listed(one.values), kl=_listed(one.kl))
            for one in completions
        ]
        for completions in groups
    ]


def _listed(column: Column) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column


def estimate_faults(estimator: EstimatorSection, groups: Groups, found: Any) -> Iterator[str]:
    """A sentence if `found`, an estimator's result for these groups, has a wrong shape or a non-finite number."""
    needed: list[int] = [len(groups), *map(len, groups)]
    what = "a number for each completion of each group"
    if estimator.along:
        needed += [len(completion.trained) for completion in chain.from_iterable(groups)]
        what = "a number for each loss token of each completion of each group (it is declared to go along them)"
    try:
        got, numbers = [len(found), *map(len, found)], list(chain.from_iterable(found))
        if estimator.along:
            got, numbers = [*got, *map(len, numbers)], list(chain.from_iterable(numbers))
        strange = [number for number in numbers if not math.isfinite(number)]
    except TypeError:
        got, strange = [], []
    if got != needed:
        yield f"returned {repr(found)[:80]}, and not {what}"
    elif strange:
        yield f"returned {strange[0]}, which is not a finite number"


def targets(estimator: EstimatorSection, completion: RewardedCompletion) -> Doubles:
    """For each loss token, the amount added to the critic's value to get its target: the advantage before
    normalisation, with the estimator's gamma and lam."""
    return generalised(completion, getattr(estimator, "gamma", 1.0), getattr(estimator, "lam", 1.0))


def generalised(completion: RewardedCompletion, gamma: float, lam: float) -> Doubles:
    """GAE of each loss token of one completion, before any normalisation."""
    if not len(completion.values):
        return _discounted(completion, gamma * lam)
    return _trained(advantages.gae(completion.rewards, completion.values, gamma, lam), completion)


def _rewards(groups: Groups) -> Scores:
    return [[completion.total for completion in one] for one in groups]


def _lengths(groups: Groups) -> list[list[int]]:
    return [[len(completion.trained) for completion in one] for one in groups]


def _discounted(completion: RewardedCompletion, decay: float) -> Doubles:
    """Discounted return of each loss token."""
    if not len(completion.kl) and not completion.earlier:
        return advantages.terminal(completion.reward, completion.tokens, completion.trained, decay)
    found = advantages.gae(completion.rewards, np.zeros(completion.tokens), decay, lam=1.0)
    return _trained(found, completion)


def _trained(found: Doubles, completion: RewardedCompletion) -> Doubles:
    """The numbers of the loss tokens."""
    return found if len(completion.trained) == len(found) else found[np.asarray(completion.trained, np.int64)]


def _normalised(per_token: TokenScores, eps: float) -> TokenScores:
    flat = iter(advantages.reinforce_pp([completion for group in per_token for completion in group], eps))
    return [[next(flat) for _ in group] for group in per_token]
