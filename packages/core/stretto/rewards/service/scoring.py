"""Scoring of a file's completions with the workers of a run: ``stretto score``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from stretto.core.records import Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem


async def scored(config: RewardsConfig, items: Sequence[ScoreItem]) -> AsyncIterator[tuple[Verdict, float]]:
    """Judge items with a pool of workers of its own; yields the verdict and the seconds of each item, in order, as soon
    as it and all before it are judged. Any number of undecided verdicts does not stop the rest.

    Raises:
        RewardFunctionError, RoleDied, DeadlineExceeded: as `RewardPool`.
    """
    config = config.model_copy(update={"max_consecutive_undecided": len(items) + 1})
    async with RewardPool(config) as pool:
        free = asyncio.Semaphore(pool.workers)  # so that an item's seconds include no wait in the queue

        async def judged(item: ScoreItem) -> tuple[Verdict, float]:
            async with free:
                start = time.monotonic()
                [verdict] = await pool.score([item])
                return verdict, time.monotonic() - start

        tasks = [asyncio.create_task(judged(item)) for item in items]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
