"""Completions that outlive their engine, and their run: their tokens are journaled, and another engine continues them.

engine ─► completions that have ended ─┐
engine ─► tokens so far, each second ──┴─► ledger (pieces) ─► after a crash: `restore`
                    │
                    └─► after the loss of an engine: the same request, at another one, behind those tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Partials, Segment, trajectory_id
from stretto.rollout.controller import Controller, ControllerState
from stretto.store.ledger.reading import UnfinishedGroup

#: Engines that one group may lose before its prompt is asked anew: the group may be what they die of.
LOSSES = 3


class Engines(Protocol):
    """Satisfied by `loop.engines.pool.EnginePool`."""

    def generate(self, request: GenerateRequest, /) -> AsyncIterator[Completion]: ...

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials: ...


class Journal(Protocol):
    """Satisfied by `store.ledger.ledger.Ledger`."""

    def journal(self, id: str, piece: Segment) -> None: ...


@dataclass
class GroupInFlight:
    """What is known of a group in flight, by member of the group."""

    ended: dict[int, Completion] = field(default_factory=dict)
    prefixes: dict[int, Segment] = field(default_factory=dict)  # journaled, of members whose end is not
    journaled: set[int] = field(default_factory=set)  # members whose end is journaled
    members: tuple[int, ...] = ()  # that the open request asks for, in its order
    judging: bool = False  # its last completion has come
    turn: int = 0  # counts requests: what comes of an earlier one is refused

    def request(self, of: GenerateRequest) -> GenerateRequest:
        """What is missing of the group's request."""
        self.turn += 1
        self.members = tuple(member for member in range(len(of.seeds)) if member not in self.ended)
        prefixes = tuple(self.prefixes.get(member, Segment()) for member in self.members)
        seeds = tuple(of.seeds[member] for member in self.members)
        resumed = any(prefix.token_ids for prefix in prefixes)
        return msgspec.structs.replace(of, seeds=seeds, prefixes=prefixes if resumed else ())

    def known(self, member: int) -> int:
        """Tokens of a member that are journaled."""
        return len(self.prefixes[member].token_ids) if member in self.prefixes else 0


class InFlight:
    """Generates for the workflow (satisfies `core.engine.Generate`)."""

    def __init__(self, engines: Engines, journal: Journal, restored: Mapping[str, GroupInFlight]) -> None:
        """`restored`: the groups that an earlier process of the run had in flight."""
        self._engines, self._journal = engines, journal
        self._groups: dict[str, GroupInFlight] = dict(restored)
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
            for loss in range(LOSSES + 1):
                try:
                    await self._request(request, group)
                    break
                except EngineLost:
                    if self._ending:
                        await asyncio.get_running_loop().create_future()  # until it is cancelled, which comes next
                    if loss == LOSSES:
                        raise
                    self._lost(group)
        finally:
            group.judging = len(group.ended) == len(request.seeds)
        for _, completion in sorted(group.ended.items()):
            yield completion

    async def _request(self, request: GenerateRequest, group: GroupInFlight) -> None:
        missing = group.request(request)
        if not missing.seeds:
            return
        async for completion in self._engines.generate(missing):
            member = group.members[completion.member]
            group.ended.setdefault(member, msgspec.structs.replace(completion, member=member))
        if count := len(request.seeds) - len(group.ended):
            raise EngineLost("an engine", f"ended {request.id} with {count} completions missing")

    def _lost(self, group: GroupInFlight) -> None:
        """An engine was lost with the group: another one continues what is known."""

    def end(self) -> None:
        """The run ends: an engine that gives a completion up now was asked to."""
        self._ending = True

    def forget(self, id: str) -> None:
        """The group is judged, or given up: it is in flight no more."""
        self._groups.pop(id, None)

    @property
    def unjudged(self) -> int:
        """Tokens of groups that no engine has any more and that are not judged yet."""
        whole = (group for group in self._groups.values() if group.judging)
        return sum(len(completion.token_ids) for group in whole for completion in group.ended.values())

    async def keep(self, patience: float | None = None) -> None:
        """Journal what is new in the groups in flight. To be called now and then: a crash costs what came since.

        `patience`: seconds to wait for an engine, which replies between two steps; None: as long as for a completion.
        """
        async with self._keeping:
            for id, group in self._groups.items():
                for member in group.ended.keys() - group.journaled:
                    piece = group.ended[member].segment.after(group.known(member))
                    self._journal.journal(trajectory_id(id, member), piece)
                    group.journaled.add(member)
            turns = {id: group.turn for id, group in self._groups.items()}
            known = {id: [group.known(member) for member in group.members] for id, group in self._groups.items()}
            for id, pieces in (await self._engines.partials(known, patience)).items():
                group_now = self._groups.get(id)
                if group_now is not None and group_now.turn == turns.get(id):
                    self._keep_pieces(id, group_now, pieces)

    def _keep_pieces(self, id: str, group: GroupInFlight, pieces: Mapping[int, Segment]) -> None:
        for place, piece in pieces.items():
            member = group.members[place]
            if member not in group.ended:  # else its last tokens have come meanwhile
                group.prefixes[member] = group.prefixes.get(member, Segment()) + piece
                self._journal.journal(trajectory_id(id, member), piece)


def restore(
    controller: Controller, state: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Give the controller back the groups that an earlier process had not trained; what was sampled of those in
    flight, by group."""
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
