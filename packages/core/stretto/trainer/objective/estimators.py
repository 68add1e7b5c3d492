"""`algorithm.advantages`: the advantage estimators with their parameters.

An estimator maps the completions of each group to one number per completion. An estimator declared `along` gives one
number per loss token instead, in the same nesting. An estimator declared `compares` gives no signal for a group of one
completion. `ESTIMATORS` has the names of a recipe; `advantages.py` has the equations. Estimators that need arrays are
in `token_estimators.py`, which is imported on first use: importing numpy takes a fifth of a second, and a recipe is
read without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

from stretto.doors.door import Door, Section, declare, fact
from stretto.doors.loading import load
from stretto.trainer.config import CriticConfig
from stretto.trainer.objective import advantages

if TYPE_CHECKING:
    from stretto.trainer.objective.returns import Column, Whole

Eps = Annotated[float, Field(gt=0, allow_inf_nan=False, description="added to a deviation before dividing by it")]
Discount = Annotated[float, Field(ge=0, le=1, description="discount per token")]
Lambda = Annotated[float, Field(ge=0, le=1, description="lambda")]
Normalised = Annotated[bool, Field(description="subtract the mean over all loss tokens, divide by their deviation")]
WithCritic = Annotated[CriticConfig | None, Field(description="a critic, trained beside the policy")]


@dataclass(frozen=True)
class RewardedCompletion:
    """Input of an estimator: a number of sampled `tokens` that share one shaped `reward` (`trainer.batch.credit`).
    `trained`: indices of the loss tokens among them. `values` of the critic and weighted `kl`: one number per sampled
    token, or empty. `earlier`: (token index, reward) for each reward before the last token.

    Example: ``RewardedCompletion(reward=1.0, tokens=3, trained=(1, 2))``
    """

    reward: float  # shaped
    tokens: int  # number of sampled tokens
    trained: Whole  # the loss tokens: indices among the sampled tokens, ascending
    values: Column = ()  # by the critic, of the state before each token (`returns.gae`); empty without a critic
    kl: Column = ()  # weighted KL of each token, in the unit of the reward; empty if it is not part of the reward
    earlier: Sequence[tuple[int, float]] = ()  # (token index, reward) of rewards before the last token

    @property
    def total(self) -> float:
        """The reward minus the KL of all tokens."""
        return self.reward - math.fsum(self.kl)


Groups = Sequence[Sequence[RewardedCompletion]]
Scores = list[list[float]]  # one number for each completion of each group
TokenScores = Sequence[Sequence[Any]]  # for each completion of each group, one number per loss token


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
    """(r - group mean) / deviation of all rewards of the batch."""
    return advantages.lite_ppo(_rewards(groups), eps)


def batch(groups: Groups, *, eps: Eps = 1e-6) -> Scores:
    """(r - mean) / deviation over all loss tokens of the batch (AReaL)."""
    return advantages.batch_normalised(_rewards(groups), _lengths(groups), eps)


@declare(along=True)
def reinforce_pp(groups: Groups, *, gamma: Discount = 1.0, eps: Eps = 1e-6) -> TokenScores:
    """Discounted returns, normalised over all loss tokens of the batch (REINFORCE++)."""
    scores: TokenScores = _by_token("reinforce_pp")(groups, gamma, eps)
    return scores


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
    """Generalised advantage estimation; without a critic: returns discounted by gamma times lam."""
    scores: TokenScores = _by_token("gae")(groups, gamma, lam, eps if normalised else None)
    return scores


def reward(groups: Groups) -> Scores:
    """The reward itself, less its KL."""
    return _rewards(groups)


class _Credit(BaseModel):
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="turn: a turn has the rewards of its own and of later turns, not those of earlier ones",
    )


class EstimatorSection(Section, _Credit):
    """An estimator with its parameters: the value of `algorithm.advantages`. Each estimator has a subclass."""

    @property
    def compares(self) -> bool:
        """Whether the estimator compares within a group, so that a group of one completion has no signal."""
        return bool(fact(self.part, "compares", False))

    @property
    def along(self) -> bool:
        """Whether the estimator gives one number per loss token instead of one per completion."""
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


def estimate_faults(estimator: EstimatorSection, groups: Groups, found: Any) -> Iterator[str]:
    """Yield one fault if `found`, the result of an estimator for these groups, has a wrong shape, or a number that is
    not finite or too large for a float; otherwise nothing. A fault is a phrase that follows the estimator's name in a
    message."""
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
    except OverflowError:
        yield "returned a whole number that is too large for a float"
        return
    except (TypeError, ValueError):  # math.isfinite raises the latter for a tensor of several numbers
        got, strange = [], []
    if got != needed:
        yield f"returned {repr(found)[:80]}, and not {what}"
    elif strange:
        yield f"returned {strange[0]}, which is not a finite number"


def _rewards(groups: Groups) -> Scores:
    return [[completion.total for completion in one] for one in groups]


def _lengths(groups: Groups) -> list[list[int]]:
    return [[len(completion.trained) for completion in one] for one in groups]


def _by_token(name: str) -> Any:
    """Load a function of `token_estimators.py`, which imports numpy."""
    return load(name, ESTIMATORS.key, ESTIMATORS.what, {name: f"stretto.trainer.objective.token_estimators:{name}"})
