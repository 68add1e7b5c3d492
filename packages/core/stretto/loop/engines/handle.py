"""One engine of the pool: its process, which is replaced when it dies, its version, its requests, its counters."""

from __future__ import annotations

import asyncio
import contextlib
import math
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from stretto.core.deadlines import standstill
from stretto.core.engine import Engine, EngineHealth
from stretto.core.errors import DeadlineExceeded, EngineLeft, EngineLost, RoleDied, UnprovenWeights, WireError
from stretto.core.events import Span
from stretto.core.records import Partials
from stretto.core.tasks import cancel_and_wait, gather_or_cancel
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.proving import Proving
from stretto.loop.engines.roster import EngineState
from stretto.processes.role import ReplaceableProcess, RoleProcess
from stretto.processes.spawn import Spawner
from stretto.processes.supervisor import RestartBudget, Supervisor

RETRY_SECONDS = 0.05
_POLL_SECONDS = 0.005
_GIVE_UP_SECONDS = 1.0


@dataclass
class EngineHandle:
    """One engine, and those that it replaced.

    Attributes:
        state: changed by its own methods alone.
        version: what it serves; None while it is down or starting.
        host: the name of its machine.
        how: its last process ended, if one has.
        published: the newest version in the mailbox, which it loads as soon as it can.
        open: the requests that it has.
        changed: called when `state` or `version` has changed.
    """

    spec: EngineSpec
    process: ReplaceableProcess
    client: Engine
    deadlines: DeadlinesConfig
    restarts: RestartBudget
    changed: Callable[[EngineHandle], None]
    proving: Proving
    load_interval: float = 0.0
    host: str = field(default_factory=platform.node)
    state: EngineState = EngineState.DOWN
    version: int | None = None
    how: str = ""
    published: int = -1
    open: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)  # open requests that it was told to give up
    leaving: bool = False  # it is about to leave the run, or has
    lags: bool = False  # for too long behind a version: it gets no requests until it has caught up
    _missing: deque[tuple[int, float]] = field(default_factory=deque)  # versions to load; when they came
    _loaded: float = -math.inf  # when it loaded the last version, by `time.monotonic`
    _publication: asyncio.Event = field(default_factory=asyncio.Event)
    _awaited: int = 0  # requests that wait for it to load a version
    _suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: int = 0  # processes that it replaced
    _doubt: UnprovenWeights | None = None  # for which it is not replaced
    health: EngineHealth | None = None  # by the last poll
    _earlier: list[EngineHealth] = field(default_factory=list)  # the last counters of those that it replaced
    _spans: list[Span] = field(default_factory=list)
    _poll: asyncio.Task[None] | None = None

    @classmethod
    def on_this_machine(
        cls,
        spec: EngineSpec,
        logs: Path,
        deadlines: DeadlinesConfig,
        role: str,
        spawner: Spawner,
        changed: Callable[[EngineHandle], None],
        proving: Proving,
        load_interval: float,
    ) -> Self:
        """An engine that is not started yet; `role` is the module of its process."""
        process = RoleProcess(spec.name, role, logs / f"{spec.name}.txt", deadlines.hung, spawner)
        answer, load = deadlines.answer, deadlines.load  # to ask for its health too waits for a step, which may be long
        client = HttpEngine(spec.name, spec.address, answer_seconds=answer, load_seconds=load, health_seconds=answer)
        restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
        return cls(spec, process, client, deadlines, restarts, changed, proving, load_interval)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def serves(self) -> bool:
        """It has a version, and can load another one."""
        return self.state in (EngineState.UP, EngineState.SUSPECTED)

    @property
    def counts(self) -> bool:
        """Its version bounds the live one."""
        return self.serves and not self.lags

    @property
    def takes(self) -> bool:
        """It gets requests."""
        return self.state is EngineState.UP and not self.lags

    def _becomes(self, state: EngineState, version: int | None) -> None:
        if self.leaving and state is not EngineState.DOWN:
            state = EngineState.LEAVING
        self.state, self.version = state, version
        while self._missing and (version is None or self._missing[0][0] <= version):
            self._missing.popleft()
        self.lags = self.lags and bool(self._missing)
        self.changed(self)

    def begin_leaving(self) -> None:
        """It gets no requests from now on."""
        self.leaving = True
        self._becomes(EngineState.LEAVING, self.version)

    def mark_gone(self, why: str) -> None:
        """It has left: its requests break off, and its counters stay."""
        self.leaving, self.how = True, why
        self._retire_counters()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()

    def notice_lag(self, seconds: float, say: Callable[[str], None]) -> None:
        """An engine that does not load a version within `seconds` does not hold up admission."""
        now, allowed = asyncio.get_running_loop().time(), seconds + self.load_interval
        late = bool(self._missing) and now - self._missing[0][1] > allowed
        if late and self.counts:
            self.lags, awaited = True, self._missing[0][0]
            say(f"{self.name} has not loaded version {awaited} in {seconds:g} s: no groups until it has caught up")
            self.changed(self)

    # ── its process ──────────────────────────────────────────────────────────────────────────────

    async def start(self, publication: float = 0.0) -> None:
        """Start its process; when this returns, it serves the newest published version. `publication`: seconds that it
        may wait for the first publication, beyond those of `deadlines.start`.

        Raises:
            RoleDied: it ended instead.
            DeadlineExceeded: for too long nothing moved.
        """
        self._becomes(EngineState.STARTING, None)
        await self.process.start(self.spec, self.spec.threads)
        seconds, moved = self.deadlines.start + publication, self.client.moved
        async with standstill("conductor", f"{self.name} to be ready", seconds, moved):
            version = await self._newest()
        self._becomes(EngineState.UP, version)
        self._publication.set()  # a version may have been published meanwhile

    def suspect(self) -> None:
        """A request broke off: it gets no more until it replies, or is replaced."""
        if self.state is EngineState.UP:
            self._becomes(EngineState.SUSPECTED, self.version)
            self._suspicion.set()

    async def supervise(self, say: Callable[[str], None]) -> NoReturn:
        """Replace it when it dies; `say` gets a sentence each time.

        Raises:
            RoleDied, UnprovenWeights: more often than `deadlines.engine_restarts`, or it is not to be replaced.
        """
        await gather_or_cancel(self._replace_when_it_ends(say), self._reinstate())
        raise AssertionError("a watcher never ends by itself")

    async def _replace_when_it_ends(self, say: Callable[[str], None]) -> NoReturn:
        while True:
            await self.replace(await self.process.ended(), say)

    async def replace(self, how: str, say: Callable[[str], None], publication: float = 0.0) -> None:
        """A new process for one that ended, which happened as `how` says; `publication` as for `start`."""

        async def start() -> None:
            if self.leaving:
                return
            try:
                await self.start(publication)
            except RoleDied as death:
                self._mark_dead(death.how)
                raise
            except DeadlineExceeded as late:
                await self.process.stop(0.0)
                self._mark_dead(str(late))
                raise RoleDied(self.name, str(late), str(self.process.log)) from None

        if not self.leaving:
            self._mark_dead(how)
            await Supervisor(self.name, start, self.restarts, say, str(self.process.log)).replace(how)

    def _mark_dead(self, how: str) -> None:
        """Its process has ended; raises UnprovenWeights where that was to be for good."""
        self._ended, self.how = self._ended + 1, how
        self._retire_counters()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()  # to another machine a connection stays open until its end is noticed
        if self._doubt is not None:
            raise self._doubt

    def _retire_counters(self) -> None:
        """Those of a process that has ended; what it had not finished is wasted."""
        if (last := self.health) is not None:
            self._earlier.append(msgspec.structs.replace(last, wasted=last.wasted + last.unfinished, unfinished=0))
        self.health = None

    async def _reinstate(self) -> NoReturn:
        """A suspected engine that replies gets requests again; one that does not for `deadlines.hung` seconds is
        killed, and so replaced."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            while self.state is EngineState.SUSPECTED:
                try:
                    async with asyncio.timeout(self.deadlines.hung):
                        await self._until_it_replies()
                except TimeoutError:
                    self.process.kill()

    async def _until_it_replies(self) -> None:
        while self.state is EngineState.SUSPECTED:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(EngineLost, DeadlineExceeded, WireError):
                await self.client.health()
                if self.state is EngineState.SUSPECTED:
                    self._becomes(EngineState.UP, self.version)
                    self._publication.set()  # a version may have been published meanwhile

    async def stop(self, grace: float) -> None:
        """End it; returns when it is gone."""
        if self._poll is not None:
            await cancel_and_wait([self._poll])
        await self.client.close()
        await self.process.stop(grace)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int) -> None:
        """`version` is in the mailbox."""
        self.published = version
        if self.version is not None and self.version < version:
            self._missing.append((version, asyncio.get_running_loop().time()))
        self._publication.set()

    async def keep_loaded(self) -> NoReturn:
        """Load what is published, one version after the other."""
        while True:
            await self._publication.wait()
            await self._until_due()
            self._publication.clear()
            version = self.published
            if self.version is None or self.version >= version:
                continue
            try:
                await self._load(version)
            except WireError:
                if self.published == version:
                    raise  # else newer versions have taken the place of this one meanwhile

    async def _load(self, version: int) -> None:
        try:
            version = await self.proving.load(self.spec, self.client, version)
        except EngineLost:
            self.suspect()  # dead or not, it comes back with the newest version
        except UnprovenWeights as doubt:
            self.discard(doubt)
        else:
            self._loaded = asyncio.get_running_loop().time()
            if self.serves:  # else it has been replaced meanwhile
                self._becomes(self.state, version)

    def discard(self, doubt: UnprovenWeights) -> None:
        """Kill it, so that it is replaced; raises `doubt` where it is a replacement for that reason itself."""
        if self.proving.doubts(self.name):
            raise doubt
        self.end_for(doubt, final=False)

    def end_for(self, doubt: UnprovenWeights, final: bool) -> None:
        """Kill it; it is replaced, or, where that is `final`, `supervise` raises `doubt`."""
        self._doubt = doubt if final else None
        self.suspect()
        self.process.kill()

    async def _until_due(self) -> None:
        """`load_interval` seconds after the last load; at once if it has no requests."""
        due = self._loaded + self.load_interval
        while self.open and not self._awaited and (early := due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(early, _POLL_SECONDS))

    async def _newest(self) -> int:
        """The version of an engine that has started, once it has loaded every version that was published meanwhile:
        groups are admitted at the live version, so no older one may sample for them."""
        while True:
            if not self.process.running:
                raise RoleDied(self.name, await self.process.ended(), str(self.process.log))
            wanted = self.published
            try:
                served = (await self.client.health()).version
                version = await self.proving.load(self.spec, self.client, max(wanted, served), served)
            except EngineLost:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except UnprovenWeights as doubt:
                self.discard(doubt)
                raise RoleDied(self.name, f"{await self.process.ended()}: {doubt.problem}") from None
            except WireError:
                if self.published == wanted:
                    raise
                continue  # newer versions have taken the place of this one meanwhile
            if version >= self.published:
                return version

    async def reach(self, version: int) -> None:
        """Return when it serves `version` or a newer one; loads it where needed."""
        seconds, moved = self.deadlines.start, self.client.moved
        async with standstill("conductor", f"{self.name} to serve version {version}", seconds, moved):
            while (self.version is None or self.version < version) and not self.leaving:
                # One that is not up is brought back by supervise(), with the newest version.
                await (self._load(version) if self.state is EngineState.UP else asyncio.sleep(RETRY_SECONDS))

    async def until_it_serves(self, version: int) -> None:
        """Return when it serves `version` or a newer one, which it then loads whether that is due or not.

        Raises:
            EngineLeft: it is not up any more.
            EngineLost: nothing of it comes for `deadlines.start` seconds.
        """
        self._awaited += 1
        seconds, moved = self.deadlines.start, self.client.moved
        try:
            async with standstill("conductor", f"{self.name} to serve version {version}", seconds, moved):
                while self.version is None or self.version < version:
                    if not self.takes:
                        raise EngineLeft(self.name, "is not up any more")
                    await asyncio.sleep(RETRY_SECONDS)
        except DeadlineExceeded as late:
            raise EngineLost(self.name, str(late)) from None
        finally:
            self._awaited -= 1

    # ── requests and counters ────────────────────────────────────────────────────────────────────

    async def give_up(self, spared: Callable[[str], bool] = lambda id: False) -> None:
        """Abort its requests, except those that are spared; returns when it has no other, or does not reply."""
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                for id in [id for id in self.open if not spared(id)]:
                    self.given_up.add(id)
                    await self.client.abort(id)
                while not all(map(spared, self.open)):
                    await asyncio.sleep(_POLL_SECONDS)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """Tokens of its unfinished completions beyond the known ones; none without a reply in `patience` seconds."""
        theirs = {id: known[id] for id in self.open if id in known}
        if theirs:
            with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
                async with asyncio.timeout(patience):
                    return await self.client.partials(theirs)
        return {}

    def poll(self) -> asyncio.Task[None]:
        """Ask for its health and spans. While a reply is awaited the task is the same, so giving up loses nothing."""
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._fetch_health())
        return self._poll

    async def _fetch_health(self) -> None:
        asked = self._ended
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError):  # no news: a measurement ends no run
            health = await self.client.health()
            if asked == self._ended:  # else the counters are those of a process that is gone
                self.health = health
            spans = [span.shifted(self.process.clock_offset) for span in await self.client.spans()]
            self._spans += spans  # after the wait, in which they may have been drained

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """A counter summed over it and those that it replaced, up to their last poll."""
        return sum(counter(health) for health in (self.health, *self._earlier) if health is not None)
