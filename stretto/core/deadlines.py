"""Every wait has an owner and a deadline, and can be named while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from stretto.core.errors import DeadlineExceeded


@dataclass(frozen=True, eq=False)
class Wait:
    """Who waits for what, since when (by the event loop's clock), and for how many seconds at most."""

    owner: str
    awaited: str
    seconds: float
    since: float


#: The open waits of each event loop, as the loop itself knows its open tasks: nothing else is kept of them.
_OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Wait]] = WeakKeyDictionary()


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
        with waiting(owner, awaited, seconds):
            async with scope:
                yield
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded(owner, awaited, seconds) from None
        raise


@contextmanager
def waiting(owner: str, awaited: str, seconds: float) -> Iterator[None]:
    """Name a wait that somebody else bounds."""
    loop = asyncio.get_running_loop()
    wait, waits = Wait(owner, awaited, seconds, loop.time()), _OPEN.setdefault(loop, [])
    waits.append(wait)
    try:
        yield
    finally:
        waits.remove(wait)


def open_waits() -> list[Wait]:
    """Everything that is waited for in the running event loop, longest first."""
    return list(_OPEN.get(asyncio.get_running_loop(), ()))


class StallTimer:
    """Seconds without a movement, of those in which whoever looks was awake.

    While the conductor itself was stopped (SIGSTOP, a machine that was suspended), nobody can be judged: of the time
    between two looks, at most `longest` seconds count.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked = asyncio.get_running_loop().time()
        self._still = 0.0

    def poll(self, moved: bool) -> float:
        """To be called again and again, at shorter intervals than `longest`."""
        now = asyncio.get_running_loop().time()
        elapsed, self._looked = min(now - self._looked, self._longest), now
        self._still = 0.0 if moved else self._still + elapsed
        return self._still
