"""Deadlines for waits. Open waits are listed with their owners, so that a stalled run can report who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from stretto.core.errors import DeadlineExceeded, NothingMoves
from stretto.core.tasks import cancel_and_wait

#: Most seconds counted between two checks of a watchdog, which come every second.
_LONGEST_POLL = 5.0
_LOOKS = 6  # progress checks within the limit of a standstill


class _Wait(msgspec.Struct, frozen=True, eq=False):
    """An open wait of `owner` for `awaited`. `seconds`: its limit; `since`: its start, on the event loop's clock;
    `works`: while it returns True, the run counts as moving (`waiting`); the default always returns False."""

    owner: str
    awaited: str
    seconds: float
    since: float
    works: Callable[[], bool] = bool


#: Open waits by event loop.
_OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Wait, None]] = WeakKeyDictionary()


def deadline(
    owner: str, awaited: str, seconds: float, detail: Callable[[], str] = str, works: Callable[[], bool] = bool
) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Context manager: limit everything awaited inside the block to `seconds`; yields the timeout, which the block may
    reschedule. `owner` and `awaited` name in the error who waited for what; the text returned by `detail`, called when
    the time is up, is appended to `awaited`. `works`: while it returns True, a `Watchdog` counts the run as moving.

    Raises:
        DeadlineExceeded: `seconds` have passed. A cancellation from outside passes through unchanged.

    Example::

        async with deadline("conductor", "engine-0 to load version 7", 60):
            await engine.update(7)
    """
    return _Deadline(_Wait(owner, awaited, seconds, asyncio.get_running_loop().time(), works), detail)


class _Deadline(AbstractAsyncContextManager[asyncio.Timeout]):
    """A `deadline`, as a class: each exchange with an engine has one, and generators would take half of its time."""

    def __init__(self, wait: _Wait, detail: Callable[[], str]) -> None:
        self._wait, self._detail = wait, detail

    async def __aenter__(self) -> asyncio.Timeout:
        self._scope = asyncio.timeout(self._wait.seconds)
        self._open = _waits()
        self._open[self._wait] = None
        return await self._scope.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        del self._open[self._wait]
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        if isinstance(error, TimeoutError) and self._scope.expired():
            raise DeadlineExceeded(self._wait.owner, self._wait.awaited + self._detail(), self._wait.seconds) from None


@asynccontextmanager
async def standstill(
    owner: str, awaited: str, seconds: float, progress: Callable[[], Awaitable[object]]
) -> AsyncIterator[asyncio.Timeout]:
    """Context manager: raise DeadlineExceeded after `seconds` of waiting for `awaited` (named with `owner` in the
    error); the time restarts whenever the value returned by `progress` changes. `progress` is called six times per
    `seconds`; a returned None is ignored. After an error in `progress` the time no longer restarts. Yields the
    timeout."""
    async with deadline(owner, awaited, seconds) as scope:
        watch = asyncio.ensure_future(_put_off(scope, seconds, progress))
        try:
            yield scope
        finally:
            await cancel_and_wait([watch])


async def _put_off(scope: asyncio.Timeout, seconds: float, progress: Callable[[], Awaitable[object]]) -> None:
    loop, before = asyncio.get_running_loop(), None
    while not scope.expired():
        await asyncio.sleep(seconds / _LOOKS)
        now = await progress()
        if None not in (before, now) and now != before and not scope.expired():
            scope.reschedule(loop.time() + seconds)
        before = now if now is not None else before


@contextmanager
def waiting(owner: str, awaited: str, seconds: float, works: Callable[[], bool] = bool) -> Iterator[None]:
    """Context manager: list a wait of `owner` for `awaited` in `open_waits` during the block. The caller must enforce
    the deadline itself.

    `works` is called at each check of a `Watchdog`: while it returns True, the run counts as moving. It is for users'
    code, a tool or a reward, which shows no progress before it ends. The default, `bool`, returns False.
    """
    wait, waits = _Wait(owner, awaited, seconds, asyncio.get_running_loop().time(), works), _waits()
    waits[wait] = None
    try:
        yield
    finally:
        del waits[wait]


def open_waits() -> list[_Wait]:
    """Open waits of the running event loop, oldest first."""
    return list(_waits())


def _waits() -> dict[_Wait, None]:
    return _OPEN.setdefault(asyncio.get_running_loop(), {})


class StallTimer:
    """Counts seconds without progress, from one `poll` of the caller to the next. Made in a running event loop.

    At most `longest` seconds count between two polls: after SIGSTOP or a suspend of this process they are far apart.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._polled = asyncio.get_running_loop().time()
        self._stalled = 0.0

    def poll(self, moved: bool) -> float:
        """Count the time since the last call; returns the seconds since the last progress. `moved`: there was progress
        since the last call, so the result is 0. Call it more often than every `longest` seconds."""
        now = asyncio.get_running_loop().time()
        elapsed, self._polled = min(now - self._polled, self._longest), now
        self._stalled = 0.0 if moved else self._stalled + elapsed
        return self._stalled


class Watchdog:
    """Ends a run that makes no progress for `seconds`: `check` raises. An open wait whose `works` returns True
    counts as progress. `progress`: returns a value that changes whenever any process of the run does work."""

    def __init__(self, progress: Callable[[], object], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._before: object = None
        self._stall = StallTimer(_LONGEST_POLL)

    def check(self) -> None:
        """Compare progress with that of the last call; an open wait whose `works` is true counts as progress. Call it
        every second. Raises NothingMoves after as many seconds without progress as the watchdog allows."""
        before, self._before = self._before, self._progress()
        waits = open_waits()
        moved = self._before != before or any(wait.works() for wait in waits)
        if self._stall.poll(moved) >= self._seconds:
            now = asyncio.get_running_loop().time()
            raise NothingMoves(self._seconds, [_described(wait, now) for wait in waits])


def _described(wait: _Wait, now: float) -> str:
    return f"{wait.owner} has waited {now - wait.since:.0f} s of {wait.seconds:g} s for {wait.awaited}"
