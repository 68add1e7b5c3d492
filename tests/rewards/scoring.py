"""Verdicts of the workers of a run."""

import asyncio
from typing import Any

from stretto.core.records import Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem


def scored(config: RewardsConfig | dict[str, Any], *items: ScoreItem) -> list[Verdict]:
    """What a pool of its own makes of the items; `config` may be the section of a recipe."""
    chosen = config if isinstance(config, RewardsConfig) else RewardsConfig.model_validate(config)

    async def judged() -> list[Verdict]:
        async with RewardPool(chosen) as pool:
            return await pool.score(items)

    return asyncio.run(asyncio.wait_for(judged(), 60))
