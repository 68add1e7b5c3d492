"""An engine's process as the conductor sees it: what it serves, what it answers, what it has done so far."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.engine import Engine, EngineHealth
from stretto.core.errors import DeadlineExceeded, EngineLost, RoleDied, WireError
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.core.tasks import cancel_and_wait
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.processes.role import RestartBudget
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import Spawner

RETRY_SECONDS = 0.05
_GLANCE_SECONDS = 0.005
_GLIMPSE_SECONDS = 1.0


@dataclass
class EngineHandle:
    """One engine, and the ones that it has replaced; `version` is what it serves (None: nothing at the moment)."""

    spec: EngineSpec
    process: RoleProcess
    client: Engine
    restarts: RestartBudget
    version: int | None = None
    loaded: float = -math.inf  # when it loaded the last version, by `time.monotonic`
    buried: int = 0
    starting: bool = False
    publication: asyncio.Event = field(default_factory=asyncio.Event)
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[str] = field(default_factory=set)  # requests that it answers
    _given_up: set[str] = field(default_factory=set)  # those of them that it was told to give up
    _health: EngineHealth | None = None
    _past: list[EngineHealth] = field(default_factory=list)  # last words of its predecessors
    _spans: list[Span] = field(default_factory=list)
    _poll: asyncio.Task[None] | None = None

    @classmethod
    def to(cls, spec: EngineSpec, logs: Path, deadlines: DeadlinesConfig, role: str, spawner: Spawner) -> Self:
        """An engine that is not started yet; `role` is the module that plays it."""
        process = RoleProcess(spec.name, role, logs / f"{spec.name}.txt", deadlines.hung, spawner)
        client = HttpEngine(
            spec.name,
            spec.address,
            answer_seconds=deadlines.answer,
            load_seconds=deadlines.load,
            health_seconds=deadlines.answer,  # an engine replies between two steps, and a step may be long
        )
        return cls(spec, process, client, RestartBudget(deadlines.engine_restarts, deadlines.restart_window))

    @property
    def name(self) -> str:
        return self.spec.name

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    async def start(self, published: Callable[[], int], seconds: float) -> None:
        """Start its process; when this returns, it serves the newest version that is published.

        Raises:
            RoleDied: it ended instead.
            DeadlineExceeded: that took longer than `seconds`.
        """
        self.starting = True
        await self.process.start(self.spec, self.spec.threads)
        async with deadline("conductor", f"{self.name} to be ready", seconds):
            self.version = await self._newest(published)
        self.starting = False

    async def _newest(self, published: Callable[[], int]) -> int:
        """The version of an engine that has started, once it serves everything that was published meanwhile: groups
        are admitted at the live version, so nothing older may answer them."""
        while True:
            if not self.process.running:
                raise RoleDied(self.name, await self.process.ended(), str(self.process.log))
            wanted = published()
            try:
                version = (await self.client.health()).version
                if version < wanted:
                    version = await self.client.update(wanted)
            except EngineLost:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except WireError:
                if published() == wanted:
                    raise
                continue  # while it was asked, newer ones have taken the place of this version
            if version >= published():
                return version

    async def until_it_serves(self, version: int, seconds: float) -> None:
        """Return when it serves `version` or a newer one."""
        async with deadline("conductor", f"{self.name} to serve version {version}", seconds):
            while self.version is None or self.version < version:
                await asyncio.sleep(RETRY_SECONDS)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Its answers; while they are awaited, the requests are `open`.

        Raises:
            EngineLost: it broke off; it is suspected then, unless it was told to give the requests up.
        """
        ids = {request.id for request in requests}
        self.open |= ids
        try:
            async for completion in self.client.generate(*requests):
                self.restarts.progressed()
                yield completion
        except EngineLost:
            if not ids & self._given_up:
                self.suspected.set()
            raise
        finally:
            self.open -= ids
            self._given_up -= ids

    async def give_up(self) -> None:
        """Let it give up what it answers; when this returns, it has no request of ours, or does not reply."""
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
            async with asyncio.timeout(_GLIMPSE_SECONDS):
                for id in list(self.open):
                    self._given_up.add(id)
                    await self.client.abort(id)
                while self.open:
                    await asyncio.sleep(_GLANCE_SECONDS)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """What its unfinished completions have beyond their known tokens; nothing if it does not reply within
        `patience` seconds (None: `deadlines.answer`)."""
        theirs = {id: known[id] for id in self.open if id in known}
        if theirs:
            with contextlib.suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
                async with asyncio.timeout(patience):
                    return await self.client.partials(theirs)
        return {}

    # ── what it has done ─────────────────────────────────────────────────────────────────────────

    def poll(self) -> asyncio.Task[None]:
        """Ask it how it is (kept for `counted`) and for its spans (kept for `drain_spans`). One that is slow to reply,
        in a long step say, is not asked again until it has replied: whoever gives up waiting for it loses nothing."""
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._ask_how_it_is())
        return self._poll

    async def _ask_how_it_is(self) -> None:
        asked = self.buried
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError):  # no news: a measurement ends no run
            health = await self.client.health()
            if asked == self.buried:
                self._health = health
            self._spans += await self.client.spans()

    def drain_spans(self) -> list[Span]:
        """The spans that it has told of since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def bury(self) -> None:
        """It has died: what it had begun is wasted."""
        self.version = None
        self.buried += 1
        if (health := self._health) is not None:
            wasted = health.wasted + health.unfinished
            self._past.append(msgspec.structs.replace(health, wasted=wasted, unfinished=0))
        self._health = None

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """A counter summed over it and its predecessors, up to when they were last looked at."""
        present = [self._health] if self._health is not None else []
        return sum(counter(health) for health in [*present, *self._past])

    async def stop(self, grace: float) -> None:
        """End it; returns when it is gone."""
        if self._poll is not None:
            await cancel_and_wait([self._poll])
        await self.client.close()
        await self.process.stop(grace)
