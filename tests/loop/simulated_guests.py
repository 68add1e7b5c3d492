"""Engines that are made up, beside a pool and completions in flight that are real, on a clock that jumps.

Token n of every completion is the number n, so that a token that is lost or sampled twice shows; how many a completion
has depends on its seed alone.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

from stretto.core.canary import Ask, Loaded
from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLeft, EngineLost, MachineLost
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials, Segment, StopReason
from stretto.core.tasks import first_of
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.proving import Proving
from stretto.processes.supervisor import RestartBudget

TOKEN_SECONDS = 0.2


def length(seed: int) -> int:
    return 1 + seed % 9


@dataclass
class Machine:
    """The machine of an engine: it may be gone, cut off, or slow to pull a version."""

    chance: random.Random
    pull_seconds: float = 0.1
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.reached.set()


@dataclass
class SimulatedProcess:
    """Satisfies `processes.role.ReplaceableProcess`."""

    machine: Machine
    newest: Callable[[], int]
    client: "SimulatedClient | None" = None
    log: Path = Path("/dev/null")
    clock_offset: float = 0.0
    killed: bool = False
    starts: int = 0
    _end: asyncio.Future[str] | None = None

    @property
    def running(self) -> bool:
        return self._end is not None and not self._end.done() and not self.machine.gone.is_set()

    async def start(self, spec: msgspec.Struct, threads: int) -> None:
        self.starts += 1
        await asyncio.sleep(self.machine.chance.random() * 3)
        if self.machine.gone.is_set():
            raise MachineLost("its machine", "has gone")
        assert self.client is not None
        self._end, self.killed = asyncio.get_running_loop().create_future(), False
        self.client.begins(self.newest())

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    def loaded(self) -> int:
        return 0

    async def ended(self) -> str:
        assert self._end is not None
        gone = asyncio.ensure_future(self.machine.gone.wait())
        try:
            await first_of(self._end, gone)
        finally:
            gone.cancel()
        if not self._end.done():
            raise MachineLost("its machine", "has gone")
        return self._end.result()

    async def stop(self, grace: float) -> None:
        self.kill()

    def kill(self) -> None:
        if self._end is not None and not self._end.done():
            self.killed = True
            self._end.set_result("was killed by SIGKILL")
            assert self.client is not None
            self.client.break_off()


@dataclass
class SimulatedClient:
    """Satisfies `core.engine.Engine`."""

    name: str
    machine: Machine
    began: Callable[[str, GenerateRequest, int], None]  # the engine's name, the request, the version that it serves
    version: int = -1
    generated: int = 0
    wasted: int = 0
    sampled: dict[str, list[Segment]] = field(default_factory=dict)  # of open requests
    fresh: dict[str, int] = field(default_factory=dict)  # of those, the tokens that this engine has sampled
    _breaks: dict[str, asyncio.Event] = field(default_factory=dict)

    def begins(self, version: int) -> None:
        self.version, self.generated, self.wasted = version, 0, 0

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        (request,) = requests
        self.began(self.name, request, self.version)
        broken = self._breaks.setdefault(request.id, asyncio.Event())
        parts = list(request.prefixes or (Segment(),) * len(request.seeds))
        self.sampled[request.id], self.fresh[request.id] = parts, 0
        try:
            for member, seed in enumerate(request.seeds):
                while len(parts[member].token_ids) < length(seed):
                    await self._a_token(broken)
                    assert self.version >= 0, "an engine that has ended samples"
                    number = len(parts[member].token_ids)
                    parts[member] = parts[member] + Segment.of((number,), (-0.5,), (self.version,))
                    self.generated += 1
                    self.fresh[request.id] += 1
                whole = msgspec.structs.replace(parts[member], stop_reason=StopReason.STOP)
                yield Completion(request.id, member, whole)
            self.fresh[request.id] = 0
        finally:
            self.wasted += self.fresh.pop(request.id)
            self.sampled.pop(request.id)
            self._breaks.pop(request.id, None)

    async def _a_token(self, broken: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self.machine.chance.expovariate(1 / TOKEN_SECONDS)):
                await broken.wait()
            await self._broke_off()
        except TimeoutError:
            await self._reply(broken)

    async def _broke_off(self) -> NoReturn:
        """As `stretto_cluster.guest.GuestEngine`: a machine that is silent, or goes, is no fault of the requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self.machine.gone.wait()
        departed = self.machine.gone.is_set() or not self.machine.reached.is_set()
        raise (EngineLeft if departed else EngineLost)(self.name, "broke off")

    async def _reply(self, broken: asyncio.Event | None = None) -> None:
        """What a partition holds up until it heals or the connection is given up."""
        if self.machine.gone.is_set() or self.version < 0:
            raise EngineLost(self.name, "does not listen")
        if not self.machine.reached.is_set():
            waits = [self.machine.reached.wait(), self.machine.gone.wait(), *([broken.wait()] if broken else [])]
            tasks = [asyncio.ensure_future(wait) for wait in waits]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            # It may be killed, and its machine be reached again, at one moment.
            if not self.machine.reached.is_set() or (broken is not None and broken.is_set()):
                await self._broke_off()
            if self.version < 0:
                raise EngineLost(self.name, "does not listen")

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        await asyncio.sleep(self.machine.pull_seconds)
        await self._reply()
        self.version = max(self.version, version)
        return Loaded(self.version)

    async def abort(self, request_id: str | list[str]) -> None:
        await self._reply()
        for id in [request_id] if isinstance(request_id, str) else request_id:
            if id in self._breaks:
                self._breaks[id].set()

    async def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        await self._reply()
        found: Partials = {}
        for id, counts in known.items():
            for member, piece in enumerate(self.sampled.get(id, ())):
                if member < len(counts) and len(piece.token_ids) > counts[member]:
                    found.setdefault(id, {})[member] = piece.after(counts[member])
        return found

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [(float(self.version),)] * len(texts)  # each is the version that it is of

    async def health(self) -> EngineHealth:
        await self._reply()
        zeros = ("running", "waiting", "prefilled", "recomputed", "interrupted", "preempted", "updates")
        return EngineHealth(
            version=self.version,
            generated=self.generated,
            wasted=self.wasted,
            unfinished=sum(self.fresh.values()),
            busy_seconds=1.0,
            **dict.fromkeys(zeros, 0),
        )

    async def moved(self) -> object:
        return None

    async def spans(self) -> list[Span]:
        return []

    def break_off(self) -> None:
        for broken in self._breaks.values():
            broken.set()
        self.version = -1

    async def close(self) -> None: ...


def handle_of(client: SimulatedClient) -> EngineHandle:
    process: Any = SimpleNamespace(clock_offset=0.0)
    spec = EngineSpec("engine-0", "", "", "", "", "{}", 1, 0.0)
    return EngineHandle(spec, process, client, DeadlinesConfig(), RestartBudget(1, 1.0), lambda _: None, Proving())
