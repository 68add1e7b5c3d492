"""Supervision of roles: a role that ends is reported, counted against a restart budget, and started again after a
pause.

ended ─► reported ─► counted ─► pause ─► start ─► it serves
            ▲           │ too often: RoleDied        │
            └───────────┴──── ends or is late ◄──────┘
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, TypeVar

from stretto.core.errors import RoleDied, several

RESTART_DELAY_SECONDS = 0.5  #: time for the system to free memory, or room for a process

_MOST_FACTORS = 64  # of a pause; without a bound a float overflows after a thousand deaths in a row

T = TypeVar("T")


class RestartBudget:
    """Limit on replacements of a role, and the pauses between them.

    The role may be replaced `allowed` times within `window` seconds, and at most `allowed` times in a row without
    progress, so that a role that always dies of the same work ends the run. The first replacement in a row starts at
    once, the second after `delay` seconds, each further one after `factor` times as long, up to `longest` seconds.

    Example::

        restarts = RestartBudget(allowed=3, window=3600.0)
        if restarts.exceeded_by_one_more():    # the fourth within an hour, or the fourth since `progressed`
            raise RoleDied(...)
    """

    def __init__(
        self,
        allowed: float,
        window: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        *,
        delay: float = RESTART_DELAY_SECONDS,
        factor: float = 1.0,
        longest: float = math.inf,
    ) -> None:
        self._allowed, self._window, self._clock = allowed, window, clock
        self._delay, self._factor, self._longest = delay, factor, longest
        self._moments: deque[float] = deque()
        self._in_a_row = 0

    def exceeded_by_one_more(self) -> bool:
        """Count one more death of the role; returns whether it may not be replaced again, because more than `allowed`
        have now happened within the window, or in a row without progress."""
        now = self._clock()
        self._in_a_row += 1
        if math.isfinite(self._window):
            self._moments.append(now)
            while self._moments[0] <= now - self._window:
                self._moments.popleft()
        return len(self) > self._allowed

    def progressed(self) -> None:
        """Reset the count of deaths in a row: the role has completed a request."""
        self._in_a_row = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start, after the deaths counted so far."""
        further = min(self._in_a_row - 2, _MOST_FACTORS)
        return min(self._longest, self._delay * self._factor**further) if further >= 0 else 0.0

    def __len__(self) -> int:
        return max(len(self._moments), self._in_a_row)


class Supervisor(Generic[T]):
    """Starts one role again whenever it has ended, as long as its budget allows it.

    Example::

        supervisor = Supervisor("weights", start, RestartBudget(allowed=3, window=3600.0), say, log)
        await supervisor.begin()
        await supervisor.keep(process.ended)     # until RoleDied
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[T]],
        restarts: RestartBudget,
        say: Callable[[str], None] = lambda sentence: None,
        log: str = "",
        *,
        wanted: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Supervise a role without starting it.

        Args:
            start: starts a new process and returns when it serves. It raises RoleDied if the process ended instead,
                which counts as a death, and then leaves no process behind; any other error passes through the methods
                of this class.
            say: gets one sentence for each replacement.
            log: path of the role's log, for the error.
            wanted: called before each further start; if it returns False, RoleDied is raised in place of the start.
            sleep: waits as many seconds as it gets, before each further start; it may return early.
        """
        self.name, self.restarts = name, restarts
        self._start, self._say, self._log = start, say, log
        self._wanted, self._sleep = wanted, sleep

    async def begin(self) -> T:
        """Start the role for the first time, and again while a start fails, which counts as a death. Returns the result
        of `start`. Raises RoleDied if more starts failed than the budget allows."""
        try:
            return await self._start()
        except RoleDied as death:
            return await self.replace(death.how, cause=death.__cause__)

    async def replace(self, how: str, *, counted: bool = True, cause: BaseException | None = None) -> T:
        """Start the role again, until a start succeeds; returns the result of `start`. Each try is logged and waits for
        the budget's pause. `how` says how the role ended ("was killed by SIGKILL"). `counted`: False for an end that
        was not the role's own fault; failed starts afterwards count. Raises RoleDied if its budget is exceeded, or it
        is no longer wanted; its cause is that of the last failed start, at first `cause`: an OSError says that the
        machine lacks something."""
        while True:
            if not self._wanted():
                raise RoleDied(self.name, how, self._log) from cause
            if counted and self.restarts.exceeded_by_one_more():
                raise RoleDied(self.name, f"{how}, {several(len(self.restarts), 'time')}", self._log) from cause
            self._say(f"{self.name} {how}: a new one is started")
            await self._sleep(self.restarts.pause)
            try:
                return await self._start()
            except RoleDied as death:
                how, counted, cause = death.how, True, death.__cause__

    async def keep(self, ended: Callable[[], Awaitable[str]]) -> NoReturn:
        """Replace the role each time `ended` returns; its result says how the role ended. No deadline, since a healthy
        role runs as long as the run. Raises RoleDied if the restart budget is exceeded, or `wanted` returns False."""
        while True:
            await self.replace(await ended())
