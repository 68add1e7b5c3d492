"""Completions in flight: journaled while they are generated. When an engine is lost, another one continues them.

engine ─► completions that have ended ─┐
engine ─► tokens so far, each second ──┴─► ledger (pieces) ─► after a crash: `restore`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from stretto.core.canary import is_of
from stretto.core.errors import EngineLeft, EngineLied, EngineLost, RefusedRequest, several
from stretto.core.forest import TurnRequest
from stretto.core.records import Completion, GenerateRequest, Partials, Segment, trajectory_id
from stretto.loop.engines.router import LOSSES

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.rollout.controller import Controller, ControllerState
    from stretto.store.ledger.reading import UnfinishedGroup


class Engines(Protocol):
    """The engines of a run: an `EnginePool`, or the `Rounds` of a synchronous run. Their methods say more."""

    def generate(self, request: GenerateRequest, /, *, least: int = 0) -> AsyncIterator[Completion]: ...

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials: ...


class _SegmentJournal(Protocol):
    """Journal of the tokens in flight, by trajectory id and segment index `node`: two methods of
    `store.ledger.ledger.Ledger`."""

    def journal(self, id: str, piece: Segment, node: int = 0) -> None: ...

    def retract(self, id: str, count: int, node: int = 0) -> None: ...


class _Prefix:
    """The journaled tokens of one completion. They are kept in pieces and joined on demand: joining at each arrival
    would copy all tokens each time."""

    def __init__(self, *pieces: Segment) -> None:
        self._pieces, self.tokens = [*pieces], sum(piece.length for piece in pieces)

    def extend(self, piece: Segment) -> None:
        self._pieces.append(piece)
        self.tokens += piece.length

    @property
    def segment(self) -> Segment:
        """All tokens as one segment; an empty segment if there are none."""
        if len(self._pieces) > 1:
            self._pieces = [Segment.whole(self._pieces)]
        return self._pieces[0] if self._pieces else Segment()


@dataclass
class GroupInFlight:
    """Progress of one group in flight, by member (index in the group): completions that have `ended`, and `prefixes`,
    the tokens that were journaled before a member ended. `members`, `request_id`, `serial`: of the open request, at
    whose start `prefixes` were `before`. `judging`: all have ended, and are judged next. A turn of a session is a group
    with one member: segment `node` of the trajectory with id `session`, to be sampled by version `least` or newer."""

    ended: dict[int, Completion] = field(default_factory=dict)
    prefixes: dict[int, _Prefix] = field(default_factory=dict)  # journaled tokens of members that have not ended
    before: dict[int, Segment] = field(default_factory=dict)  # `prefixes` at the time of the open request
    journaled: set[int] = field(default_factory=set)  # members journaled to their end
    members: tuple[int, ...] = ()  # members of the open request, in its order
    judging: bool = False  # all completions have ended, and are judged next
    serial: int = 0  # number of the open request; late results of earlier ones are ignored
    session: str = ""  # id of the trajectory whose segment `node` is this turn; "": no turn of a session
    node: int = 0
    least: int = 0  # oldest version that may sample it
    request_id: str = ""  # id of the open request
    calls: int = 0  # how often it was generated, cancelled calls included

    def request(self, of: GenerateRequest) -> GenerateRequest:
        """Return the next request to send to an engine for this group: `of`, the request for the whole group, for
        unfinished members only, with their journaled tokens as prefixes. A turn of a session gets a new id,
        and so does a group that is generated again.

        It becomes the *open request*, the only one whose results are accepted.
        """
        self.serial += 1
        self.before = {member: prefix.segment for member, prefix in self.prefixes.items()}
        # A client may request it again before the engine has aborted the first request: ids must differ. No other
        # group's id ends like this.
        again = f"{of.id}:{self.calls}" if self.calls > 1 else of.id
        self.request_id = f"{of.id}.{self.serial}" if self.session else again
        self.members = tuple(member for member in range(len(of.seeds)) if member not in self.ended)
        prefixes = tuple(self.before.get(member, Segment()) for member in self.members)
        seeds = tuple(of.seeds[member] for member in self.members)
        resumed = any(prefix.length for prefix in prefixes)
        return msgspec.structs.replace(of, id=self.request_id, seeds=seeds, prefixes=prefixes if resumed else ())

    def extend(self, pieces: Mapping[int, Segment]) -> Iterator[tuple[int, Segment]]:
        """Append new tokens to the prefixes, one member at each iteration. `pieces`: the tokens, by index in `members`
        of the open request. Yields (member, its new tokens); leaves out members that have ended."""
        for place, piece in pieces.items():
            member = self.members[place]
            if member not in self.ended:  # else its last tokens have arrived meanwhile
                if (prefix := self.prefixes.get(member)) is None:
                    prefix = self.prefixes[member] = _Prefix()
                prefix.extend(piece)
                yield member, piece

    def retract(self) -> Iterator[tuple[int, int]]:
        """Drop all that the open request has brought, completions that have ended too, and ignore what still arrives;
        takes effect while it is iterated. Yields (member, its number of tokens before that request) for each member
        that has lost something."""
        self.serial += 1
        for member in self.members:
            before = _Prefix(self.before.get(member, Segment()))
            if self.ended.pop(member, None) is not None or self.known(member) > before.tokens:
                self.prefixes[member] = before
                self.journaled.discard(member)
                yield member, before.tokens

    def pieces(self, id: str) -> Iterator[tuple[str, Segment, int]]:
        """Yield the tokens of ended members that are not journaled yet, as arguments for `_SegmentJournal.journal`, one
        member at each iteration, which counts as journaled to its end from then on. `id`: group id."""
        for member in sorted(self.ended.keys() - self.journaled):
            self.journaled.add(member)
            yield self.place(id, member, self.ended[member].segment.after(self.known(member)))

    def place(self, id: str, member: int, piece: Segment) -> tuple[str, Segment, int]:
        """Arguments for `_SegmentJournal.journal`: (trajectory id, `piece`, segment index). `id`: group id."""
        return (self.session or trajectory_id(id, member), piece, self.node)

    @property
    def segments(self) -> Iterator[Segment]:
        """What is known of each member."""
        yield from (completion.segment for completion in self.ended.values())
        yield from (prefix.segment for prefix in self.prefixes.values())

    @property
    def whole(self) -> int:
        """Number of sampled tokens, if all completions have ended; else 0: an engine counts the tokens of an unfinished
        request as wasted when it is aborted."""
        ended = self.judging or (bool(self.members) and self.ended.keys() >= set(self.members))
        return sum([completion.segment.length for completion in self.ended.values()]) if ended else 0

    def known(self, member: int) -> int:
        """Number of a member's tokens that were journaled while it was unfinished."""
        return self.prefixes[member].tokens if member in self.prefixes else 0


class InFlight:
    """Generates completions for the workflow, and journals their tokens, so that another engine, or a resumed run,
    continues them. Groups start with `generate` (single turns), or `begin` and `turn` (sessions), and end with
    `forget`."""

    def __init__(
        self, engines: Engines, journal: _SegmentJournal | None, restored: Mapping[str, GroupInFlight] | None = None
    ) -> None:
        """Prepare to generate on `engines`, and to record tokens in `journal`.

        Args:
            journal: gets the tokens in flight; None: they are not kept, so a lost group starts again from its first
                token.
            restored: groups that an earlier process of the run had in flight, by group id.
        """
        self._engines, self._journal = engines, journal
        self._groups: dict[str, GroupInFlight] = dict(restored or {})
        self._turns: dict[str, dict[str, int]] = {}  # tokens of each session's turns, by group
        self._ending = False
        self._keeping = asyncio.Lock()  # two callers at a time would journal the same tokens twice

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Generate the group of `request`; yields its completions in the order of the members, once the last has ended.

        If an engine is lost, the request is sent again with the journaled tokens as prefixes; without a journal it
        starts again. After EngineLied, all that this engine brought for the open request is dropped. After `end`, no
        request is sent, and this waits until it is cancelled.

        Raises:
            EngineLost: more than three engines were lost with this group, so the group may be the cause. Engines that
                left the run do not count.
            RefusedRequest: an engine refused the request.
            DeadlineExceeded: no engine took the request, or none answered, in time.
        """
        group = self._groups.setdefault(request.id, GroupInFlight())
        group.calls += self._journal is not None  # `Rounds`, which have none, know a group by its id
        try:
            losses = 0
            while len(group.ended) < len(request.seeds):
                if self._ending:
                    await asyncio.get_running_loop().create_future()  # wait: the run is about to cancel this
                try:
                    async for completion in self._engines.generate(group.request(request), least=group.least):
                        member = group.members[completion.member]
                        if (completion.request, completion.member) != (request.id, member):
                            completion = msgspec.structs.replace(completion, request=request.id, member=member)
                        group.ended.setdefault(member, completion)
                    if count := len(request.seeds) - len(group.ended):
                        raise EngineLost("an engine", f"ended {request.id} with {several(count, 'completion')} missing")
                except EngineLost as loss:  # another engine continues what is known
                    if self._journal is None:
                        group.ended.clear()
                    elif isinstance(loss, EngineLied):
                        for member, count in group.retract():
                            trajectory, _, node = group.place(request.id, member, Segment())
                            self._journal.retract(trajectory, count, node)
                    losses += not isinstance(loss, EngineLeft)
                    if losses > LOSSES and not self._ending:
                        raise
        finally:
            group.judging = len(group.ended) == len(request.seeds)
        for _, completion in sorted(group.ended.items()):
            yield completion

    def begin(self, session: str, restored: Sequence[Segment] = ()) -> None:
        """Allow turns of the trajectory with id `session` until its group is forgotten. `restored`: the trajectory's
        segments, in order, as an earlier process of the run has journaled them."""
        turns = self._turns.setdefault(session.rpartition("/")[0], {})
        turns.update({f"{session}:{node}": one.length for node, one in enumerate(restored) if one.sampled})

    async def turn(self, session: str, request: TurnRequest) -> Segment:
        """Sample one whole turn of the trajectory with id `session`, and return its tokens; with the id bound, this is
        a `stretto_workflows.session.Sampler`. A turn that was begun, by `request.node`, is continued.

        The turn is journaled before this returns, so the ledger never holds a later turn without it.

        Raises:
            EngineLost: more than three engines were lost with this turn, as for `generate`.
            DeadlineExceeded: no engine took the turn, or none answered, in time.
            RefusedRequest: an engine refused the turn, or the trajectory's group was not begun or is forgotten.
        """
        id, of = f"{session}:{request.node}", session.rpartition("/")[0]
        if of not in self._turns:
            raise _given_up(session)
        if (turn := self._groups.get(id)) is None:
            prefix = msgspec.structs.replace(request.prefix, parent=None, cause="")  # engines need not know
            known = {0: _Prefix(prefix)} if prefix.length else {}
            turn = GroupInFlight(prefixes=known, session=session, node=request.node, least=request.least)
            self._groups[id] = turn
            self._turns[of].setdefault(id, 0)
        asked = GenerateRequest(id, request.prompt, (request.seed,), request.sampling)
        async for completion in self.generate(asked):
            if self._groups.get(id) is not turn:
                raise _given_up(session)
            self._journal_ended(id, turn)
            self._turns[of][id] = completion.segment.length
            return completion.segment
        raise AssertionError("a request is one completion, or an error")

    def end(self) -> None:
        """Send no more requests, also after a loss: the run ends, and its completions are about to be aborted."""
        self._ending = True

    def forget(self, id: str, kept: int = 0) -> int:
        """Drop the group with this id, with its turns: it is judged or given up. `kept`: number of sampled tokens in
        its trajectories. Returns how many sampled tokens of whole groups and turns are in no trajectory; 0 for an
        unknown id. (The engines count those of aborted requests.)"""
        turns = self._turns.pop(id, {})
        groups = {one: group for one in (id, *turns) if (group := self._groups.pop(one, None)) is not None}
        ended = {one: whole for one, group in groups.items() if (whole := group.whole)}
        return max(0, sum((turns | ended).values()) - kept)

    def tainted(self, engine: str, version: int, open: Collection[str]) -> set[str]:
        """Ids of the groups with a request in `open` (ids), or with tokens of `engine` and of `version`."""
        return {
            group.session.rpartition("/")[0] or id
            for id, group in self._groups.items()
            if group.request_id in open or any(is_of(one, engine, version) for one in group.segments)
        }

    def sampled(self, id: str) -> int:
        """Number of sampled tokens received so far of the group with this id, all turns included; 0 if it is
        unknown."""
        parts = [group for name in (id, *self._turns.get(id, ())) if (group := self._groups.get(name)) is not None]
        ended = sum(completion.segment.length for group in parts for completion in group.ended.values())
        return ended + sum(
            group.known(member) for group in parts for member in group.prefixes.keys() - group.ended.keys()
        )

    async def keep(self, patience: float | None = None) -> None:
        """Fetch the new tokens of all groups in flight from the engines and journal them. A crash loses only tokens
        sampled after the last call. Does nothing without a journal.

        `patience`: seconds to wait for an engine, which replies between two decoding steps, else it is left out; None:
        `deadlines.answer`.
        """
        if (journal := self._journal) is None:
            return
        async with self._keeping:
            for id, group in self._groups.items():
                self._journal_ended(id, group)
            groups = ((id, group) for id, group in self._groups.items() if group.serial and not group.judging)
            asked = {group.request_id: (id, group, group.serial) for id, group in groups}
            known = {name: [group.known(member) for member in group.members] for name, (_, group, _) in asked.items()}
            for name, pieces in (await self._engines.partials(known, patience)).items():
                id, group, serial = asked[name]
                if self._groups.get(id) is group and group.serial == serial:
                    for member, piece in group.extend(pieces):
                        journal.journal(*group.place(id, member, piece))

    def _journal_ended(self, id: str, group: GroupInFlight) -> None:
        if self._journal is not None:
            for piece in group.pieces(id):
                self._journal.journal(*piece)


def _given_up(session: str) -> RefusedRequest:
    return RefusedRequest("session", f"{session} was given up", "another one")


def restore(
    controller: Controller, state: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Put the groups that an earlier process of the run left untrained, buffered or in flight, back into the
    controller.

    Args:
        state: state of the earlier controller; its count of failures per group is used.
        unfinished: the groups, as read from the ledger.

    Returns:
        The journaled tokens of the groups in flight, by group id (for `InFlight`).
    """
    for group in unfinished:
        failures = state.failures.get(group.id, 0)
        controller.restore(group.id, group.admitted_version, group.trajectories, failures, group.max_staleness)
    return {group.id: progress_of(group) for group in unfinished if not group.trajectories}


def progress_of(group: UnfinishedGroup) -> GroupInFlight:
    """Journaled tokens of a group whose completions are single turns (of several segments the first is read). A segment
    with a stop reason has ended; the others are prefixes to be continued."""
    known = {member: found.segments[0] for member, found in group.members.items() if found.segments}
    ended = {member: segment for member, segment in known.items() if segment.stop_reason is not None}
    return GroupInFlight(
        ended={member: Completion(group.id, member, segment) for member, segment in ended.items()},
        prefixes={member: _Prefix(segment) for member, segment in known.items() if member not in ended},
        journaled=set(ended),
    )
