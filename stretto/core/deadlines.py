"""Every wait has an owner and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stretto.core.errors import DeadlineExceeded


@asynccontextmanager
async def deadline(owner: str, awaited: str, seconds: float) -> AsyncIterator[None]:
    """Bound everything awaited inside the block.

    Raises:
        DeadlineExceeded: with the owner, what it waited for, and the seconds; a cancellation from outside passes
            through unchanged.

    Example::

        async with deadline("conductor", "engine-0 to load version 7", 60):
            await engine.update(7)
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded(owner, awaited, seconds) from None
        raise
