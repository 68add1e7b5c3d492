"""`[algorithm.advantages]`: the estimators with their numbers, and the one place that calls them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, assert_never

from pydantic import BaseModel, BeforeValidator, Field

from stretto.trainer.config import CriticConfig
from stretto.trainer.objective import advantages

Eps = Annotated[float, Field(gt=0, allow_inf_nan=False, description="added to a deviation before dividing by it")]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Estimator(BaseModel, extra="forbid", frozen=True):
    compares: ClassVar[bool] = False  #: compares within a group: a group of one teaches nothing
    along: ClassVar[bool] = False  #: goes from token to token, and not from completion to completion
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="turn: a turn has the rewards of its own and of later turns, not those of earlier ones",
    )


class GroupNormalised(_Estimator):
    """(r - group mean) / group deviation (GRPO)."""

    compares: ClassVar[bool] = True
    kind: Literal["group"] = "group"
    eps: Eps = 1e-6


class GroupMean(_Estimator):
    """r - group mean (Dr. GRPO)."""

    compares: ClassVar[bool] = True
    kind: Literal["group_mean"] = "group_mean"


class LeaveOneOut(_Estimator):
    """r - mean of the others (RLOO)."""

    compares: ClassVar[bool] = True
    kind: Literal["leave_one_out"] = "leave_one_out"


class LitePPO(_Estimator):
    """(r - group mean) / batch deviation."""

    compares: ClassVar[bool] = True
    kind: Literal["lite_ppo"] = "lite_ppo"
    eps: Eps = 1e-6


class RewardBatch(_Estimator):
    """(r - mean) / deviation over all loss tokens of the batch (AReaL)."""

    kind: Literal["batch"] = "batch"
    eps: Eps = 1e-6


class ReinforcePP(_Estimator):
    """Discounted returns, normalised over all loss tokens of the batch (REINFORCE++)."""

    along: ClassVar[bool] = True
    kind: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Fraction = Field(1.0, description="discount per token")
    eps: Eps = 1e-6


class ReinforcePPBaseline(_Estimator):
    """r - group mean, normalised over all loss tokens of the batch (REINFORCE++ with a baseline)."""

    compares: ClassVar[bool] = True
    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    eps: Eps = 1e-6


class GAE(_Estimator):
    """Generalised advantage estimation; without a critic that is the terminal reward, discounted."""

    along: ClassVar[bool] = True
    kind: Literal["gae"] = "gae"
    gamma: Fraction = Field(1.0, description="discount per token")
    lam: Fraction = Field(1.0, description="lambda")
    normalised: bool = Field(False, description="subtract the mean over all loss tokens, divide by their deviation")
    eps: Eps = 1e-6
    critic: CriticConfig | None = Field(None, description="a critic, trained beside the policy")


class RawReward(_Estimator):
    """The reward itself."""

    kind: Literal["reward"] = "reward"


def named(value: object) -> object:
    """``advantages = "group"`` says the same as ``advantages = {kind = "group"}``."""
    return {"kind": value} if isinstance(value, str) else value


Estimator = Annotated[
    GroupNormalised
    | GroupMean
    | LeaveOneOut
    | LitePPO
    | RewardBatch
    | ReinforcePP
    | ReinforcePPBaseline
    | GAE
    | RawReward,
    Field(discriminator="kind"),
    BeforeValidator(named),
]


@dataclass(frozen=True)
class RewardedCompletion:
    """Sampled tokens that one reward is for, as an estimator sees them (`trainer.batch.credit` says which those are).

    Example: ``RewardedCompletion(reward=1.0, tokens=3, trained=(1, 2))``
    """

    reward: float  # shaped
    tokens: int  # sampled
    trained: Sequence[int]  # the loss tokens: indices among the sampled tokens, ascending
    values: Sequence[float] = ()  # by the critic, of the state before each token (`advantages.gae`); or empty
    kl: Sequence[float] = ()  # weighted KL of each token, in the unit of the reward; or empty
    earlier: Sequence[tuple[int, float]] = ()  # rewards before the last token, each with the index of its token

    @property
    def rewards(self) -> list[float]:
        """Token by token: minus its KL, and the reward at the last."""
        found = [-cost for cost in self.kl] or [0.0] * self.tokens
        for t, reward in (*self.earlier, (-1, self.reward)) if found else ():
            found[t] += reward
        return found

    @property
    def total(self) -> float:
        """The reward less the KL of all tokens."""
        return self.reward - math.fsum(self.kl)


def advantages_of(estimator: Estimator, groups: Sequence[Sequence[RewardedCompletion]]) -> list[list[list[float]]]:
    """The advantage of each loss token of each completion of each group."""
    match estimator:
        case GAE():
            found = [[generalised(estimator, completion) for completion in group] for group in groups]
            return _normalised(found, estimator.eps) if estimator.normalised else found
        case ReinforcePP():
            returns = [[_discounted(completion, estimator.gamma) for completion in group] for group in groups]
            return _normalised(returns, estimator.eps)
        case _:
            scores = _scores(estimator, groups)
            return [
                [[score] * len(completion.trained) for completion, score in zip(group, one, strict=True)]
                for group, one in zip(groups, scores, strict=True)
            ]


def _scores(
    estimator: GroupNormalised | GroupMean | LeaveOneOut | LitePPO | RewardBatch | ReinforcePPBaseline | RawReward,
    groups: Sequence[Sequence[RewardedCompletion]],
) -> list[list[float]]:
    rewards = [[completion.total for completion in group] for group in groups]
    tokens = [[len(completion.trained) for completion in group] for group in groups]
    match estimator:
        case GroupNormalised():
            return advantages.group_normalised(rewards, estimator.eps)
        case GroupMean():
            return advantages.group_centred(rewards)
        case LeaveOneOut():
            return advantages.leave_one_out(rewards)
        case LitePPO():
            return advantages.lite_ppo(rewards, estimator.eps)
        case RewardBatch():
            return advantages.batch_normalised(rewards, tokens, estimator.eps)
        case ReinforcePPBaseline():
            return advantages.reinforce_pp_baseline(rewards, tokens, estimator.eps)
        case RawReward():
            return rewards
        case _:
            assert_never(estimator)


def generalised(estimator: GAE, completion: RewardedCompletion) -> list[float]:
    """The advantage of each loss token of one completion, before any normalisation."""
    if not completion.values:
        return _discounted(completion, estimator.gamma * estimator.lam)
    found = advantages.gae(completion.rewards, completion.values, estimator.gamma, estimator.lam)
    return [found[t] for t in completion.trained]


def _discounted(completion: RewardedCompletion, decay: float) -> list[float]:
    """The discounted return of each loss token."""
    if not completion.kl and not completion.earlier:
        return advantages.terminal(completion.reward, completion.tokens, completion.trained, decay)
    found = advantages.gae(completion.rewards, [0.0] * completion.tokens, decay, lam=1.0)
    return [found[t] for t in completion.trained]


def _normalised(per_token: list[list[list[float]]], eps: float) -> list[list[list[float]]]:
    flat = iter(advantages.reinforce_pp([completion for group in per_token for completion in group], eps))
    return [[next(flat) for _ in group] for group in per_token]
