"""The engines of a run as one: started, routed to, kept at the newest version, replaced when they die.

generate(request)   goes to the engine with the fewest answers in flight
publish(version)    every engine loads it as soon as it can; `live` is the oldest version still serving
supervise()         an engine that dies leaves the routing, comes back with the newest version, and joins again
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, EngineLost, RoleDied, WireError
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest
from stretto.engine.client import HttpEngine
from stretto.engine.wire import EngineHealth, WrittenTokens
from stretto.launch.config import DeadlinesConfig
from stretto.launch.engine_role import EngineSpec
from stretto.launch.process import RoleProcess
from stretto.launch.stopping import together
from stretto.rollout.routing import Router

ENGINE_ROLE = "stretto.launch.engine_role"
_RETRY_SECONDS = 0.05
_GLANCE_SECONDS = 0.005
_GLIMPSE_SECONDS = 1.0


@dataclass
class Member:
    """One engine: its process, its client, and the version that it serves (None: none at the moment)."""

    spec: EngineSpec
    process: RoleProcess
    client: HttpEngine
    version: int | None = None
    loaded: float = -math.inf  # when it loaded the last version, by `time.monotonic`
    restarts: int = 0
    starting: bool = False
    publication: asyncio.Event = field(default_factory=asyncio.Event)
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    health: EngineHealth | None = None
    open: set[str] = field(default_factory=set)  # requests that it answers
    given_up: set[str] = field(default_factory=set)  # those of them that it was told to give up
    busy_before: float = 0.0  # seconds of work of its predecessors


class Fleet:
    """See the module."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        logs: Path,
        deadlines: DeadlinesConfig,
        role: str = ENGINE_ROLE,
        load_interval: float = 0.0,
        alone: bool = False,
    ) -> None:
        """`role` is the module that plays an engine; another make of engine has another one. `load_interval` is that of
        the engine's configuration, in seconds; `alone`: an engine answers nothing but what it was given together."""
        self._members = [self._member(spec, logs, deadlines, role) for spec in specs]
        self._deadlines, self._load_interval = deadlines, load_interval
        self._on_load: Callable[[int], None] = lambda version: None
        self._say: Callable[[str], None] = lambda text: None
        self._router = Router([], alone)
        self._joined = asyncio.Event()
        self._published = -1
        self._past: list[EngineHealth] = []  # last words of engines that died

    @staticmethod
    def _member(spec: EngineSpec, logs: Path, deadlines: DeadlinesConfig, role: str) -> Member:
        process = RoleProcess(spec.name, role, logs / f"{spec.name}.txt", deadlines.hung)
        client = HttpEngine(
            spec.name,
            spec.address,
            answer_seconds=deadlines.answer,
            load_seconds=deadlines.load,
            health_seconds=deadlines.answer,  # an engine replies between two steps, and a step may be long
        )
        return Member(spec, process, client)

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
        return min((member.version for member in self._members if member.version is not None), default=-1)

    async def start(self, version: int) -> None:
        """Start all engines; each loads the newest publication, `version` or later, before it serves."""
        self._published = version
        await together(*(self._start(member) for member in self._members))

    async def _start(self, member: Member) -> None:
        member.starting = True
        await member.process.start(member.spec, member.spec.threads)
        async with deadline("conductor", f"{member.spec.name} to be ready", self._deadlines.start):
            member.version = await self._newest(member)
        member.starting = False
        self._join(member)

    def _join(self, member: Member) -> None:
        self._router.join(member.spec.name)
        self._joined.set()
        self._on_load(self.live)
        member.publication.set()  # something may have been published while it started

    async def _newest(self, member: Member) -> int:
        """The version of an engine that has started, once it serves everything that was published meanwhile: groups
        are admitted at the live version, so nothing older may answer them."""
        while True:
            if not member.process.running:
                raise RoleDied(member.spec.name, await member.process.ended(), str(member.process.log))
            wanted = self._published
            try:
                version = (await member.client.health()).version
                if version < wanted:
                    version = await member.client.update(wanted)
            except EngineLost:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except WireError:
                if self._published == wanted:
                    raise
                continue  # while it was asked, newer ones have taken the place of this version
            if version >= self._published:
                return version

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Answers from the least-loaded engine; requests that are given together begin there in the same step.

        Raises:
            EngineLost: the engine died meanwhile.
            RefusedRequest: the engine will not serve them.
        """
        answers = sum(len(request.seeds) for request in requests)
        while (name := self._router.start(answers)) is None:
            self._joined.clear()
            awaited, seconds = ("free", self._deadlines.answer) if self._router.up else ("up", self._deadlines.start)
            async with deadline("conductor", f"an engine to be {awaited}", seconds):
                await self._joined.wait()
        (member,) = (member for member in self._members if member.spec.name == name)
        ids = {request.id for request in requests}
        member.open |= ids
        try:
            if begun := [version for request in requests for some in request.begun for version in some.versions]:
                await self._caught_up(member, max(begun))
            async for completion in member.client.generate(*requests):
                yield completion
        except EngineLost:
            if not ids & member.given_up:
                self._suspect(member)
            raise
        finally:
            member.given_up -= ids
            member.open -= ids
            self._router.finish(name, answers)
            self._joined.set()

    @property
    def open(self) -> frozenset[str]:
        """The requests that engines answer now."""
        return frozenset(id for member in self._members for id in member.open)

    async def give_up(self) -> None:
        """Let every engine give up what it answers; when this returns, none has a request of ours. An engine that does
        not reply within a second is left alone."""
        with contextlib.suppress(EngineLost, DeadlineExceeded, TimeoutError):
            async with asyncio.timeout(_GLIMPSE_SECONDS):
                for member in self._members:
                    for id in list(member.open):
                        member.given_up.add(id)
                        await member.client.abort(id)
                while self.open:
                    await asyncio.sleep(_GLANCE_SECONDS)

    async def written(self, known: Mapping[str, Sequence[int]]) -> list[WrittenTokens]:
        """How far the answers in flight have come, beyond what is known of them; an engine that does not reply within a
        second is left out."""
        found: list[WrittenTokens] = []
        for member in self._members:
            theirs = {id: list(known[id]) for id in member.open if id in known}
            if not theirs:
                continue
            with contextlib.suppress(EngineLost, DeadlineExceeded, TimeoutError):
                async with asyncio.timeout(_GLIMPSE_SECONDS):
                    found += await member.client.written(theirs)
        return found

    async def _caught_up(self, member: Member, version: int) -> None:
        """An engine that takes answers over has to serve what sampled their last token: versions never fall."""
        async with deadline("conductor", f"{member.spec.name} to serve version {version}", self._deadlines.start):
            while member.version is None or member.version < version:
                await asyncio.sleep(_RETRY_SECONDS)

    def _suspect(self, member: Member) -> None:
        """An engine that broke off gets nothing more to do until it is replaced, or turns out to be well."""
        if member.spec.name in self._router.up:
            self._router.leave(member.spec.name)
        member.suspected.set()

    async def _until_due(self, member: Member) -> None:
        """Leave answers under way alone for `engine.load_interval` seconds after the last load."""
        due = member.loaded + self._load_interval
        while self._router.load(member.spec.name) and (early := due - time.monotonic()) > 0:
            await asyncio.sleep(min(early, _GLANCE_SECONDS))

    def publish(self, version: int) -> None:
        """A version is in the mailbox: every engine shall load it."""
        self._published = version
        for member in self._members:
            member.publication.set()

    async def keep_loaded(self) -> NoReturn:
        """Let each engine load what is published, one publication after the other, for as long as the run goes on."""
        await together(*(self._keep_loaded(member) for member in self._members))
        raise AssertionError("a loader never ends by itself")

    async def _keep_loaded(self, member: Member) -> NoReturn:
        while True:
            await member.publication.wait()
            await self._until_due(member)
            member.publication.clear()
            version = self._published
            if member.version is None or member.version >= version or not member.process.running:
                continue
            try:
                member.version = await member.client.update(version)
            except EngineLost:
                self._suspect(member)  # dead or not, it comes back with the newest version
                continue
            except WireError:
                if self._published == version:
                    raise
                continue  # while it was asked, newer ones have taken the place of this version
            member.loaded = time.monotonic()
            self._on_load(self.live)

    async def reach(self, version: int) -> None:
        """Return when every engine serves `version` or a newer one; loads it where needed."""
        self._published = max(self._published, version)
        for member in self._members:
            async with deadline("conductor", f"{member.spec.name} to serve version {version}", self._deadlines.start):
                while member.version is None or member.version < version:
                    with contextlib.suppress(EngineLost):  # supervise() brings it back, with the newest version
                        member.version = await member.client.update(version)
                        break
                    await asyncio.sleep(_RETRY_SECONDS)

    async def supervise(self) -> NoReturn:
        """Replace engines that die, for as long as the run goes on.

        Raises:
            RoleDied: one engine died more often than `deadlines.engine_restarts`.
        """
        watchers = [watch(member) for member in self._members for watch in (self._supervise, self._reinstate)]
        await together(*watchers)
        raise AssertionError("a watcher never ends by itself")

    async def _reinstate(self, member: Member) -> NoReturn:
        """A suspected engine whose process goes on and answers gets work again."""
        while True:
            await member.suspected.wait()
            member.suspected.clear()
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                await member.client.health()
            except (EngineLost, DeadlineExceeded):
                if member.process.running:
                    member.suspected.set()
                continue
            if member.spec.name not in self._router.up and member.process.running and not member.starting:
                self._join(member)

    async def _supervise(self, member: Member) -> NoReturn:
        while True:
            how = await member.process.ended()
            if member.spec.name in self._router.up:
                self._router.leave(member.spec.name)
            member.version = None
            member.restarts += 1
            if member.health is not None:
                self._past.append(_last_words(member.health))
                member.busy_before += member.health.busy_seconds
            member.health = None
            if member.restarts > self._deadlines.engine_restarts:
                raise RoleDied(member.spec.name, f"{how}, {member.restarts} times", str(member.process.log))
            self._say(f"{member.spec.name} {how}: a new one is started")
            try:
                await self._start(member)
            except RoleDied:
                continue  # it has died again, which is counted

    async def look(self, patience: float | None = None) -> list[Span]:
        """Ask every engine how it is (kept for `counted`), and take its spans; one that does not reply in `patience`
        seconds (None: `deadlines.answer`) stays as it was looked at last."""
        spans: list[Span] = []
        for member in self._members:
            if member.spec.name not in self._router.up:
                continue
            try:
                async with asyncio.timeout(patience):
                    member.health = await member.client.health()
                    spans += await member.client.spans()
            except (EngineLost, DeadlineExceeded, TimeoutError):
                continue  # no news: a measurement ends no run; supervise() hears of a death
        return spans

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """A counter summed over all engines, those that died included (up to when they were last looked at)."""
        present = [member.health for member in self._members if member.health is not None]
        return sum(counter(health) for health in [*present, *self._past])

    def busy(self) -> dict[str, float]:
        """Seconds in which each engine had something to do, those that it replaced included."""
        return {
            member.spec.name: member.busy_before + (member.health.busy_seconds if member.health is not None else 0.0)
            for member in self._members
        }

    async def stop(self, grace: float) -> None:
        """End all engines; returns when they are gone."""
        await asyncio.gather(*(member.client.close() for member in self._members))
        await asyncio.gather(*(member.process.stop(grace) for member in self._members))


def _last_words(health: EngineHealth) -> EngineHealth:
    """The counters of an engine that is dead: what it had begun is wasted."""
    return msgspec.structs.replace(health, wasted=health.wasted + health.unfinished, unfinished=0)
