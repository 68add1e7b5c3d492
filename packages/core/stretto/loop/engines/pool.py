"""The pool of a run's engines. Engines may join and leave while the run goes on.

EnginePool.generate(...)     sends requests to the engine with the fewest completions in flight
EnginePool.publish(version)  every engine loads the version as soon as it can; `live` is the oldest version served
EnginePool.supervise()       an engine that dies is replaced, loads the newest version, and gets requests again
EnginePool.join, drain       an engine is added; an engine is removed, and others continue its completions

The run starts some engines itself, its *own* ones: if such an engine cannot be replaced, the run ends. A *guest* is an
engine on a machine that has joined: if a guest fails, it leaves the pool, and the run goes on.
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
from stretto.core.errors import (
    DeadlineExceeded,
    EngineLeft,
    EngineLied,
    EngineLost,
    RoleDied,
    RoleError,
    RoleFailed,
    UnprovenWeights,
    WireError,
)
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials, Segment
from stretto.core.tasks import NamedTasks, gather_or_cancel, gather_to_the_end
from stretto.engine.wire import ENGINE_ROLE, EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.proving import Proving
from stretto.loop.engines.roster import Roster
from stretto.loop.engines.router import Router
from stretto.loop.engines.state import EngineState, silent
from stretto.processes.channel import users_mistake
from stretto.processes.spawn import FRESH, Spawner
from stretto.rollout.adaptive import Pressure

_LEAVE_SECONDS = 1.0  # between SIGTERM and SIGKILL of an engine that leaves


class EnginePool:
    """Sends requests to a run's engines, keeps them at the newest version, and replaces those that die."""

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
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the pool of the run's own engines; `start` starts their processes.

        Args:
            specs: one for each engine.
            logs, role: folder for the logs of their processes; module that an engine's process runs.
            load_interval: least seconds between two loads of new weights (`engine.load_interval`).
            router: chooses the engine for a request; default: the least loaded.
            lag: seconds that an engine may take to load a published version; a slower one gets no requests and does not
                count for `live` until it has loaded it.
            kind: make of the engines, for the roster: native, vllm or sglang.
            patience: least seconds that a request waits while no engine is up; machines may still join.
            proving: checks the weights that engines load; None: they are not checked.
            say: gets a log line for every engine that is replaced, joins or leaves.
        """
        self.proving = proving or Proving()
        self.proving.distrust = self._distrust
        begin = partial(EngineHandle.on_this_machine, proving=self.proving, load_interval=load_interval)
        self._engines = {spec.name: begin(spec, logs, deadlines, role, spawner, self.changed) for spec in specs}
        for engine in self._engines.values():
            engine.publications.follow(lambda: self.live, lambda: self._reached)
        self._own = frozenset(self._engines)
        self._left: dict[str, EngineHandle] = {}  # engines that have left, kept for their counters
        self._counted: dict[str, int] = {}  # version of each engine that counts for `live`
        self._versions: Counter[int] = Counter()  # number of those engines by version
        self._deadlines, self._lag, self._patience, self._say = deadlines, lag, patience, say
        self.published = self._reached = -1  # newest version in the mailbox; newest that was ever live
        self.on_load: Callable[[int], None] = lambda version: None  #: gets `live` whenever it may have changed
        self.keep: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)  #: journals what is in flight at a leaver
        self.bound: Callable[[], float] = lambda: 0.0  #: returns the staleness bound of groups admitted now
        self.announce: Callable[[int], None] = lambda version: None  #: tells other machines each published version
        self._preempted = 0.0  # completions preempted until the last call of `pressure`
        self._router = router or Router()
        self._kind, self.roster = kind, Roster()
        self._free, self._supervised, self._loading = asyncio.Event(), NamedTasks(), NamedTasks()
        self._loads = self._stopped = False  # `keep_loaded` runs

    @property
    def names(self) -> list[str]:
        """Names of the engines in order of arrival, including those that start and excluding those that leave."""
        return [name for name, engine in self._engines.items() if not engine.leaving]

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each engine by its name: where its process listens, or will."""
        return {name: engine.spec.address for name, engine in self._engines.items()}

    def engine(self, name: str) -> EngineHandle:
        """The engine with this name, which must be in the pool, for a caller that sends it requests of its own."""
        return self._engines[name]

    async def suspect_silent(self) -> None:
        """Ask the engines that take requests; mark those that do not reply (`silent`), which `supervise` replaces."""
        asked = {name: engine.client for name, engine in self._engines.items() if engine.takes}
        for name in await silent(asked, self._deadlines) & self._engines.keys():
            self._engines[name].suspect()

    def has(self, name: str) -> bool:
        """Whether the engine with this name is in the pool, started or not."""
        return name in self._engines

    @property
    def live(self) -> int:
        """The oldest version that an engine serves; -1 if none serves one. Engines that are being replaced, lag or
        leave do not count: they get no requests until they serve this version or a newer one."""
        return min(self._versions, default=-1)

    def changed(self, engine: EngineHandle) -> None:
        """Take note of a changed state or version of `engine`, for requests, `live` and the roster. Every handle of the
        pool calls this."""
        self._count(engine.name, engine.version if engine.counts else None)
        self._reached, before = max(self._reached, self.live), self._reached
        for one in [engine] if self._reached == before else [engine, *self._engines.values()]:
            if (up := one.takes) != self._router.gives(one.name):
                (self._router.join if up else self._router.leave)(one.name)
        if engine.version is not None:
            self.roster.serves(engine.name, self._kind, engine.host, engine.version)
        elif engine.state is EngineState.DOWN:
            self.roster.left(engine.name, engine.how)
        self._free.set()
        self.on_load(self.live)  # also grows when the engine with the oldest version dies

    def _distrust(self, doubt: UnprovenWeights, final: bool) -> None:
        self._say(f"{doubt.role} {doubt.problem}" + ("" if final else ": it is replaced"))
        if (engine := self._engines.get(doubt.role)) is not None:
            engine.end_for(doubt if final else None)

    def _count(self, name: str, version: int | None) -> None:
        """Count the engine `name` for `live` under `version`; None: count it no longer. Must not loop over all engines:
        with hundreds of engines, each calls this for each version."""
        if (before := self._counted.pop(name, None)) is not None:
            self._versions[before] -= 1
            if not self._versions[before]:
                del self._versions[before]
        if version is not None:
            self._counted[name] = version
            self._versions[version] += 1

    # ── start, joins, ends ───────────────────────────────────────────────────────────────────────

    async def start(self, version: int) -> None:
        """Publish `version`, and start the run's own engines; returns when each serves it or a later publication.
        Guests may have joined before. An engine that is killed meanwhile, or hangs, is replaced.

        Raises:
            RoleDied: an engine ended by itself, or was replaced more often than `deadlines.engine_restarts`.
            RoleFailed: an engine ended because of a user's mistake.
            UnprovenWeights, WireError: as `EngineHandle.start`.
        """
        self.publish(version)
        await gather_or_cancel(*(self._start(engine) for name, engine in self._engines.items() if name in self._own))

    async def _start(self, engine: EngineHandle) -> None:
        try:
            await engine.start(engine.spec.publication_seconds, self._say)
            return
        except RoleDied as death:
            if engine.leaving:
                return
            if not engine.process.killed:
                raise users_mistake(death) or death from None
            how = death.how
        except DeadlineExceeded as late:
            await engine.process.stop(0.0)
            how = str(late)
        await engine.replace(how, self._say, engine.spec.publication_seconds)

    async def until_up(self, seconds: float) -> None:
        """Wait until an engine takes requests. Raises DeadlineExceeded if none does within `seconds`."""
        async with deadline("conductor", "an engine to join", seconds):
            while not self._router.up:
                self._free.clear()
                await self._free.wait()

    def join(self, engine: EngineHandle) -> None:
        """Add a guest engine, and return at once. Background tasks start it, keep it at the newest version while
        `keep_loaded` runs, and replace its process when it dies, until it leaves."""
        engine.publications.newest = self.published
        engine.publications.follow(lambda: self.live, lambda: self._reached, lambda: self.bound())
        self._engines[engine.name] = engine
        self._supervised.add(engine.name, self._guarded(engine, self._host(engine)))

    async def _host(self, engine: EngineHandle) -> None:
        await engine.start(self._deadlines.longest_pull, self._say)
        self._say(f"{engine.name} has joined, at version {engine.version}")
        if self._loads and engine.name not in self._loading.names:
            self._loading.add(engine.name, self._guarded(engine, engine.keep_loaded()))
        await engine.supervise(self._say)

    async def _guarded(self, engine: EngineHandle, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` for an engine. If it fails (RoleError, WireError), a guest leaves the pool, and this returns;
        for one of the run's own engines the error is raised."""
        try:
            await work
        except (RoleError, WireError) as loss:
            if engine.name in self._own:
                raise
            await self.leave(engine.name, str(loss))

    async def drain(self, names: Sequence[str], why: str) -> None:
        """Remove those of the engines `names` that are in the pool from the run: they get no more requests, others
        continue from their journaled tokens. Returns when the engines have ended. `why`: the reason, for the log."""
        engines = [self._engines[name] for name in names if name in self._engines]  # the rest have left already
        for engine in engines:
            engine.begin_leaving()
        if engines:
            await self.keep()
            await gather_to_the_end(*(self._let_go(engine, why) for engine in engines))

    async def _let_go(self, engine: EngineHandle, why: str) -> None:
        await engine.give_up()
        await self.leave(engine.name, why)

    async def leave(self, name: str, why: str) -> None:
        """Remove the engine `name`, which is gone, and end its process, which is killed after a second. Other engines
        continue its completions from the last journaled token. `why`: the reason, for the log. Does nothing if the
        engine is not in the pool, or the pool was stopped."""
        if self._stopped or (engine := self._engines.pop(name, None)) is None:
            return
        self._left[name] = engine
        engine.mark_gone(why)
        self._say(f"{name} has left: {why}")
        for tasks in (self._supervised, self._loading):
            tasks.drop(name)
        await engine.stop(_LEAVE_SECONDS)

    async def supervise(self) -> NoReturn:
        """Replace engines that die, guests too, until an error ends the run or this is cancelled. The errors are those
        of the run's own engines; a guest that fails leaves.

        Raises:
            RoleDied: an engine used up its restart budget (`deadlines.engine_restarts`).
            UnprovenWeights: an engine failed the proof of its weights again after it was replaced.
            WireError: the newest version is damaged, or not of the engine's model.
        """
        for name in self._engines.keys() - self._supervised.names:
            self._supervised.add(name, self._engines[name].supervise(self._say))
        try:
            await self._supervised.watch()
        finally:
            await self._supervised.close()

    async def stop(self, grace: float) -> None:
        """End all engines; returns when they are gone. `grace`: seconds between SIGTERM and SIGKILL."""
        self._stopped = True
        await self._supervised.close()
        await gather_to_the_end(*(engine.stop(grace) for engine in self._all))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def generate(self, *requests: GenerateRequest, least: int = 0) -> AsyncIterator[Completion]:
        """Wait for an engine, send the requests to the least-loaded one and yield their completions as they end.

        The requests start in the same step of that engine. If it serves an older version than `least`, or than the one
        that sampled the newest prefix token, it is waited for until it has loaded that.

        Raises:
            EngineLost: it broke off or was silent for `deadlines.answer` (then suspected), or failed (then replaced).
            EngineLied: the engine's results are invalid and must not be kept; it is replaced.
            EngineLeft: the engine has left the run, or stopped taking requests before these were sent.
            RefusedRequest: the engine refused the requests.
            DeadlineExceeded: no engine became free within `deadlines.answer`, or none was up for twice
                `deadlines.start` (for `patience`, if that is longer).
        """
        completions, ids = sum(len(request.seeds) for request in requests), {request.id for request in requests}
        prefixes = {request.id: request.prefixes or (Segment(),) * len(request.seeds) for request in requests}
        # Versions never fall within a completion: the engine needs the version of the last token, or a newer one.
        stamps = [prefix.stamps for request in requests for prefix in request.prefixes if prefix.stamps]
        least = max(least, max([stamped[-1][0] for stamped in stamps], default=0))
        name = await self._free_engine(completions, least)
        engine = self._engines[name]
        engine.open |= ids  # also while it waits: the end of a run aborts what is open, and nothing is sent behind it
        try:
            if (oldest := max(least, engine.publications.promised)) > 0:
                await engine.until_it_serves(oldest)
            async for completion in engine.client.generate(*requests):
                engine.restarts.progressed()
                engine.counters.delivered()
                yield completion.written_by(name, prefixes[completion.request][completion.member])
        except EngineLeft:
            if not engine.lags:
                engine.suspect()  # its machine is silent or gone
            raise
        except DeadlineExceeded as late:  # its event loop hangs, say, and its heartbeats go on
            engine.suspect(ids, how := f"is silent: {late}")
            raise EngineLost(name, how) from None
        except RoleFailed as failure:
            engine.discard(RoleFailed(name, f"failed at a request: {failure.problem}", 1))
            raise EngineLost(name, failure.problem) from None
        except EngineLied as lie:  # a machine with broken memory, say, would go on answering
            if engine.condemn():
                self._say(f"{lie}: it is replaced")
            raise
        except EngineLost as loss:
            if engine.leaving:
                raise EngineLeft(name, loss.how) from None
            if not ids & engine.given_up:
                engine.suspect(ids, loss.how)
            raise
        finally:
            engine.open -= ids
            engine.counters.awaited -= ids
            engine.given_up -= ids
            self._router.finish(name, completions)
            self._free.set()

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Compute the log-probabilities of the tokens of `texts` (token ids of each) on the least-loaded engine.
        Returns for each text one number per token but the first. A version that it has promised is waited for. Raises
        RefusedRequest if a text is empty, longer than the context, or has tokens outside the vocabulary; else as
        `generate`."""
        name = await self._free_engine(len(texts))
        try:
            await (engine := self._engines[name]).until_it_serves(engine.publications.promised)
            return await engine.client.score(texts)
        finally:
            self._router.finish(name, len(texts))
            self._free.set()

    async def _free_engine(self, completions: int, least: int = 0) -> str:
        engines = self._engines.items()
        while (name := self._router.start(completions, [name for name, one in engines if one.behind(least)])) is None:
            self._free.clear()  # below: twice `start`, since a replacement that is not ready in time is replaced again
            up, limits = bool(self._router.up), self._deadlines
            awaited, seconds = ("free", limits.answer) if up else ("up", max(2 * limits.start, self._patience))
            async with deadline("conductor", f"an engine to be {awaited}", seconds):
                await self._free.wait()
        return name

    @property
    def absence(self) -> str:
        """Words to append to a message while no engine takes requests ("; no engine serves", and why the last one
        left); "" while one does."""
        if self._router.up:
            return ""
        last = next(reversed(self._left.values()), None)
        return "; no engine serves" + (f", {last.name} has left: {last.how}" if last is not None else "")

    @property
    def open(self) -> frozenset[str]:
        """Ids of the requests that engines have now."""
        return frozenset(id for engine in self._engines.values() for id in engine.open)

    async def give_up(self, spared: Callable[[str], bool]) -> None:
        """Abort the open requests of all engines. `spared`: takes a request id; True: the request is left alone.
        Returns when the others have ended. Engines that do not reply within a second are skipped."""
        await gather_or_cancel(*(engine.give_up(spared) for engine in self._engines.values()))

    def break_off(self) -> None:
        """End every open request with EngineLost at once, without asking the engines."""
        for engine in self._engines.values():
            engine.client.break_off()

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """Fetch the new tokens of the completions in flight, by request id and member. `known`: number of tokens
        already known of each member, by request id; other requests are left out. `patience`: seconds to wait for an
        engine (None: `deadlines.answer`); engines that are slower, or lost, are left out."""
        engines = list(self._engines.values())
        found = await asyncio.gather(*(engine.partials(known, patience, self._say) for engine in engines))
        return {
            request: {member: piece.written_by(engine.name) for member, piece in members.items()}
            for engine, theirs in zip(engines, found, strict=True)
            for request, members in theirs.items()
        }

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int) -> None:
        """Announce `version`, the newest in the mailbox now: every engine loads it soon, while `keep_loaded` runs."""
        self.published = self.roster.step = version
        self.announce(version)
        for engine in self._engines.values():
            engine.publish(version)

    async def keep_loaded(self) -> NoReturn:
        """Make every engine load each newly published version; runs until it is cancelled, or fails as
        `EngineHandle.keep_loaded` of one of the run's own engines."""
        self._loads = True
        try:
            for name, engine in self._engines.items():
                self._loading.add(name, self._guarded(engine, engine.keep_loaded()))
            await self._loading.watch()
        finally:
            self._loads = False
            await self._loading.close()

    async def reach(self, version: int) -> None:
        """Make every engine load `version`, and return when all serve it or a newer one. Guests that still join, which
        load the newest before they get requests, are not waited for, and one that fails leaves the run. Raises the
        errors of `EngineHandle.reach` for the run's own engines."""
        for engine in self._engines.values():
            engine.publications.newest = max(engine.publications.newest, version)
        serving = [engine for name, engine in self._engines.items() if engine.serves or name in self._own]
        await gather_or_cancel(*(self._guarded(engine, engine.reach(version)) for engine in serving))

    # ── counters ─────────────────────────────────────────────────────────────────────────────────

    async def poll(self, patience: float | None = None) -> list[Span]:
        """Update the counters (`counted`) of every engine that is UP, and return the time spans of all engines since
        the last call. Also marks engines that lag (`EngineHandle.notice`). An engine that does not reply within
        `patience` seconds keeps its last counters. None: it has `deadlines.answer`, and its counters are of no earlier
        moment than this call."""
        for engine in self._engines.values():
            engine.notice(self._lag, self._say)
        up = (engine for engine in self._engines.values() if engine.state is EngineState.UP)
        if polls := [engine.counters.poll(anew=patience is None) for engine in up]:
            await asyncio.wait(polls, timeout=patience)
        return [span for engine in self._all for span in engine.counters.drain_spans()]

    @property
    def _all(self) -> list[EngineHandle]:
        return [*self._left.values(), *self._engines.values()]

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """Sum of a counter over all engines and their earlier processes, including engines that have left, as of the
        last poll. `counter`: returns it from a health reply."""
        return sum(engine.counters.total(counter) for engine in self._all)

    def pressure(self) -> Pressure | None:
        """Load of the fullest engine that takes requests, as of the last poll, with the number of these engines and of
        completions preempted since the last call; None while none of these engines has replied to a poll."""
        before, self._preempted = self._preempted, self.counted(lambda health: health.preempted)
        counters = [one.counters.health for one in self._engines.values() if one.takes]
        told = [health.needed for health in counters if health is not None]
        return Pressure(max(told), round(self._preempted - before), len(told)) if told else None

    @property
    def left(self) -> frozenset[str]:
        """Names of the engines that have left and not come back."""
        return frozenset(self._left.keys() - self._engines.keys())

    def shares(self) -> dict[str, float]:
        """Newest distance from the trainer by engine of the pool, as a share of its tolerance; above 1: refused."""
        return {name: share for name, share in self.proving.shares().items() if name in self._engines}

    def busy(self) -> dict[str, float]:
        """Busy seconds by engine, including its earlier processes and engines that have left, as of the last poll."""
        return {engine.name: engine.counters.total(lambda health: health.busy_seconds) for engine in self._all}

    def generated(self) -> dict[str, int]:
        """Generated tokens by engine, earlier processes and engines that have left included, as of the last poll."""
        return {engine.name: round(engine.counters.total(lambda health: health.generated)) for engine in self._all}

    def pids(self) -> dict[str, Sequence[int]]:
        """Process ids on this machine by engine of the pool."""
        return {name: engine.process.pids for name, engine in self._engines.items()}

    def resident(self) -> dict[str, int]:
        """Resident memory in bytes by engine of the pool that has replied, as of the last poll."""
        return {name: now.resident for name, one in self._engines.items() if (now := one.counters.health) is not None}
