"""One engine of the pool: its process (replaced when it dies), version, requests and counters."""

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
from stretto.core.machine import on_gpus
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
    """One engine of the pool, across all processes that have played it.

    Attributes:
        state: changed only by methods of this class.
        version: version it serves; None while it is down or starting.
        host: name of its machine.
        how: how its last process ended; empty before.
        published: newest version in the mailbox, which it loads as soon as it can.
        open: ids of its requests.
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
    given_up: set[str] = field(default_factory=set)  # open requests that it was told to abort
    leaving: bool = False  # leaves the run, or has left
    lags: bool = False  # behind for too long: gets no requests until it has caught up
    _missing: deque[tuple[int, float]] = field(default_factory=deque)  # (version to load, time of its publication)
    _loaded: float = -math.inf  # `time.monotonic` of the last load
    _publication: asyncio.Event = field(default_factory=asyncio.Event)
    _awaited: int = 0  # requests waiting for it to load a version
    _suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: int = 0  # times it was replaced
    _doubt: UnprovenWeights | None = None  # an error for which it must not be replaced
    health: EngineHealth | None = None  # as of the last poll
    _earlier: list[EngineHealth] = field(default_factory=list)  # last counters of its earlier processes
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
        """Handle of a local engine, not started yet. `role`: module that its process runs; `changed`: called on every
        change of state or version."""
        log, own = logs / f"{spec.name}.txt", on_gpus(spec.gpus)
        process = RoleProcess(spec.name, role, log, deadlines.hung, spawner, own)
        answer, load = (
            deadlines.answer,
            deadlines.load,
        )  # a health request also waits for the current step, which may be long
        client = HttpEngine(spec.name, spec.address, answer_seconds=answer, load_seconds=load, health_seconds=answer)
        restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
        return cls(spec, process, client, deadlines, restarts, changed, proving, load_interval)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def serves(self) -> bool:
        """Whether it serves a version and can load another one."""
        return self.state in (EngineState.UP, EngineState.SUSPECTED)

    @property
    def counts(self) -> bool:
        """Whether its version counts for the oldest live version (`EnginePool.live`)."""
        return self.serves and not self.lags

    @property
    def takes(self) -> bool:
        """Whether it gets requests."""
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
        """Send it no more requests."""
        self.leaving = True
        self._becomes(EngineState.LEAVING, self.version)

    def mark_gone(self, why: str) -> None:
        """Record that it has left the run: its requests end with an error; its counters are kept."""
        self.leaving, self.how = True, why
        self._retire_counters()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()

    def notice_lag(self, seconds: float, say: Callable[[str], None]) -> None:
        """Stop counting this engine as live if it has not loaded a version within `seconds`, so that it does not hold
        up admission."""
        now, allowed = asyncio.get_running_loop().time(), seconds + self.load_interval
        late = bool(self._missing) and now - self._missing[0][1] > allowed
        if late and self.counts:
            self.lags, awaited = True, self._missing[0][0]
            say(f"{self.name} has not loaded version {awaited} in {seconds:g} s: no groups until it has caught up")
            self.changed(self)

    # ── its process ──────────────────────────────────────────────────────────────────────────────

    async def start(self, publication: float = 0.0) -> None:
        """Start its process; returns when it serves the newest published version. `publication`: seconds to wait for
        the first publication, in addition to `deadlines.start`.

        Raises:
            RoleDied: the process ended.
            DeadlineExceeded: no progress for too long.
        """
        self._becomes(EngineState.STARTING, None)
        await self.process.start(self.spec, self.spec.threads)
        seconds, moved = self.deadlines.start + publication, self.client.moved
        async with standstill("conductor", f"{self.name} to be ready", seconds, moved):
            version = await self._newest()
        self._becomes(EngineState.UP, version)
        self._publication.set()  # a version may have been published meanwhile

    def suspect(self) -> None:
        """Mark it suspected after a broken request: no new requests until it replies or is replaced."""
        if self.state is EngineState.UP:
            self._becomes(EngineState.SUSPECTED, self.version)
            self._suspicion.set()

    async def supervise(self, say: Callable[[str], None]) -> NoReturn:
        """Replace its process whenever it dies; `say` gets a log line each time.

        Raises:
            RoleDied, UnprovenWeights: it failed more often than `deadlines.engine_restarts`, or must not be replaced.
        """
        await gather_or_cancel(self._replace_when_it_ends(say), self._reinstate())
        raise AssertionError("a watcher never ends by itself")

    async def _replace_when_it_ends(self, say: Callable[[str], None]) -> NoReturn:
        while True:
            await self.replace(await self.process.ended(), say)

    async def replace(self, how: str, say: Callable[[str], None], publication: float = 0.0) -> None:
        """Start a new process after one that ended. `how`: how it ended, for the log; `publication`: as for `start`."""

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
        """Record that its process has ended; raises UnprovenWeights if it must not be replaced."""
        self._ended, self.how = self._ended + 1, how
        self._retire_counters()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()  # a connection to another machine stays open until its end is noticed
        if self._doubt is not None:
            raise self._doubt

    def _retire_counters(self) -> None:
        """Add the counters of the ended process to the totals; tokens of its unfinished completions count as wasted."""
        if (last := self.health) is not None:
            self._earlier.append(msgspec.structs.replace(last, wasted=last.wasted + last.unfinished, unfinished=0))
        self.health = None

    async def _reinstate(self) -> NoReturn:
        """Give a suspected engine requests again once it replies; kill it, so that it is replaced, if it does not reply
        for `deadlines.hung` seconds."""
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
        """End its process; returns when it is gone. `grace`: seconds before it is killed."""
        if self._poll is not None:
            await cancel_and_wait([self._poll])
        await self.client.close()
        await self.process.stop(grace)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int) -> None:
        """Note that `version` is in the mailbox."""
        self.published = version
        if self.version is not None and self.version < version:
            self._missing.append((version, asyncio.get_running_loop().time()))
        self._publication.set()

    async def keep_loaded(self) -> NoReturn:
        """Load each newer published version, forever."""
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
        """Kill it so that it is replaced. Raises `doubt` if it already replaced an engine killed for this reason."""
        if self.proving.doubts(self.name):
            raise doubt
        self.end_for(doubt, final=False)

    def end_for(self, doubt: UnprovenWeights, final: bool) -> None:
        """Kill it because of `doubt`; it is replaced, unless `final`: then `supervise` raises `doubt`."""
        self._doubt = doubt if final else None
        self.suspect()
        self.process.kill()

    async def _until_due(self) -> None:
        """Wait until `load_interval` seconds after the last load; not at all if it has no requests."""
        due = self._loaded + self.load_interval
        while self.open and not self._awaited and (early := due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(early, _POLL_SECONDS))

    async def _newest(self) -> int:
        """Bring a started engine to the newest published version and return it. Groups are admitted at the live
        version, so an older one must not sample for them."""
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
        """Return when it serves `version` or newer, loading it if necessary."""
        seconds, moved = self.deadlines.start, self.client.moved
        async with standstill("conductor", f"{self.name} to serve version {version}", seconds, moved):
            while (self.version is None or self.version < version) and not self.leaving:
                # One that is not up is brought back by supervise(), with the newest version.
                await (self._load(version) if self.state is EngineState.UP else asyncio.sleep(RETRY_SECONDS))

    async def until_it_serves(self, version: int) -> None:
        """Return when it serves `version` or newer; loads it at once, without waiting for the load interval.

        Raises:
            EngineLeft: it is no longer up.
            EngineLost: no sign of life for `deadlines.start` seconds.
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
        """Abort its requests except those for which `spared` is true; returns when they are gone or it does not
        reply."""
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                for id in [id for id in self.open if not spared(id)]:
                    self.given_up.add(id)
                    await self.client.abort(id)
                while not all(map(spared, self.open)):
                    await asyncio.sleep(_POLL_SECONDS)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """Tokens of its unfinished completions beyond the `known` ones; empty if it does not reply within `patience`
        seconds."""
        theirs = {id: known[id] for id in self.open if id in known}
        if theirs:
            with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
                async with asyncio.timeout(patience):
                    return await self.client.partials(theirs)
        return {}

    def poll(self) -> asyncio.Task[None]:
        """Ask for its health and spans. Returns the same task until the reply has come, so a caller that stops waiting
        loses nothing."""
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
            self._spans += spans  # read after the wait: spans may have been drained during it

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """Sum of a counter over all its processes, as of the last poll."""
        return sum(counter(health) for health in (self.health, *self._earlier) if health is not None)
