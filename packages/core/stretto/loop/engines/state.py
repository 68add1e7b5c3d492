"""State of one engine, whichever process it has; the published versions that it has yet to load; its counters and time
spans; which of several engines do not reply (`silent`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import cast

import msgspec

from stretto.core.engine import Engine, EngineHealth
from stretto.core.errors import DeadlineExceeded, EngineLied, EngineLost, WireError, several
from stretto.core.events import Span
from stretto.core.tasks import cancel_and_wait
from stretto.loop.config import DeadlinesConfig
from stretto.processes.role import ReplaceableProcess

_LOOK_SECONDS = 0.005
_LIVE_SECONDS = 1.0  # between two looks whether an engine is live


class EngineState(Enum):
    """State of an engine: DOWN ─► STARTING ─► UP ◄─► SUSPECTED. Any state may change to DOWN when the process ends, or
    to LEAVING and then DOWN when the engine leaves the run."""

    DOWN = auto()  # no process
    STARTING = auto()  # loads its model and the newest version
    UP = auto()  # takes requests
    SUSPECTED = auto()  # a request broke off: no more requests until it replies or is replaced
    LEAVING = auto()  # no requests; its open ones are aborted


class Publications:
    """Published versions of the weights, as one engine follows them.

    Attributes:
        newest: newest version in the mailbox (-1: none); the engine loads it as soon as it can.
        live: returns the oldest version that an engine of the pool serves; -1 if none serves one.
        reached: returns the newest version that was ever live: groups are admitted at it or before.
        bound: for a guest, returns the staleness bound of groups admitted now; 0 for other engines.
        promised: version that an engine which lags loads, or has loaded: it may get groups that are admitted at that
            version or an older one, and samples them once it serves it. -1: it gets none.
    """

    def __init__(self, interval: float) -> None:
        """Begin without a published version. `interval`: least seconds between two loads (`engine.load_interval`)."""
        self.newest = -1
        self.live: Callable[[], int] = lambda: -1
        self.reached: Callable[[], int] = lambda: -1
        self.bound: Callable[[], float] = lambda: 0.0
        self.promised = -1
        self._keeps_up = False
        self._interval = interval
        self._missing = deque[tuple[int, float]]()  # (version to load, time of its publication)
        self._loaded = -math.inf  # time of the last load
        self._news = asyncio.Event()
        self._awaited = 0  # requests that wait until the engine has loaded a version
        self._due = 0.0  # time from which the engine is to load what is missing; inf: it waits in `next`

    def follow(
        self, live: Callable[[], int], reached: Callable[[], int], bound: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Set the attributes of these names: the engine has come to a pool."""
        self.live, self.reached, self.bound = live, reached, bound

    def publish(self, version: int, served: int | None) -> None:
        """Note that `version` is the newest in the mailbox now. `served`: version that the engine serves, which has
        `version` to load if it is older; None: it is down, and will start with the newest one."""
        self.newest = version
        if served is not None and served < version:
            self._missing.append((version, asyncio.get_running_loop().time()))
        self._news.set()

    def suffices(self, version: int) -> bool:
        """Whether an engine that starts may serve `version`, which it has loaded: it is the newest, or no older than
        the live one (engines that all load more slowly than the trainer publishes would otherwise never come back), or
        a guest `keeps_up` with it."""
        live = self.live()
        return version >= (self.newest if live < 0 else live) or self.keeps_up(version)

    def keeps_up(self, version: int) -> bool:
        """Whether a guest that has just loaded `version` may get groups although a newer version is live: so few were
        published meanwhile that a group which waits for such a load can be finished before it is due. Of a bound of eta
        versions the load takes at most eta - 1."""
        return self.needed(version) <= self.bound()

    def needed(self, version: int) -> int:
        """Least staleness bound with which a guest that has just loaded `version` keeps up."""
        return self.newest - version + 2

    def told(self, version: int, seconds: float) -> str:
        """Words about an engine that has loaded `version` in `seconds`, and has not kept up."""
        told = f"loads a version in {seconds:.3g} s, and {several(self.newest - version, 'newer one')} came meanwhile"
        return told + (f" (with rollout.max_staleness = {self.needed(version)} it would help)" if self.bound() else "")

    def begins(self, version: int) -> None:
        """Note that the engine, which lags, loads `version` now. If its last load kept up, this is its promise
        (`promised`) from now on; else nothing changes."""
        if self._keeps_up:
            self.promised = version
            self.serves(version - 1)  # for `late`, which is about the promise now

    def breaks(self) -> None:
        """Take back what was promised: the engine takes no groups until it has caught up, or keeps up again."""
        self.promised, self._keeps_up = -1, False

    async def next(self) -> None:
        """Wait for the next publication if the last load kept up, as long as others are live: groups are admitted just
        after a publication, and the engine can promise to serve it if it begins to load then. If none comes for long,
        `late` ends the wait."""
        self._news.clear()
        self._due = math.inf
        try:
            while self._keeps_up and self.live() >= 0 and not self._news.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LIVE_SECONDS):
                        await self._news.wait()
        finally:
            self._due = asyncio.get_running_loop().time()
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
        """Context manager: in its block a request waits for a version, so the engine may load one before `interval` has
        passed."""
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    def loaded(self, version: int) -> None:
        """Note that the engine has loaded `version` now; the next `interval` begins. If it has not kept up, what it
        promised is taken back."""
        self._loaded = asyncio.get_running_loop().time()
        self._keeps_up = self.keeps_up(version)
        if not self._keeps_up:
            self.promised = -1

    def serves(self, version: int | None) -> None:
        """Note which version the engine serves: this version and older ones are no longer missing. None: the engine is
        down, no version is missing, and what it promised is taken back."""
        if version is None:
            self.breaks()
        while self._missing and (version is None or self._missing[0][0] <= version):
            self._missing.popleft()

    @property
    def waits(self) -> bool:
        """Whether the engine waits in `next`."""
        return math.isinf(self._due)

    @property
    def missing(self) -> bool:
        """Whether a version was published that the engine, which serves, has not loaded."""
        return bool(self._missing)

    def late(self, seconds: float) -> int | None:
        """Oldest missing version if it was published more than `seconds` (plus the interval) ago, else None. An engine
        that waits in `next` meanwhile is not late: its wait ends, and it has as long from then on."""
        if not self._missing:
            return None
        now, (version, since), patience = asyncio.get_running_loop().time(), self._missing[0], seconds + self._interval
        if now - since > patience and self.waits:
            self._news.set()
        return version if now - max(since, self._due) > patience else None


class EngineCounters:
    """Counters of one engine, summed over all of its processes, and its time spans.

    Attributes:
        health: counters of the present process, as of the last poll; None before the first.
        awaited: requests that were open when it broke off another, or a load; the pool removes those that end.
    """

    def __init__(self, name: str, client: Engine, process: ReplaceableProcess) -> None:
        """Begin without counters. `name`: of the engine, for its spans. `client`: fetches counters and spans from the
        engine. `process`: says how much the engine's clock differs from the conductor's."""
        self.health: EngineHealth | None = None
        self.lie: EngineLied | None = None  # what its process last told, and no engine tells
        self._name, self._client, self._process = name, client, process
        self._earlier: list[EngineHealth] = []  # last counters of earlier processes
        self._ended = 0  # number of processes that were retired
        self.awaited, self._broke_off = set[str](), 0
        self._spans: list[Span] = []
        self._poll: asyncio.Task[None] | None = None

    def retire(self) -> None:
        """Keep the last counters of the process, which has ended or is of no use any more. Tokens of its unfinished
        completions now count as wasted. Counters that it sends later are ignored."""
        if (last := self.health) is not None:
            self._earlier.append(msgspec.structs.replace(last, wasted=last.wasted + last.unfinished, unfinished=0))
        self.health = self.lie = None
        self._ended += 1
        self.delivered()

    def broke_off(self, open_: Collection[str]) -> int:
        """Note that the process broke off a request or a load while it had the requests `open_`. Returns how often it
        did so in a row, without a completion or a load between. While some are `awaited`, nothing is counted: an engine
        that is busy may refuse others."""
        if not self.awaited:
            self.awaited, self._broke_off = set(open_), self._broke_off + 1
        return self._broke_off

    def delivered(self) -> None:
        """Note that the process has ended a completion, or loaded a version: what it broke off before is forgotten."""
        self.awaited, self._broke_off = set(), 0

    def poll(self, *, anew: bool = False) -> asyncio.Task[None]:
        """Fetch the counters and spans in a task, which is returned; it sets `health`, or changes nothing if the engine
        does not reply. A later call returns the same task until the reply has come, so a caller that stops waiting
        loses nothing. `anew`: return a task that asks again after that reply, which may be of a moment before this
        call."""
        before = self._poll
        if before is None or before.done():
            self._poll = asyncio.create_task(self._fetch())
        elif anew:
            self._poll = asyncio.create_task(self._fetch(before))
        return cast("asyncio.Task[None]", self._poll)

    async def _fetch(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await before
        asked = self._ended
        try:
            health = await self._client.health()
            if asked == self._ended:  # else the counters are those of a process that is gone
                self.health = health
            spans = await self._client.spans()
            # Read after the wait: spans may have been drained during it. All are its own, whatever it calls them.
            shifted = (span.shifted(self._process.clock_offset) for span in spans)
            self._spans += [msgspec.structs.replace(span, role=self._name) for span in shifted]
        except EngineLied as lie:
            self.lie = lie if asked == self._ended else self.lie
        except (EngineLost, DeadlineExceeded, WireError):
            pass  # no news: a measurement ends no run

    async def close(self) -> None:
        """Cancel a poll that is still open."""
        if self._poll is not None:
            await cancel_and_wait([self._poll])

    def drain_spans(self) -> list[Span]:
        """Return the spans fetched since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    def total(self, counter: Callable[[EngineHealth], float]) -> float:
        """Sum of a counter over all processes of the engine, as of the last poll; 0 before the first. `counter`:
        returns it from a health reply."""
        return sum(counter(health) for health in (self.health, *self._earlier) if health is not None)


async def silent(engines: Mapping[str, Engine], deadlines: DeadlinesConfig) -> set[str]:
    """Ask each engine, by its name, for its health; return the names of those that do not reply in time, without those
    whose connection fails. Once one has replied, the others have twice its time, at least `deadlines.hung` seconds.
    Until then the machine may be busy: all have `deadlines.answer` seconds."""
    replies = {asyncio.ensure_future(engine.health()): name for name, engine in engines.items()}
    began, first, open_ = time.monotonic(), math.inf, set(replies)
    try:
        while open_:
            left = began + min(deadlines.answer, max(deadlines.hung, 2 * first)) - time.monotonic()
            done, open_ = await asyncio.wait(open_, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if not all(one.exception() for one in done):
                first = min(first, time.monotonic() - began)
        late = [one for one in replies if one in open_ or isinstance(one.exception(), DeadlineExceeded)]
        return {replies[one] for one in late}
    finally:
        await cancel_and_wait([*open_])
