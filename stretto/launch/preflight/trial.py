"""A reward of the user's own, tried before a run: does it judge the same answer the same way twice?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stretto.core.errors import Problem, RewardFunctionError, RoleError
from stretto.core.records import Verdict
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.loading import PLACE
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.worlds.data.task import Question

_TRIED = 4


def differing_verdicts(config: RewardsConfig, questions: Sequence[Question]) -> list[str]:
    """Sentences about the first questions whose gold answer, given as the answer, gets two verdicts from two calls.

    Rewards that come with stretto are not asked. A reward that is a judgement by chance may be what is wanted: it is
    told, not refused.

    Raises:
        RewardFunctionError: the workers do not start.
    """
    if config.function in BUILT_IN:
        return []
    items = [ScoreItem(prompt=row.text, completion=row.answer, answer=row.answer) for row in questions[:_TRIED]]
    try:
        first, second = asyncio.run(_twice(config.model_copy(update={"max_consecutive_undecided": 1 << 20}), items))
    except RoleError as error:
        raise RewardFunctionError([Problem(PLACE, str(error))]) from None
    return [
        f"the reward {config.function!r} judges the same answer to {question.place or question.id} in two ways: "
        f"{_told(one)}, then {_told(other)}"
        for question, one, other in zip(questions, first, second, strict=False)
        if one != other
    ]


async def _twice(config: RewardsConfig, items: Sequence[ScoreItem]) -> tuple[list[Verdict], list[Verdict]]:
    async with RewardPool(config.model_copy(update={"workers": 1})) as pool:
        return await pool.score(items), await pool.score(items)


def _told(verdict: Verdict) -> str:
    return verdict.reason or f"{verdict.outcome.value} ({verdict.reward:g})"
