"""The engines of a run as one: started, routed to, kept at the newest version, replaced when they die.

generate(request)   goes to the engine with the fewest answers in flight
publish(version)    every engine loads it as soon as it can; `live` is the oldest version still serving
supervise()         an engine that dies leaves the routing, comes back with the newest version, and joins again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from stretto.core.deadlines import deadline
from stretto.core.engine import EngineHealth
from stretto.core.errors import DeadlineExceeded, EngineLost, RoleDied, WireError
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.core.tasks import gather_or_cancel, gather_to_the_end
from stretto.engine.spec import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import RETRY_SECONDS, EngineHandle
from stretto.loop.engines.router import Router
from stretto.processes.role import RESTART_DELAY_SECONDS
from stretto.processes.spawn import FRESH, Spawner

ENGINE_ROLE = "stretto.engine.role"
_GLANCE_SECONDS = 0.005


class EnginePool:
    """See the module."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        logs: Path,
        deadlines: DeadlinesConfig,
        role: str = ENGINE_ROLE,
        load_interval: float = 0.0,
        router: Router | None = None,
        spawner: Spawner = FRESH,
    ) -> None:
        """`role` is the module of an engine's process. `load_interval` is that of the engine's configuration, in
        seconds; `router` chooses among the engines that are up (default: the least loaded)."""
        self._engines = [EngineHandle.to(spec, logs, deadlines, role, spawner) for spec in specs]
        self._deadlines, self._load_interval = deadlines, load_interval
        self._on_load: Callable[[int], None] = lambda version: None
        self._say: Callable[[str], None] = lambda text: None
        self._router = router or Router()
        self._joined = asyncio.Event()
        self._published = -1

    def listen(self, on_load: Callable[[int], None]) -> None:
        """`on_load` is told the live version whenever it may have changed."""
        self._on_load = on_load

    def report_to(self, say: Callable[[str], None]) -> None:
        """`say` is told of every engine that is replaced."""
        self._say = say

    @property
    def live(self) -> int:
        """The oldest version that any engine serves. One that is being replaced serves none, and will have the
        newest one before it serves again."""
        return min((engine.version for engine in self._engines if engine.version is not None), default=-1)

    async def start(self, version: int) -> None:
        """Start all engines; each loads the newest publication, `version` or later, before it serves.

        Raises:
            RoleDied: one ended by itself, or was killed more often than `deadlines.engine_restarts`.
        """
        self._published = version
        await gather_or_cancel(*(self._start_first(engine) for engine in self._engines))

    async def _start_first(self, engine: EngineHandle) -> None:
        try:
            await self._start(engine)
        except RoleDied as death:
            if not engine.process.killed:
                raise
            await self._replace(engine, death.how)

    async def _start(self, engine: EngineHandle) -> None:
        await engine.start(lambda: self._published, self._deadlines.start)
        self._join(engine)

    def _join(self, engine: EngineHandle) -> None:
        self._router.join(engine.name)
        self._joined.set()
        self._on_load(self.live)
        engine.publication.set()  # something may have been published while it started

    def _leave(self, engine: EngineHandle) -> None:
        """It gets nothing more to do."""
        if engine.name in self._router.up:
            self._router.leave(engine.name)

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Answers from the least-loaded engine; requests that are given together begin there in the same step.

        Raises:
            EngineLost: the engine died meanwhile.
            RefusedRequest: the engine will not serve them.
        """
        answers = sum(len(request.seeds) for request in requests)
        while (name := self._router.start(answers)) is None:
            self._joined.clear()  # below: a replacement that is not ready in time has another one by then
            awaited, seconds = (
                ("free", self._deadlines.answer) if self._router.up else ("up", 2 * self._deadlines.start)
            )
            async with deadline("conductor", f"an engine to be {awaited}", seconds):
                await self._joined.wait()
        (engine,) = (engine for engine in self._engines if engine.name == name)
        try:
            # An engine that resumes completions has to serve what sampled their last token: versions never fall.
            if stamps := [
                version for request in requests for prefix in request.prefixes for version in prefix.versions
            ]:
                await engine.until_it_serves(max(stamps), self._deadlines.start)
            async for completion in engine.generate(*requests):
                yield completion
        except EngineLost:
            if engine.suspected.is_set():
                self._leave(engine)
            raise
        finally:
            self._router.finish(name, answers)
            self._joined.set()

    @property
    def open(self) -> frozenset[str]:
        """The requests that engines answer now."""
        return frozenset(id for engine in self._engines for id in engine.open)

    async def give_up(self) -> None:
        """Let every engine give up what it answers; when this returns, none has a request of ours. An engine that does
        not reply within a second is left alone."""
        await gather_or_cancel(*(engine.give_up() for engine in self._engines))

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """What the completions in flight have beyond their known tokens; an engine that does not reply within
        `patience` seconds (None: `deadlines.answer`) is left out."""
        found = await asyncio.gather(*(engine.partials(known, patience) for engine in self._engines))
        return {request: members for theirs in found for request, members in theirs.items()}

    async def _until_due(self, engine: EngineHandle) -> None:
        """Leave answers under way alone for `engine.load_interval` seconds after the last load."""
        due = engine.loaded + self._load_interval
        while self._router.load(engine.name) and (early := due - time.monotonic()) > 0:
            await asyncio.sleep(min(early, _GLANCE_SECONDS))

    def publish(self, version: int) -> None:
        """A version is in the mailbox: every engine shall load it."""
        self._published = version
        for engine in self._engines:
            engine.publication.set()

    async def keep_loaded(self) -> NoReturn:
        """Let each engine load what is published, one publication after the other, for as long as the run goes on."""
        await gather_or_cancel(*(self._keep_loaded(engine) for engine in self._engines))
        raise AssertionError("a loader never ends by itself")

    async def _keep_loaded(self, engine: EngineHandle) -> NoReturn:
        while True:
            await engine.publication.wait()
            await self._until_due(engine)
            engine.publication.clear()
            version = self._published
            if engine.version is None or engine.version >= version or not engine.process.running:
                continue
            try:
                engine.version = await engine.client.update(version)
            except EngineLost:
                self._leave(engine)  # dead or not, it comes back with the newest version
                engine.suspected.set()
                continue
            except WireError:
                if self._published == version:
                    raise
                continue  # while it was asked, newer ones have taken the place of this version
            engine.loaded = time.monotonic()
            self._on_load(self.live)

    async def reach(self, version: int) -> None:
        """Return when every engine serves `version` or a newer one; loads it where needed."""
        self._published = max(self._published, version)
        for engine in self._engines:
            async with deadline("conductor", f"{engine.name} to serve version {version}", self._deadlines.start):
                while engine.version is None or engine.version < version:
                    with contextlib.suppress(EngineLost):  # supervise() brings it back, with the newest version
                        engine.version = await engine.client.update(version)
                        break
                    await asyncio.sleep(RETRY_SECONDS)

    async def supervise(self) -> NoReturn:
        """Replace engines that die, for as long as the run goes on.

        Raises:
            RoleDied: one engine died more often than `deadlines.engine_restarts`.
        """
        watchers = [watch(engine) for engine in self._engines for watch in (self._supervise, self._reinstate)]
        await gather_or_cancel(*watchers)
        raise AssertionError("a watcher never ends by itself")

    async def _reinstate(self, engine: EngineHandle) -> NoReturn:
        """A suspected engine whose process goes on and answers gets work again; one that nobody can reach for
        `deadlines.hung` seconds, though its process goes on, is as good as dead."""
        while True:
            await engine.suspected.wait()
            engine.suspected.clear()
            began = time.monotonic()
            while self._is_astray(engine):
                await asyncio.sleep(RETRY_SECONDS)
                try:
                    await engine.client.health()
                except (EngineLost, DeadlineExceeded, WireError):
                    if self._is_astray(engine) and time.monotonic() - began > self._deadlines.hung:
                        engine.process.kill()
                else:
                    if self._is_astray(engine):
                        self._join(engine)

    def _is_astray(self, engine: EngineHandle) -> bool:
        """Its process goes on, and it gets no work."""
        return engine.process.running and not engine.starting and engine.name not in self._router.up

    async def _supervise(self, engine: EngineHandle) -> NoReturn:
        while True:
            await self._replace(engine, await engine.process.ended())

    async def _replace(self, engine: EngineHandle, how: str) -> None:
        """A new process for an engine that has ended in this way."""
        while True:
            self._bury(engine, how)
            try:
                return await self._start(engine)
            except RoleDied as death:
                how = death.how
            except DeadlineExceeded as late:
                await engine.process.stop(0.0)
                how = str(late)
            await asyncio.sleep(RESTART_DELAY_SECONDS)

    def _bury(self, engine: EngineHandle, how: str) -> None:
        """
        Raises:
            RoleDied: it has died too often.
        """
        self._leave(engine)
        engine.bury()
        if engine.restarts.exceeded_by_one_more():
            raise RoleDied(engine.name, f"{how}, {len(engine.restarts)} times", str(engine.process.log))
        self._say(f"{engine.name} {how}: a new one is started")
        self._joined.set()  # whoever waits for an engine waits anew

    async def poll(self, patience: float | None = None) -> list[Span]:
        """Ask every engine how it is (kept for `counted`), and take the spans that they have told of; one that does not
        reply in `patience` seconds (None: `deadlines.answer`) stays for now as it was looked at last."""
        polls = [engine.poll() for engine in self._engines if engine.name in self._router.up]
        if polls:
            await asyncio.wait(polls, timeout=patience)
        return [span for engine in self._engines for span in engine.drain_spans()]

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """A counter summed over all engines, those that died included (up to when they were last looked at)."""
        return sum(engine.counted(counter) for engine in self._engines)

    def busy(self) -> dict[str, float]:
        """Seconds in which each engine had something to do, those that it replaced included."""
        return {engine.name: engine.counted(lambda health: health.busy_seconds) for engine in self._engines}

    async def stop(self, grace: float) -> None:
        """End all engines; returns when they are gone."""
        await gather_to_the_end(*(engine.stop(grace) for engine in self._engines))
