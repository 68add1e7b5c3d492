"""Sessions of a run: trajectories in progress, with their turns and calls in the ledger.

engine ─► tokens ─► InFlight ─┐
workflow ─► calls ─► Session ─┴─► ledger ─► after a crash: `sessions_of_run(..., unfinished)`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from stretto_workflows.session import MemoryRecord, OpenSession, Session, WholeTurns

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.store.ledger.ledger import Ledger

#: Name of the fact with the number of segments that versions of stretto which told other prompts have recorded, by
#: trajectory.
_EARLIER = "rendered_earlier"


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


async def persistently(whole: WholeTurns, request: TurnRequest) -> Segment:
    """Sample one turn by `whole`, from its beginning again if its engine is lost; returns its segment. Raises
    EngineLost if more than three engines are lost with it; engines that leave the run do not count."""
    for attempt in attempts():
        with attempt:
            return await whole(request)
    raise AssertionError("the last attempt raises")


def sessions_of_evaluation(generate: Generate, count: Callable[[Completion], None]) -> OpenSession:
    """Return a function that opens the session of a trajectory of an evaluation.

    The session's record is kept in memory, not in the ledger. A turn whose engine is lost is sampled again.

    Args:
        generate: sends requests to an engine.
        count: called with each sampled turn, as a completion.
    """

    def opened(id: str, prompt: tuple[int, ...], seed: int) -> Session:
        record = MemoryRecord()
        whole = WholeTurns(generate, record, id)

        async def sample(request: TurnRequest) -> Segment:
            segment = await persistently(whole, request)
            count(Completion(id, 0, segment))
            return segment

        return Session(id, prompt, seed, sample, record)

    return opened


def sessions_of_run(
    in_flight: InFlight, ledger: Ledger, unfinished: Sequence[UnfinishedGroup], *, renders: bool = False
) -> OpenSession:
    """Return a function that opens the session of a trajectory of a run; call it once for each trajectory. The
    session's turns and calls are recorded in the ledger. Those that an earlier process has recorded, in the groups
    `unfinished`, are returned from the record when the program requests them again. `renders`: prompts are rendered
    from messages, so it is recorded which turns an earlier version of stretto has begun."""
    restored = {
        trajectory_id(group.id, member): found
        for group in unfinished
        if not group.trajectories
        for member, found in group.members.items()
    }
    earlier = ledger.get(_EARLIER, dict[str, int]) if renders else {}
    if earlier is None:  # the first process of this version
        earlier = {id: len(found.segments) for id, found in restored.items() if found.segments}
        ledger.put(_EARLIER, earlier)

    def opened(id: str, prompt: tuple[int, ...], seed: int) -> Session:
        known, record = restored.pop(id, UnfinishedMember()), LedgerRecord(ledger, id)
        in_flight.begin(id, known.segments)
        sampler = partial(in_flight.turn, id)
        return Session(id, prompt, seed, sampler, record, known.segments, known.calls, earlier.get(id, 0))

    return opened
