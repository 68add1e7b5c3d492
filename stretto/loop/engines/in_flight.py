"""Answers that outlive their engine, and their run: what is written of them is journaled, and goes on elsewhere.

engine ─► answers that have ended ─┐
engine ─► tokens so far, a second ─┴─► ledger (partials) ─► after a crash: `restore`
                    │
                    └─► after the loss of an engine: the same group, at another one, behind those tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Partial, trajectory_id
from stretto.engine.wire import PartialTokens
from stretto.rollout.controller import Controller, ControllerState
from stretto.store.ledger.reading import UnfinishedGroup
from stretto.store.ledger.rows import PartialRow

#: Engines that one group may lose before its prompt is asked anew: the group may be what they die of.
_LOSSES = 3


class Generates(Protocol):
    """Satisfied by `loop.engines.pool.Fleet`."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]: ...

    async def written(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Sequence[PartialTokens]: ...


class PartialJournal(Protocol):
    """Satisfied by `store.ledger.ledger.Ledger`."""

    def write_on(self, id: str, partial: PartialRow) -> None: ...


@dataclass
class GroupInFlight:
    """What is known of a group in flight, by member of the group."""

    ended: dict[int, Completion] = field(default_factory=dict)
    begun: dict[int, Partial] = field(default_factory=dict)  # what is journaled of members whose end is not
    journaled: set[int] = field(default_factory=set)  # members that have ended and are journaled whole
    asked: tuple[int, ...] = ()  # the members that the open request asks for, in its order
    judging: bool = False  # its last answer has come
    turn: int = 0  # grows with every request: what comes of an earlier one is refused

    def request(self, of: GenerateRequest) -> GenerateRequest:
        """What is still wanted of the group's request."""
        self.turn += 1
        self.asked = tuple(member for member in range(len(of.seeds)) if member not in self.ended)
        begun = tuple(self.begun.get(member, Partial()) for member in self.asked)
        seeds = tuple(of.seeds[member] for member in self.asked)
        return msgspec.structs.replace(of, seeds=seeds, begun=begun if any(b.token_ids for b in begun) else ())

    def known(self) -> list[int]:
        """How many tokens are journaled of each answer that is asked for."""
        return [len(self.begun[member].token_ids) if member in self.begun else 0 for member in self.asked]


class InFlight:
    """Generates for the workflow (satisfies `rollout.protocols.Generate`).

    Args:
        begun: groups that a run which ended had in flight, with what was written of them.
        whole: a group that was lost is asked again from its first token, so that the numbers of an answer depend on
            nothing that happened on the way (synchronous runs, which are repeatable bit for bit).
    """

    def __init__(
        self, engines: Generates, journal: PartialJournal, begun: Mapping[str, GroupInFlight], whole: bool = False
    ) -> None:
        self._engines, self._journal, self._whole = engines, journal, whole
        self._groups: dict[str, GroupInFlight] = {} if whole else dict(begun)
        self._ending = False
        self._keeping = asyncio.Lock()  # what two ask for at the same time, both would journal

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """All answers of the group, when the last of them has ended, in the order of the members.

        Raises:
            EngineLost: so many engines were lost with this group that it may be the cause.
            RefusedRequest: an engine will not serve it.
        """
        group = self._groups.setdefault(request.id, GroupInFlight())
        try:
            for loss in range(_LOSSES + 1):
                try:
                    await self._ask(request, group)
                    break
                except EngineLost:
                    if self._ending:
                        await asyncio.get_running_loop().create_future()  # until it is cancelled, which comes next
                    if loss == _LOSSES:
                        raise
                    if self._whole:
                        group.ended.clear()
        finally:
            group.judging = len(group.ended) == len(request.seeds)
        for _, completion in sorted(group.ended.items()):
            yield completion

    async def _ask(self, request: GenerateRequest, group: GroupInFlight) -> None:
        wanted = group.request(request)
        if not wanted.seeds:
            return
        async for completion in self._engines.generate(wanted):
            member = group.asked[completion.member]
            group.ended.setdefault(member, msgspec.structs.replace(completion, member=member))
        if missing := len(request.seeds) - len(group.ended):
            raise EngineLost("an engine", f"ended {request.id} with {missing} answers missing")

    def end(self) -> None:
        """The run ends: an engine that gives an answer up now was asked to."""
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

        `patience`: seconds to wait for an engine, which replies between two steps; None: as long as for an answer.
        """
        if self._whole:
            return
        async with self._keeping:
            for id, group in self._groups.items():
                for member in group.ended.keys() - group.journaled:
                    self._keep_ended(id, member, group)
            turns = {id: group.turn for id, group in self._groups.items()}
            known = {id: group.known() for id, group in self._groups.items()}
            for written in await self._engines.written(known, patience):
                group_now = self._groups.get(written.request)
                if group_now is not None and group_now.turn == turns.get(written.request):
                    self._keep_written(group_now, written)

    def _keep_ended(self, id: str, member: int, group: GroupInFlight) -> None:
        completion, known = group.ended[member], len(group.begun.get(member, Partial()).token_ids)
        partial = PartialRow(
            token_ids=completion.token_ids[known:],
            behavior_logprobs=completion.behavior_logprobs[known:],
            versions=completion.versions[known:],
            interrupted=completion.interrupted,
            stop_reason=completion.stop_reason.value,
        )
        self._journal.write_on(trajectory_id(id, member), partial)
        group.journaled.add(member)

    def _keep_written(self, group: GroupInFlight, written: PartialTokens) -> None:
        member = group.asked[written.member]
        if member in group.ended:
            return  # its last tokens have come meanwhile
        before = group.begun.get(member, Partial())
        group.begun[member] = Partial(
            token_ids=before.token_ids + written.token_ids,
            behavior_logprobs=before.behavior_logprobs + written.behavior_logprobs,
            versions=before.versions + written.versions,
            interrupted=written.interrupted,
        )
        partial = PartialRow(
            token_ids=written.token_ids,
            behavior_logprobs=written.behavior_logprobs,
            versions=written.versions,
            interrupted=written.interrupted,
        )
        self._journal.write_on(trajectory_id(written.request, member), partial)


def restore(
    controller: Controller, standing: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Give the controller back the groups that a run which ended had not trained; what was written of those in flight,
    by group."""
    for group in unfinished:
        failures = standing.failures.get(group.id, 0)
        controller.restore(group.id, group.admitted_version, group.trajectories, failures)
    return {
        group.id: GroupInFlight(
            ended={completion.member: completion for completion in group.completions},
            begun=dict(group.begun),
            journaled={completion.member for completion in group.completions},
        )
        for group in unfinished
        if not group.trajectories
    }
