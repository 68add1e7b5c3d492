"""Published versions that one engine has yet to load, and the time at which it may load the next."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_LOOK_SECONDS = 0.005


class Publications:
    """What is in the mailbox for one engine.

    Attributes:
        newest: newest version in the mailbox (-1: none); the engine loads it as soon as it can.
    """

    def __init__(self, interval: float) -> None:
        """`interval`: least seconds between two loads (`engine.load_interval`)."""
        self.newest = -1
        self._interval = interval
        self._missing = deque[tuple[int, float]]()  # (version to load, time of its publication)
        self._loaded = -math.inf  # time of the last load
        self._news = asyncio.Event()
        self._awaited = 0  # requests that wait until the engine has loaded a version

    def publish(self, version: int, served: int | None) -> None:
        """Note that `version` is the newest in the mailbox now. `served`: version that the engine serves; None: it is
        down, and will start with the newest one."""
        self.newest = version
        if served is not None and served < version:
            self._missing.append((version, asyncio.get_running_loop().time()))
        self._news.set()

    def look_again(self) -> None:
        """Let `news` return: a version may have been published while the engine could load none."""
        self._news.set()

    async def news(self, requests: Collection[str]) -> None:
        """Wait until the engine may load a version that has been published since the last call: not before `interval`
        seconds after its last load, unless it has no `requests` left, or `awaited` is entered."""
        await self._news.wait()
        due = self._loaded + self._interval
        while requests and not self._awaited and (early := due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(early, _LOOK_SECONDS))
        self._news.clear()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Context manager: meanwhile the engine need not wait for `interval`, since a request waits for a version."""
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    def loaded(self) -> None:
        """Note that the engine has loaded a version now."""
        self._loaded = asyncio.get_running_loop().time()

    def serves(self, version: int | None) -> None:
        """Note which version the engine serves: older ones, and itself, are missing no longer. None: it is down, and
        none is missing."""
        while self._missing and (version is None or self._missing[0][0] <= version):
            self._missing.popleft()

    @property
    def missing(self) -> bool:
        """Whether a version was published that the engine, which serves, has not loaded."""
        return bool(self._missing)

    def late(self, seconds: float) -> int | None:
        """Oldest missing version if it was published more than `seconds` (plus the interval) ago, else None."""
        if not self._missing:
            return None
        version, since = self._missing[0]
        return version if asyncio.get_running_loop().time() - since > seconds + self._interval else None
