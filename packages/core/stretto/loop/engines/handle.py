"""The conductor's view of one engine: its process (replaced when it dies), version and requests."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import NoReturn, Self

from stretto.core.deadlines import standstill
from stretto.core.engine import Engine
from stretto.core.errors import (
    DeadlineExceeded,
    EngineLeft,
    EngineLied,
    EngineLost,
    RoleDied,
    RoleFailed,
    UnprovenWeights,
    WireError,
)
from stretto.core.machine import on_gpus
from stretto.core.records import Partials
from stretto.core.tasks import gather_or_cancel
from stretto.engine.http.client import HttpEngine, one_line
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.proving import Proving
from stretto.loop.engines.router import LOSSES
from stretto.loop.engines.state import EngineCounters, EngineState, Publications
from stretto.processes.role import ReplaceableProcess, RoleProcess
from stretto.processes.spawn import Spawner
from stretto.processes.supervisor import RestartBudget, Supervisor

RETRY_SECONDS = 0.05
_POLL_SECONDS, _GIVE_UP_SECONDS = 0.005, 1.0
_OVERTAKEN = 3  # loads of an engine that starts, each of a version that is not the newest any more at its end


@dataclass
class EngineHandle:
    """One engine of the pool. The handle stays the same when the engine's process is replaced. `load_interval`, an
    argument only: least seconds between two loads of new weights (`engine.load_interval`).

    Attributes:
        client: sends requests to the engine, over HTTP.
        restarts: how often the process may still be replaced.
        changed: called with this handle when `state`, `version` or `lags` has changed.
        proving: checks the weights of each version that the engine loads.
        host: name of the engine's machine.
        state: changed only by methods of this class.
        version: version that the engine serves; None while it is down or starting.
        how: how its last process ended, for messages; empty before the first end.
        publications: published versions that the engine has yet to load.
        counters: its counters and time spans, over all of its processes.
        open: ids of the requests that the engine has now, or gets once it serves their version; the pool adds and
            removes them. given_up: those of them that the engine was asked to abort.
        leaving: the engine leaves the run, or has left. lags: it gets no requests until it has the newest version.
    """

    spec: EngineSpec
    process: ReplaceableProcess
    client: Engine
    deadlines: DeadlinesConfig
    restarts: RestartBudget
    changed: Callable[[EngineHandle], None]
    proving: Proving
    load_interval: InitVar[float] = 0.0
    host: str = field(default_factory=platform.node)
    state: EngineState = EngineState.DOWN
    version: int | None = None
    how: str = ""
    open: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)  # open requests that the engine was asked to abort
    leaving: bool = False  # the engine leaves the run, or has left
    lags: bool = False  # too long without the newest version: gets no requests until it has loaded it
    _suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    _broken_off: set[str] = field(default_factory=set)  # requests that the suspected engine may still have
    _doubt: UnprovenWeights | None = None  # set: the engine is not replaced, and this error ends the run
    _condemned: bool = False  # its process is to end, and gets no requests until it has ended
    _why: str = ""  # appended to how its process ended
    _untold: bool = False  # it has failed to tell tokens in flight, which was said
    publications: Publications = field(init=False)
    counters: EngineCounters = field(init=False)

    def __post_init__(self, load_interval: float) -> None:
        self.publications = Publications(load_interval)
        self.counters = EngineCounters(self.name, self.client, self.process)

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
        """Return the handle of an engine on this machine, without starting its process. `logs`: folder of the log; the
        file is named after the engine. `role`: module that the process runs. `spawner`: starts the process. `changed`,
        `proving`: attributes of the handle. `load_interval`: least seconds between two loads of new weights."""
        log, own = logs / f"{spec.name}.txt", on_gpus(spec.gpus)
        process = RoleProcess(spec.name, role, log, deadlines.hung, spawner, own)
        answer, load = deadlines.answer, deadlines.load  # a health request also waits for the current, long step
        client = HttpEngine(spec.name, spec.address, answer_seconds=answer, load_seconds=load, health_seconds=answer)
        restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
        return cls(spec, process, client, deadlines, restarts, changed, proving, load_interval)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def serves(self) -> bool:
        """Whether the engine serves a version, so that it can also load a newer one."""
        return self.state in (EngineState.UP, EngineState.SUSPECTED)

    @property
    def counts(self) -> bool:
        """Whether the version of this engine counts for `EnginePool.live`, the oldest version that is served."""
        return self.serves and not self.lags

    @property
    def takes(self) -> bool:
        """Whether the engine may get new requests."""
        return self._takes(self.publications.reached())

    def _takes(self, version: int) -> bool:
        """Whether the engine may get requests that `version` or a newer one is to sample: it is UP, and, if it lags,
        has promised to serve such a version soon; they wait for that (`until_it_serves`)."""
        return self.state is EngineState.UP and not self.behind(max(0, version))

    def behind(self, version: int) -> bool:
        """Whether the engine lags and has not promised to serve `version` or a newer one."""
        return self.lags and self.publications.promised < version

    def _becomes(self, state: EngineState, version: int | None) -> None:
        if self.leaving and state is not EngineState.DOWN:
            state = EngineState.LEAVING
        self.state, self.version = state, version
        self.publications.serves(version)
        self.lags = self.lags and self.publications.missing
        self.changed(self)

    def begin_leaving(self) -> None:
        """Mark the engine as leaving: it gets no new requests; its open requests continue."""
        self.leaving = True
        self._becomes(EngineState.LEAVING, self.version)

    def mark_gone(self, why: str) -> None:
        """Mark the engine as gone from the run; its process is not ended here. Its open requests end with EngineLost;
        its counters are kept. `why`: the reason, for messages."""
        self.leaving, self.how = True, why
        self.counters.retire()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()

    def notice(self, seconds: float, say: Callable[[str], None]) -> None:
        """Condemn the engine if it told nonsense about itself. Set `lags` if it has not loaded a version within
        `seconds` (plus the load interval) of its publication; then it gets no requests and does not count for
        `EnginePool.live`, so that it does not hold up admission, until it has loaded the newest version. `say` gets a
        log line for each."""
        if (lie := self.counters.lie) is not None and self.serves and self.condemn():
            say(f"{lie}: it is replaced")
        awaited = self.counts or self.publications.promised >= 0 or self.publications.waits
        if awaited and (late := self.publications.late(seconds)) is not None:
            self.lags = True
            self.publications.breaks()
            say(f"{self.name} has not loaded version {late} in {seconds:g} s: no groups until it has caught up")
            self.changed(self)

    # ── its process ──────────────────────────────────────────────────────────────────────────────

    async def start(self, publication_seconds: float = 0.0, say: Callable[[str], None] = lambda text: None) -> None:
        """Start the engine's process; returns when it serves a version that `Publications.suffices`. After an error
        the process may still run. `publication_seconds`: how long to wait for the first publication, in addition to
        `deadlines.start`. `say`: gets a log line if the engine loads versions more slowly than they are published.

        Raises:
            RoleDied: the process ended, by itself or because its weights were not proven.
            UnprovenWeights: its weights were not proven, nor were those of the process before it.
            WireError: the newest version is damaged, or not of this model.
            DeadlineExceeded: it loaded nothing further for `deadlines.start` plus `publication_seconds`.
        """
        self._becomes(EngineState.STARTING, None)
        await self.process.start(self.spec, self.spec.threads)
        seconds, checked = self.deadlines.start + publication_seconds, None

        async def moved() -> object:  # before it listens, only its process shows that it loads its model
            nonlocal checked
            told = await self.client.moved()
            checked = checked if told is None else told
            return self.process.loaded(), checked

        while True:
            async with standstill("conductor", f"{self.name} to be ready", seconds, moved):
                version = await self._newest(say)
            if self.publications.suffices(version):  # others may have loaded a newer one while the wait ended
                break
        self.publications.loaded(version)
        self.publications.publish(self.publications.newest, version)  # others may have been published meanwhile
        self.lags = version < self.publications.reached()
        self._becomes(EngineState.UP, version)

    def suspect(self, broken_off: Collection[str] = (), why: str = "") -> None:
        """Mark the engine as suspected if it is UP, after requests broke off (`broken_off`: their ids). It gets no new
        requests until it has aborted these, or is replaced (both by `supervise`). `why`: what it did, if that was its
        own fault; the third time in a row (`EngineCounters.broke_off`) it is replaced, with this as the reason."""
        if self.serves:  # else they ended with its process, and the next one may get them again
            self._broken_off.update(broken_off)
        if self.state is EngineState.UP:
            self._becomes(EngineState.SUSPECTED, self.version)
            self._suspicion.set()
            if why and self.counters.broke_off(self.open) == LOSSES:
                self.discard(RoleFailed(self.name, f"{one_line(why)}, {LOSSES} times in a row", 1))

    async def supervise(self, say: Callable[[str], None]) -> NoReturn:
        """Replace the engine's process whenever it ends, unless the engine is leaving, and kill a suspected one that
        stays silent; runs until it raises or is cancelled. `say` gets a log line for each replacement. Raises RoleDied,
        UnprovenWeights or WireError, as `replace`."""
        await gather_or_cancel(self._replace_when_it_ends(say), self._reinstate())
        raise AssertionError("a watcher never ends by itself")

    async def _replace_when_it_ends(self, say: Callable[[str], None]) -> NoReturn:
        while True:
            how = await self.process.ended()
            if self.leaving:  # nothing is to be replaced, and the end would be told again at once, without an end
                await asyncio.get_running_loop().create_future()  # until the pool drops this engine
            await self.replace(how + self._why, say)

    async def replace(self, how: str, say: Callable[[str], None], publication_seconds: float = 0.0) -> None:
        """Start a new process after the engine's process has ended; returns when it serves the newest version. Does
        nothing if the engine is leaving. `how`: how the process ended, for the log. `say`: gets a log line for each
        start. `publication_seconds`: seconds that each start may take beyond `deadlines.start`.

        Raises:
            RoleDied: the process died more often than `deadlines.engine_restarts` allows.
            UnprovenWeights, WireError: as `start`; the first also for sampled tokens that disagreed again.
        """

        async def start() -> None:
            if self.leaving:
                return
            try:
                await self.start(publication_seconds, say)
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
        """Record that the process has ended: its open requests end with EngineLost. Raises UnprovenWeights if the
        engine must not be replaced."""
        self.how, self._condemned, self._why = how, False, ""
        self._broken_off.clear()
        self.counters.retire()
        self._becomes(EngineState.DOWN, None)
        self.client.break_off()  # a connection to another machine stays open until its end is noticed
        if self._doubt is not None:
            raise self._doubt

    async def _reinstate(self) -> NoReturn:
        """Whenever the engine is suspected, bring it back to UP once it has aborted what broke off: with a network
        between, it may not have noticed, and would refuse these requests as open. Kill it, so that it is replaced, if
        it has not replied within `deadlines.hung` seconds."""
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
                await self.client.abort(gone := [*self._broken_off])
                self._broken_off.difference_update(gone)
                if self._condemned:
                    self.process.kill()
                elif not self._broken_off and self.state is EngineState.SUSPECTED:
                    self._becomes(EngineState.UP, self.version)
                    self.publications.look_again()  # a version may have been published meanwhile

    async def stop(self, grace: float) -> None:
        """Close the client and end the engine's process; returns when it is gone. `grace`: seconds between SIGTERM and
        SIGKILL."""
        await self.counters.close()
        await self.client.close()
        await self.process.stop(grace)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int) -> None:
        """Note that `version` is the newest in the mailbox now, which wakes `keep_loaded`."""
        self.publications.publish(version, self.version)

    async def keep_loaded(self) -> NoReturn:
        """Load newly published versions, always the newest, until this raises or is cancelled. While the engine has
        requests, loads are `load_interval` seconds apart, unless a request waits for a version. One that lags and keeps
        up (`Publications.keeps_up`) begins to load as a version is published. An engine that breaks off becomes
        suspected; one whose load stands still, fails or is not proven, is replaced. Raises UnprovenWeights if the next
        is not proven either, WireError for an unusable version."""
        while True:
            await self.publications.news(self.open)
            version = self.publications.newest
            if self.version is None or self.version >= version:
                continue
            if self.lags:
                self.publications.begins(version)
                self.changed(self)
            try:
                await self._load(version)
                if self.lags:
                    await self.publications.next()
            except WireError:
                if self.publications.newest == version:
                    raise  # else the mailbox holds a newer version by now

    async def _load(self, version: int) -> None:
        try:
            version = await self.proving.load(self.spec, self.client, version)
        except EngineLost as loss:
            self.suspect(why=loss.how)  # the engine comes back with the newest version, by itself or replaced
        except DeadlineExceeded as late:  # its event loop hangs, say, and its heartbeats go on
            self._end_hung(late)
        except RoleFailed as failure:
            self.discard(failure)
        else:
            self.publications.loaded(version)
            self.counters.delivered()
            if self.serves:  # else it has been replaced meanwhile
                self._becomes(self.state, version)

    def _end_hung(self, late: DeadlineExceeded) -> None:
        """Kill the engine's process, which `supervise` replaces, because of `late`. Does nothing if it serves no more:
        its replacement has deadlines of its own."""
        if self.serves:
            self._why = f" ({late})"
            self.condemn()
            self.process.kill()

    def discard(self, failure: RoleFailed) -> None:
        """Kill the engine's process after a request or loads that failed, or loads that were not proven (`failure`), so
        that it is replaced. If those before were not proven either, raises `failure` instead, and kills nothing."""
        if isinstance(failure, UnprovenWeights) and self.proving.doubts(self.name):
            raise failure
        self._why = f" ({failure.problem})"
        self.end_for()

    def end_for(self, doubt: UnprovenWeights | None = None) -> None:
        """Kill the engine's process. `supervise` replaces it, or raises `doubt`, which names what is wrong with its
        weights, if there is one."""
        self._doubt = doubt or self._doubt
        self.condemn()
        self.process.kill()

    def condemn(self) -> bool:
        """Give the engine no requests until its process has ended: by itself, or killed by `supervise` once it answers
        again. (An order to kill it does not reach a machine that is silent.) Returns False if that was so already."""
        before, self._condemned = self._condemned, True
        self.suspect()
        return not before

    async def _newest(self, say: Callable[[str], None]) -> int:
        """Make a started engine load the newest published version, or keep its own if that is newer; returns the
        version once it `Publications.suffices`. An engine that cannot be reached is tried again as long as its process
        runs. Raises as `start`, without a deadline of its own."""
        loads, clock = 0, asyncio.get_running_loop().time
        while True:
            if not self.process.running:
                raise RoleDied(self.name, await self.process.ended(), str(self.process.log))
            wanted, began = self.publications.newest, clock()
            try:
                served = (await self.client.health()).version
                version = await self.proving.load(self.spec, self.client, max(wanted, served), served)
            except EngineLied as lie:
                raise WireError(str(lie)) from None
            except EngineLost:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except RoleFailed as failure:
                self.discard(failure)
                raise RoleDied(self.name, f"{await self.process.ended()}: {failure.problem}") from None
            except WireError:
                if self.publications.newest == wanted:
                    raise
                continue  # the mailbox holds a newer version by now
            if self.publications.suffices(version):
                return version
            loads += 1
            if loads == _OVERTAKEN:
                say(f"{self.name} {self.publications.told(version, clock() - began)}: no groups until it has caught up")

    async def reach(self, version: int) -> None:
        """Load `version` if the engine serves an older one; returns when it serves `version` or newer, or is leaving.
        An engine that is down is waited for, and one without a sign of life for `deadlines.start` seconds is replaced:
        `supervise` must run.

        Raises:
            DeadlineExceeded: it was to end for such a reason, and has not ended `deadlines.start` seconds later.
            UnprovenWeights: its weights were not proven, nor were those of the process before it.
            WireError: the version is damaged, or not of this model.
        """
        seconds, moved = self.deadlines.start, self.client.moved
        while (self.version is None or self.version < version) and not self.leaving:
            try:
                async with standstill("conductor", f"{self.name} to serve version {version}", seconds, moved):
                    while (self.version is None or self.version < version) and not self.leaving:
                        # An engine that is not UP is brought back by supervise(), with the newest version.
                        await (self._load(version) if self.state is EngineState.UP else asyncio.sleep(RETRY_SECONDS))
            except DeadlineExceeded as late:
                if self._condemned:
                    raise
                self._end_hung(late)

    async def until_it_serves(self, version: int) -> None:
        """Wait until the engine serves `version` or newer; returns at once if it does. Meanwhile `keep_loaded`, which
        must run, does not wait for `load_interval`.

        Raises:
            EngineLeft: the engine no longer takes requests.
            EngineLost: no sign of life for `deadlines.start` seconds.
        """
        awaited, seconds, moved = f"{self.name} to serve version {version}", self.deadlines.start, self.client.moved
        with self.publications.awaited():
            try:
                async with standstill("conductor", awaited, seconds, moved):
                    while self.version is None or self.version < version:
                        if not self._takes(version):
                            raise EngineLeft(self.name, "is not up any more")
                        await asyncio.sleep(RETRY_SECONDS)
            except DeadlineExceeded as late:
                raise EngineLost(self.name, str(late)) from None

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def give_up(self, spared: Callable[[str], bool] = lambda id: False) -> None:
        """Abort the engine's open requests. `spared`: takes a request id; True: the request is left alone. Returns when
        the others have ended, or after a second, or if the engine does not reply; never raises for these reasons."""
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                while left := [id for id in self.open if not spared(id)]:
                    self.given_up.update(left)
                    await self.client.abort(left)  # again, if the engine did not have one yet
                    await asyncio.sleep(_POLL_SECONDS)

    async def partials(
        self, known: Mapping[str, Sequence[int]], patience: float | None, say: Callable[[str], None]
    ) -> Partials:
        """Fetch the new tokens of the engine's unfinished completions, by request id and member. `known`: number of
        tokens already known of each member, by request id; other requests are not asked for. `patience`: seconds to
        wait (None: the client's deadline); then, and of a lost engine, none. `say`: gets the first error as a line."""
        theirs = {id: known[id] for id in self.open if id in known}
        if theirs:
            with contextlib.suppress(EngineLost, DeadlineExceeded, TimeoutError):
                try:
                    async with asyncio.timeout(patience):
                        return await self.client.partials(theirs)
                except (RoleFailed, WireError) as failure:
                    if not self._untold:
                        say(f"tokens in flight are not journaled: {one_line(failure)}")
                    self._untold = True
        return {}
