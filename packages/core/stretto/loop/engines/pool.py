"""The engines of a run as one. Engines may join and leave while it goes on.

EnginePool.generate(...)     requests to the engine with the fewest completions in flight
EnginePool.publish(version)  every engine loads it as soon as it can; `live` is the oldest version that one serves
EnginePool.supervise()       an engine that dies is replaced, loads the newest version, and gets requests again
EnginePool.join, drain       an engine comes; one leaves, and its completions are continued by others

An engine of the run's own ends it when it cannot be replaced. A *guest*, which has joined, leaves then, and the run
goes on without it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from stretto.core.deadlines import deadline
from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLeft, EngineLied, EngineLost, RoleDied, RoleError, UnprovenWeights, WireError
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials, Segment
from stretto.core.tasks import NamedTasks, gather_or_cancel, gather_to_the_end
from stretto.engine.spec import ENGINE_ROLE, EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.proving import Proving
from stretto.loop.engines.roster import EngineState, Roster
from stretto.loop.engines.router import Router
from stretto.processes.run_role import users_mistake
from stretto.processes.spawn import FRESH, Spawner
from stretto.rollout.pressure import Pressure

_LEAVE_SECONDS = 1.0  # between SIGTERM and SIGKILL of an engine that leaves


async def _nothing() -> None: ...


class EnginePool:
    """The engines of a run as one (see the module)."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        logs: Path,
        deadlines: DeadlinesConfig,
        role: str = ENGINE_ROLE,
        load_interval: float = 0.0,
        router: Router | None = None,
        spawner: Spawner = FRESH,
        lag: float = math.inf,
        kind: str = "native",
        patience: float = 0.0,
        proving: Proving | None = None,
    ) -> None:
        """Args: role: module that an engine's process runs. kind: make of the engines. load_interval:
        `engine.load_interval`, seconds. router: chooses among the engines that are up; default: the least loaded. lag:
        seconds an engine may be behind the newest version; then it gets no groups and does not count as live until it
        has caught up. patience: least seconds that groups wait while no engine is up but machines may still join.
        proving: how engines prove the versions they load; None: not at all."""
        self.proving = proving or Proving()
        self.proving.replace_with(self._distrust)
        begin = partial(EngineHandle.on_this_machine, proving=self.proving, load_interval=load_interval)
        self._engines = {spec.name: begin(spec, logs, deadlines, role, spawner, self._changed) for spec in specs}
        self._own = frozenset(self._engines)
        self._left: dict[str, EngineHandle] = {}  # for their counters
        self._counted: dict[str, int] = {}  # the versions of the engines that count
        self._versions: Counter[int] = Counter()  # how many engines count with each
        self._deadlines, self._lag, self._patience = deadlines, lag, patience
        self._published = -1
        self._on_load: Callable[[int], None] = lambda version: None
        self._keep: Callable[[], Awaitable[None]] = _nothing
        self._announce: Callable[[int], None] = lambda version: None
        self._say: Callable[[str], None] = lambda text: None
        self._preempted = 0.0  # completions, when the pressure was last asked for
        self._router = router or Router()
        self._kind, self.roster = kind, Roster()
        self._free, self._supervised, self._loading = asyncio.Event(), NamedTasks(), NamedTasks()
        self._loads = self._stopped = False  # `keep_loaded` runs

    def listen(self, on_load: Callable[[int], None]) -> None:
        """Set `on_load`: called with the live version whenever it may have changed, with -1 while no engine serves
        one."""
        self._on_load = on_load

    def report_to(self, say: Callable[[str], None]) -> None:
        """Set `say`: gets a log line for every engine that is replaced, joins or leaves."""
        self._say = say

    def keep_with(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Set `keep`: journals the tokens in flight; called before an engine leaves."""
        self._keep = keep

    def announce_with(self, announce: Callable[[int], None]) -> None:
        """Set `announce`: tells other machines that a version is published."""
        self._announce = announce

    @property
    def published(self) -> int:
        """Newest version in the mailbox."""
        return self._published

    @property
    def changed(self) -> Callable[[EngineHandle], None]:
        """The callback that a joining engine calls when its state has changed."""
        return self._changed

    @property
    def names(self) -> list[str]:
        """Names of the engines in order of arrival, including those that start and excluding those that leave."""
        return [name for name, engine in self._engines.items() if not engine.leaving]

    def has(self, name: str) -> bool:
        """Whether this engine is in the pool, started or not."""
        return name in self._engines

    @property
    def live(self) -> int:
        """The oldest version that an engine serves. Engines being replaced, lagging or leaving do not count: they load
        the newest version before they get groups again."""
        return min(self._versions, default=-1)

    def _changed(self, engine: EngineHandle) -> None:
        if (up := engine.takes) != self._router.gives(engine.name):
            (self._router.join if up else self._router.leave)(engine.name)
        self._count(engine.name, engine.version if engine.counts else None)
        if engine.version is not None:
            self.roster.serves(engine.name, self._kind, engine.host, engine.version)
        elif engine.state is EngineState.DOWN:
            self.roster.left(engine.name, engine.how)
        self._free.set()
        self._on_load(self.live)  # grows also when the one that served the oldest version dies

    def _distrust(self, doubt: UnprovenWeights, final: bool) -> None:
        self._say(f"{doubt.role} {doubt.problem}" + ("" if final else ": it is replaced"))
        if (engine := self._engines.get(doubt.role)) is not None:
            engine.end_for(doubt, final)

    def _count(self, name: str, version: int | None) -> None:
        """Count an engine under its version (None: no longer). Must not loop over all engines: with hundreds, each
        reports each version."""
        if (before := self._counted.pop(name, None)) is not None:
            self._versions[before] -= 1
            if not self._versions[before]:
                del self._versions[before]
        if version is not None:
            self._counted[name] = version
            self._versions[version] += 1

    # ── start, joins, ends ───────────────────────────────────────────────────────────────────────

    async def start(self, version: int) -> None:
        """Start the run's own engines; each loads the newest publication, `version` or later, before it serves. Guests
        may have joined before.

        Raises:
            RoleDied: an engine ended by itself, or was killed more often than `deadlines.engine_restarts`.
            RoleFailed: an engine ended because of a user's mistake; takes precedence over other errors.
        """
        self.publish(version)
        await gather_or_cancel(*(self._start(engine) for name, engine in self._engines.items() if name in self._own))

    async def _start(self, engine: EngineHandle) -> None:
        try:
            await engine.start(engine.spec.publication_seconds)
        except RoleDied as death:
            if engine.leaving:
                return
            if not engine.process.killed:
                raise users_mistake(death) or death from None
            await engine.replace(death.how, self._say, engine.spec.publication_seconds)

    async def until_up(self, seconds: float) -> None:
        """Wait until an engine takes requests.

        Raises:
            DeadlineExceeded: none does within `seconds`.
        """
        async with deadline("conductor", "an engine to join", seconds):
            while not self._router.up:
                self._free.clear()
                await self._free.wait()

    def join(self, engine: EngineHandle) -> None:
        """Add a guest engine: start it, keep it loaded and supervise it until it leaves."""
        engine.published = self._published
        self._engines[engine.name] = engine
        self._supervised.add(engine.name, self._guarded(engine, self._host(engine)))

    async def _host(self, engine: EngineHandle) -> None:
        await engine.start(self._deadlines.longest_pull)
        self._say(f"{engine.name} has joined, at version {engine.version}")
        if self._loads and engine.name not in self._loading.names:
            self._loading.add(engine.name, self._guarded(engine, engine.keep_loaded()))
        await engine.supervise(self._say)

    async def _guarded(self, engine: EngineHandle, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for an engine; a guest that fails leaves, without ending the run."""
        try:
            await work
        except (RoleError, WireError) as loss:
            if engine.name in self._own:
                raise
            await self.leave(engine.name, str(loss))

    async def drain(self, names: Sequence[str], why: str) -> None:
        """Take engines out of the run: they get no more groups, their tokens are journaled, and other engines continue
        them. Returns when they have ended."""
        engines = [self._engines[name] for name in names if name in self._engines]  # others have gone by themselves
        for engine in engines:
            engine.begin_leaving()
        if engines:
            await self._keep()
            await gather_to_the_end(*(self._let_go(engine, why) for engine in engines))

    async def _let_go(self, engine: EngineHandle, why: str) -> None:
        await engine.give_up()
        await self.leave(engine.name, why)

    async def leave(self, name: str, why: str) -> None:
        """Remove an engine that is gone or as good as gone; others continue its completions from the last journaled
        token."""
        if self._stopped or (engine := self._engines.pop(name, None)) is None:
            return
        self._left[name] = engine
        engine.mark_gone(why)
        self._say(f"{name} has left: {why}")
        for tasks in (self._supervised, self._loading):
            tasks.drop(name)
        await engine.stop(_LEAVE_SECONDS)

    async def supervise(self) -> NoReturn:
        """Replace engines that die.

        Raises:
            RoleDied: one engine of the run's own died more often than `deadlines.engine_restarts`.
        """
        for name in self._engines.keys() - self._supervised.names:
            self._supervised.add(name, self._engines[name].supervise(self._say))
        try:
            await self._supervised.watch()
        finally:
            await self._supervised.close()

    async def stop(self, grace: float) -> None:
        """End all engines; returns when they are gone."""
        self._stopped = True
        await self._supervised.close()
        await gather_to_the_end(*(engine.stop(grace) for engine in self._all))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def generate(self, *requests: GenerateRequest, least: int = 0) -> AsyncIterator[Completion]:
        """Completions from the least-loaded engine with version `least` or newer. Requests passed together start there
        in the same step.

        Raises:
            EngineLost: the engine broke off; it is suspected, unless it was told to abort the requests.
            EngineLied: its results are invalid and must not be kept.
            EngineLeft: it has left the run.
            RefusedRequest: it refused them.
        """
        completions, ids = sum(len(request.seeds) for request in requests), {request.id for request in requests}
        prefixes = {request.id: request.prefixes or (Segment(),) * len(request.seeds) for request in requests}
        name = await self._free_engine(completions)
        engine = self._engines[name]
        try:
            # Versions never fall within a completion: the engine needs the version of the last token, or a newer one.
            stamps = [prefix.stamps for request in requests for prefix in request.prefixes if prefix.stamps]
            if oldest := max(least, max([stamped[-1][0] for stamped in stamps], default=0)):
                await engine.until_it_serves(oldest)
            engine.open |= ids
            async for completion in engine.client.generate(*requests):
                engine.restarts.progressed()
                yield completion.written_by(name, prefixes[completion.request][completion.member])
        except EngineLeft:
            if not engine.lags:
                engine.suspect()  # left with its machine, which is silent or gone
            raise
        except EngineLost as loss:
            if engine.leaving and not isinstance(loss, EngineLied):
                raise EngineLeft(name, loss.how) from None
            if not ids & engine.given_up:
                engine.suspect()
            raise
        finally:
            engine.open -= ids
            engine.given_up -= ids
            self._router.finish(name, completions)
            self._free.set()

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """The log-probabilities of all tokens but the first of each text, by the least-loaded engine.

        Raises:
            EngineLost, RefusedRequest: as for `generate`.
        """
        name = await self._free_engine(len(texts))
        try:
            return await self._engines[name].client.score(texts)
        finally:
            self._router.finish(name, len(texts))
            self._free.set()

    async def _free_engine(self, completions: int) -> str:
        while (name := self._router.start(completions)) is None:
            self._free.clear()  # below: a replacement that is not ready in time has another one by then
            up, limits = bool(self._router.up), self._deadlines
            awaited, seconds = ("free", limits.answer) if up else ("up", max(2 * limits.start, self._patience))
            async with deadline("conductor", f"an engine to be {awaited}", seconds):
                await self._free.wait()
        return name

    @property
    def absence(self) -> str:
        """Why no engine takes requests now, with the reason the last one left; "" while one does."""
        if self._router.up:
            return ""
        last = next(reversed(self._left.values()), None)
        return "; no engine serves" + (f", {last.name} has left: {last.how}" if last is not None else "")

    @property
    def open(self) -> frozenset[str]:
        """Ids of the requests that engines have now."""
        return frozenset(id for engine in self._engines.values() for id in engine.open)

    async def give_up(self, spared: Callable[[str], bool]) -> None:
        """Abort every request except those for which `spared` is true; returns when all are gone. Engines that do not
        reply within a second are skipped."""
        await gather_or_cancel(*(engine.give_up(spared) for engine in self._engines.values()))

    def break_off(self) -> None:
        """End every open request with EngineLost at once."""
        for engine in self._engines.values():
            engine.client.break_off()

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """Tokens of the completions in flight beyond the `known` ones. Engines that do not reply within `patience`
        seconds (None: `deadlines.answer`) are skipped."""
        engines = list(self._engines.values())
        found = await asyncio.gather(*(engine.partials(known, patience) for engine in engines))
        return {
            request: {member: piece.written_by(engine.name) for member, piece in members.items()}
            for engine, theirs in zip(engines, found, strict=True)
            for request, members in theirs.items()
        }

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int) -> None:
        """Let every engine load `version`, which is in the mailbox."""
        self._published = self.roster.step = version
        self._announce(version)
        for engine in self._engines.values():
            engine.publish(version)

    async def keep_loaded(self) -> NoReturn:
        """Keep every engine at the newest published version."""
        self._loads = True
        try:
            for name, engine in self._engines.items():
                self._loading.add(name, self._guarded(engine, engine.keep_loaded()))
            await self._loading.watch()
        finally:
            self._loads = False
            await self._loading.close()

    async def reach(self, version: int) -> None:
        """Return when every engine serves `version` or newer, loading it where necessary."""
        for engine in self._engines.values():
            engine.published = max(engine.published, version)
        # One that joins has the newest version before it gets requests.
        serving = [engine for name, engine in self._engines.items() if engine.serves or name in self._own]
        await gather_or_cancel(*(self._guarded(engine, engine.reach(version)) for engine in serving))

    # ── counters ─────────────────────────────────────────────────────────────────────────────────

    async def poll(self, patience: float | None = None) -> list[Span]:
        """Update the counters (`counted`) of every engine and return its spans. An engine that does not reply within
        `patience` seconds (None: `deadlines.answer`) keeps its last counters."""
        for engine in self._engines.values():
            engine.notice_lag(self._lag, self._say)
        if polls := [engine.poll() for engine in self._engines.values() if engine.state is EngineState.UP]:
            await asyncio.wait(polls, timeout=patience)
        return [span for engine in self._all for span in engine.drain_spans()]

    @property
    def _all(self) -> list[EngineHandle]:
        return [*self._left.values(), *self._engines.values()]

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """Sum of a counter over all engines, including dead and departed ones, as of their last poll."""
        return sum(engine.counted(counter) for engine in self._all)

    def pressure(self) -> Pressure | None:
        """Load of the engines that take groups, as of their last poll, and completions preempted since the last call;
        None before any has reported."""
        before, self._preempted = self._preempted, self.counted(lambda health: health.preempted)
        told = [one.health.needed for one in self._engines.values() if one.takes and one.health is not None]
        return Pressure(max(told), round(self._preempted - before), len(told)) if told else None

    def busy(self) -> dict[str, float]:
        """Busy seconds by engine, including its earlier processes."""
        return {engine.name: engine.counted(lambda health: health.busy_seconds) for engine in self._all}

    def generated(self) -> dict[str, int]:
        """Generated tokens by engine, including its earlier processes, as of the last poll."""
        return {engine.name: round(engine.counted(lambda health: health.generated)) for engine in self._all}

    def resident(self) -> dict[str, int]:
        """Resident memory in bytes by engine that is up, as of the last poll."""
        return {name: one.health.resident for name, one in self._engines.items() if one.health is not None}
