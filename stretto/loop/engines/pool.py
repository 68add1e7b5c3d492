"""The engines of a run as one, and the completions that they have in flight.

InFlight.generate(request)   a group; its tokens are journaled, and another engine continues those of a lost one
EnginePool.generate(...)     requests to the engine with the fewest completions in flight
EnginePool.publish(version)  every engine loads it as soon as it can; `live` is the oldest version that one serves
EnginePool.supervise()       an engine that dies is replaced, loads the newest version, and gets requests again

engine ─► completions that have ended ─┐
engine ─► tokens so far, each second ──┴─► ledger (pieces) ─► after a crash: `restore`
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLost, RoleDied
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials, Segment, trajectory_id
from stretto.core.tasks import gather_or_cancel, gather_to_the_end
from stretto.engine.spec import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle, EngineState
from stretto.loop.engines.roster import Roster
from stretto.loop.engines.router import Router
from stretto.processes.spawn import FRESH, Spawner
from stretto.rollout.controller import Controller, ControllerState
from stretto.store.ledger.reading import UnfinishedGroup

ENGINE_ROLE = "stretto.engine.role"
#: Engines that requests may lose before they are given up: the requests may be what the engines die of.
LOSSES = 3


def attempts() -> Iterator[contextlib.AbstractContextManager[object]]:
    """Attempts to generate: the loss of an engine ends one of them, and the loss of the last one is raised.

    Example::

        for attempt in attempts():
            with attempt:
                return await generated()
    """
    for _ in range(LOSSES):
        yield contextlib.suppress(EngineLost)
    yield contextlib.nullcontext()


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
        kind: str = "native",
    ) -> None:
        """`role` is the module of an engine's process, `kind` the make. `load_interval` is that of the engine's
        configuration, in seconds; `router` chooses among the engines that are up (default: the least loaded)."""
        self._engines = {
            spec.name: EngineHandle.to(spec, logs, deadlines, role, spawner, self._changed, load_interval)
            for spec in specs
        }
        self._deadlines = deadlines
        self._on_load: Callable[[int], None] = lambda version: None
        self._say: Callable[[str], None] = lambda text: None
        self._router = router or Router()
        self._kind, self.roster = kind, Roster()
        self._free = asyncio.Event()

    def listen(self, on_load: Callable[[int], None]) -> None:
        """`on_load` gets the live version whenever it may have changed, and -1 while no engine serves one."""
        self._on_load = on_load

    def report_to(self, say: Callable[[str], None]) -> None:
        """`say` gets a sentence for every engine that is replaced."""
        self._say = say

    @property
    def live(self) -> int:
        """The oldest version that any engine serves. One that is being replaced serves none, and has the newest one
        before it serves again."""
        return min((engine.version for engine in self._engines.values() if engine.version is not None), default=-1)

    def _changed(self, engine: EngineHandle) -> None:
        up = engine.state is EngineState.UP
        if up != (engine.name in self._router.up):
            (self._router.join if up else self._router.leave)(engine.name)
        if engine.version is not None:
            self.roster.serves(engine.name, self._kind, platform.node(), engine.version)
        elif engine.state is EngineState.DOWN:
            self.roster.left(engine.name, engine.how)
        self._free.set()
        self._on_load(self.live)  # grows also when the one that served the oldest version dies

    async def start(self, version: int) -> None:
        """Start all engines; each loads the newest publication, `version` or later, before it serves.

        Raises:
            RoleDied: one ended by itself, or was killed more often than `deadlines.engine_restarts`.
        """
        self.publish(version)
        await gather_or_cancel(*(self._start(engine) for engine in self._engines.values()))

    async def _start(self, engine: EngineHandle) -> None:
        try:
            await engine.start(engine.spec.publication_seconds)
        except RoleDied as death:
            if not engine.process.killed:
                raise
            await engine.replace(death.how, self._say, engine.spec.publication_seconds)

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Completions from the least-loaded engine; requests that are given together begin there in the same step.

        Raises:
            EngineLost: the engine broke off. It is suspected then, unless it was told to give the requests up.
            RefusedRequest: the engine will not serve them.
        """
        completions, ids = sum(len(request.seeds) for request in requests), {request.id for request in requests}
        prefixes = {request.id: request.prefixes or (Segment(),) * len(request.seeds) for request in requests}
        while (name := self._router.start(completions)) is None:
            self._free.clear()  # below: a replacement that is not ready in time has another one by then
            up, limits = bool(self._router.up), self._deadlines
            awaited, seconds = ("free", limits.answer) if up else ("up", 2 * limits.start)
            async with deadline("conductor", f"an engine to be {awaited}", seconds):
                await self._free.wait()
        engine = self._engines[name]
        try:
            # An engine that continues completions has to serve what sampled their last token: versions never fall.
            if stamps := [stamp for request in requests for prefix in request.prefixes for stamp in prefix.versions]:
                await engine.until_it_serves(max(stamps))
            engine.open |= ids
            async for completion in engine.client.generate(*requests):
                engine.restarts.progressed()
                yield completion.written_by(name, prefixes[completion.request][completion.member])
        except EngineLost:
            if not ids & engine.given_up:
                engine.suspect()
            raise
        finally:
            engine.open -= ids
            engine.given_up -= ids
            self._router.finish(name, completions)
            self._free.set()

    @property
    def open(self) -> frozenset[str]:
        """The requests that engines have now."""
        return frozenset(id for engine in self._engines.values() for id in engine.open)

    async def give_up(self) -> None:
        """Abort every request; when this returns, no engine has one. An engine that does not reply within a second is
        left alone."""
        await gather_or_cancel(*(engine.give_up() for engine in self._engines.values()))

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None = None) -> Partials:
        """What the completions in flight have beyond their known tokens; without an engine that does not reply within
        `patience` seconds (None: `deadlines.answer`)."""
        engines = list(self._engines.values())
        found = await asyncio.gather(*(engine.partials(known, patience) for engine in engines))
        return {
            request: {member: piece.written_by(engine.name) for member, piece in members.items()}
            for engine, theirs in zip(engines, found, strict=True)
            for request, members in theirs.items()
        }

    def publish(self, version: int) -> None:
        """A version is in the mailbox: every engine loads it."""
        self.roster.step = version
        for engine in self._engines.values():
            engine.publish(version)

    async def keep_loaded(self) -> NoReturn:
        """Keep every engine at the newest published version."""
        await gather_or_cancel(*(engine.keep_loaded() for engine in self._engines.values()))
        raise AssertionError("a loader never ends by itself")

    async def reach(self, version: int) -> None:
        """Return when every engine serves `version` or a newer one; loads it where needed."""
        for engine in self._engines.values():
            engine.published = max(engine.published, version)
        for engine in self._engines.values():
            await engine.reach(version)

    async def supervise(self) -> NoReturn:
        """Replace engines that die.

        Raises:
            RoleDied: one engine died more often than `deadlines.engine_restarts`.
        """
        await gather_or_cancel(*(engine.supervise(self._say) for engine in self._engines.values()))
        raise AssertionError("a watcher never ends by itself")

    async def poll(self, patience: float | None = None) -> list[Span]:
        """Ask every engine for its health (for `counted`) and its spans, which are returned. An engine that does not
        reply within `patience` seconds (None: `deadlines.answer`) keeps its last counters for now."""
        polls = [engine.poll() for engine in self._engines.values() if engine.state is EngineState.UP]
        if polls:
            await asyncio.wait(polls, timeout=patience)
        return [span for engine in self._engines.values() for span in engine.drain_spans()]

    def counted(self, counter: Callable[[EngineHealth], float]) -> float:
        """A counter summed over all engines, those that died included, up to their last poll."""
        return sum(engine.counted(counter) for engine in self._engines.values())

    def busy(self) -> dict[str, float]:
        """Seconds of work by engine, that of those which it replaced included."""
        return {name: engine.counted(lambda health: health.busy_seconds) for name, engine in self._engines.items()}

    def generated(self) -> dict[str, int]:
        """Tokens by engine, those of the ones that it replaced included, up to the last poll."""
        return {name: round(engine.counted(lambda health: health.generated)) for name, engine in self._engines.items()}

    async def stop(self, grace: float) -> None:
        """End all engines; returns when they are gone."""
        await gather_to_the_end(*(engine.stop(grace) for engine in self._engines.values()))


class Engines(Protocol):
    """Satisfied by `loop.engines.pool.EnginePool`."""

    def generate(self, request: GenerateRequest, /) -> AsyncIterator[Completion]: ...

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials: ...


class SegmentJournal(Protocol):
    """Satisfied by `store.ledger.ledger.Ledger`."""

    def journal(self, id: str, piece: Segment) -> None: ...


@dataclass
class GroupInFlight:
    """What a group in flight has so far, by member."""

    ended: dict[int, Completion] = field(default_factory=dict)
    prefixes: dict[int, Segment] = field(default_factory=dict)  # journaled, of members whose end is not
    journaled: set[int] = field(default_factory=set)  # members whose end is journaled
    members: tuple[int, ...] = ()  # that the open request asks for, in its order
    judging: bool = False  # its last completion has come
    turn: int = 0  # counts requests: what an earlier one brings late is refused

    def request(self, of: GenerateRequest) -> GenerateRequest:
        """What is missing of the group's request."""
        self.turn += 1
        self.members = tuple(member for member in range(len(of.seeds)) if member not in self.ended)
        prefixes = tuple(self.prefixes.get(member, Segment()) for member in self.members)
        seeds = tuple(of.seeds[member] for member in self.members)
        resumed = any(prefix.token_ids for prefix in prefixes)
        return msgspec.structs.replace(of, seeds=seeds, prefixes=prefixes if resumed else ())

    def extend(self, pieces: Mapping[int, Segment]) -> Iterator[tuple[int, Segment]]:
        """Add new tokens to what the open request has, by its order; gives those of each member."""
        for place, piece in pieces.items():
            member = self.members[place]
            if member not in self.ended:  # else its last tokens have arrived meanwhile
                self.prefixes[member] = self.prefixes.get(member, Segment()) + piece
                yield member, piece

    def known(self, member: int) -> int:
        """How many tokens of a member are journaled."""
        return len(self.prefixes[member].token_ids) if member in self.prefixes else 0


class InFlight:
    """Generates for the workflow (satisfies `core.engine.Generate`)."""

    def __init__(
        self, engines: Engines, journal: SegmentJournal | None, restored: Mapping[str, GroupInFlight] | None = None
    ) -> None:
        """`journal` None: nothing is kept, and a group that was lost starts again from its first token. `restored`: the
        groups that an earlier process of the run had in flight."""
        self._engines, self._journal = engines, journal
        self._groups: dict[str, GroupInFlight] = dict(restored or {})
        self._ending = False
        self._keeping = asyncio.Lock()  # two callers at a time would journal the same tokens twice

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """All completions of the group, when the last of them has ended, in the order of the members.

        Raises:
            EngineLost: several engines in a row were lost with this group, so it may be the cause.
            RefusedRequest: an engine will not serve it.
        """
        group = self._groups.setdefault(request.id, GroupInFlight())
        try:
            for attempt in attempts():
                with attempt:
                    missing = group.request(request)
                    if not missing.seeds:
                        break
                    try:
                        async for completion in self._engines.generate(missing):
                            member = group.members[completion.member]
                            group.ended.setdefault(member, msgspec.structs.replace(completion, member=member))
                        if count := len(request.seeds) - len(group.ended):
                            raise EngineLost("an engine", f"ended {request.id} with {count} completions missing")
                    except EngineLost:
                        if self._ending:
                            await asyncio.get_running_loop().create_future()  # until it is cancelled, which comes next
                        if self._journal is None:
                            group.ended.clear()
                        raise  # another engine continues what is known
                    break
        finally:
            group.judging = len(group.ended) == len(request.seeds)
        for _, completion in sorted(group.ended.items()):
            yield completion

    def end(self) -> None:
        """The run ends: engines are about to be told to give completions up."""
        self._ending = True

    def forget(self, id: str) -> None:
        """The group is judged or given up, and no longer in flight."""
        self._groups.pop(id, None)

    @property
    def unjudged(self) -> int:
        """Tokens of groups whose completions have all ended and that are not judged yet."""
        whole = (group for group in self._groups.values() if group.judging)
        return sum(len(completion.token_ids) for group in whole for completion in group.ended.values())

    async def keep(self, patience: float | None = None) -> None:
        """Journal the new tokens of the groups in flight; a crash costs those that came since the last call.

        `patience`: seconds to wait for an engine, which replies between two steps; None: as long as for a completion.
        """
        if (journal := self._journal) is None:
            return
        async with self._keeping:
            for id, group in self._groups.items():
                for member in group.ended.keys() - group.journaled:
                    piece = group.ended[member].segment.after(group.known(member))
                    journal.journal(trajectory_id(id, member), piece)
                    group.journaled.add(member)
            turns = {id: group.turn for id, group in self._groups.items()}
            known = {id: [group.known(member) for member in group.members] for id, group in self._groups.items()}
            for id, pieces in (await self._engines.partials(known, patience)).items():
                group_now = self._groups.get(id)
                if group_now is not None and group_now.turn == turns.get(id):
                    for member, piece in group_now.extend(pieces):
                        journal.journal(trajectory_id(id, member), piece)


def restore(
    controller: Controller, state: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Give the controller the groups that an earlier process had not trained; returns the tokens of those in flight."""
    for group in unfinished:
        failures = state.failures.get(group.id, 0)
        controller.restore(group.id, group.admitted_version, group.trajectories, failures)
    return {
        group.id: GroupInFlight(
            ended={completion.member: completion for completion in group.completions},
            prefixes=dict(group.prefixes),
            journaled={completion.member for completion in group.completions},
        )
        for group in unfinished
        if not group.trajectories
    }
