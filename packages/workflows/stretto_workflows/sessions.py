"""Sessions of a run: trajectories in progress, with their turns and calls in the ledger.

engine ─► tokens ─► InFlight ─┐
workflow ─► calls ─► Session ─┴─► ledger ─► after a crash: `TrajectorySessions(restored=...)`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stretto.core.engine import Generate
from stretto.core.forest import TurnRequest
from stretto.core.records import Completion, Segment, trajectory_id
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.router import attempts
from stretto.store.ledger.partials import UnfinishedMember
from stretto.store.ledger.reading import UnfinishedGroup
from stretto_workflows.session import MemoryRecord, Session, WholeTurns

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.store.ledger.ledger import Ledger


@dataclass(frozen=True)
class LedgerRecord:
    """The record of one session, in the ledger (satisfies `session.SessionRecord`). `id`: of its trajectory."""

    ledger: Ledger
    id: str

    def journal(self, node: int, piece: Segment) -> None:
        self.ledger.journal(self.id, piece, node)

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        self.ledger.begin_call(self.id, number, asked, durable=durable)

    def end_call(self, number: int, reply: bytes) -> None:
        self.ledger.end_call(self.id, number, reply)


class TrajectorySessions:
    """Opens the sessions of trajectories in flight; their turns and calls are recorded in the ledger."""

    def __init__(
        self, in_flight: InFlight, ledger: Ledger, restored: Mapping[str, UnfinishedMember] | None = None
    ) -> None:
        """Make sessions for the trajectories of a run. `restored`: segments and calls that an earlier process of the
        run has recorded, by trajectory id."""
        self._in_flight, self._ledger = in_flight, ledger
        self._restored = dict(restored or {})

    def open(self, id: str, prompt: tuple[int, ...], seed: int) -> Session:
        """Open the session of a trajectory, once. Turns and calls that an earlier process has recorded are returned
        from the record when the program requests them again.

        Args:
            id: trajectory id.
            prompt: token ids of the prompt.
            seed: seed of the trajectory, from which the seed of each turn is derived.
        """
        known = self._restored.pop(id, UnfinishedMember())
        record = LedgerRecord(self._ledger, id)
        self._in_flight.begin(id, known.segments)
        return Session(id, prompt, seed, partial(self._in_flight.turn, id), record, known.segments, known.calls)


@dataclass(frozen=True)
class PersistentTurns:
    """A sampler that samples a turn again, from its beginning, if its engine is lost (satisfies `session.Sampler`).
    `whole`: samples a turn once."""

    whole: WholeTurns

    async def __call__(self, request: TurnRequest) -> Segment:
        """Sample one turn; returns its segment. Raises EngineLost if more than three engines are lost with it."""
        for attempt in attempts():
            with attempt:
                return await self.whole(request)
        raise AssertionError("the last attempt raises")


def sessions_of_evaluation(
    generate: Generate, count: Callable[[Completion], None]
) -> Callable[[str, tuple[int, ...], int], Session]:
    """Return a function that opens a session of an evaluation, by (trajectory id, token ids of the prompt, seed).

    The session's record is kept in memory, not in the ledger. A turn whose engine is lost is sampled again.

    Args:
        generate: sends requests to an engine.
        count: called with each sampled turn, as a completion.
    """

    def opened(id: str, prompt: tuple[int, ...], seed: int) -> Session:
        record = MemoryRecord()
        turns = PersistentTurns(WholeTurns(generate, record, id))

        async def sample(request: TurnRequest) -> Segment:
            segment = await turns(request)
            count(Completion(id, 0, segment))
            return segment

        return Session(id, prompt, seed, sample, record)

    return opened


def unfinished_sessions(unfinished: Sequence[UnfinishedGroup]) -> dict[str, UnfinishedMember]:
    """Recorded segments and calls of the trajectories in flight, by trajectory id; for `TrajectorySessions`. Buffered
    groups have none."""
    return {
        trajectory_id(group.id, member): found
        for group in unfinished
        if not group.trajectories
        for member, found in group.members.items()
    }


def sessions_of_run(
    in_flight: InFlight, ledger: Ledger, unfinished: Sequence[UnfinishedGroup]
) -> Callable[[str, tuple[int, ...], int], Session]:
    """Return a function that opens a session of a run, by (trajectory id, token ids of the prompt, seed). `unfinished`:
    groups whose sessions continue from their record."""
    return TrajectorySessions(in_flight, ledger, unfinished_sessions(unfinished)).open
