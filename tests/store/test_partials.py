"""What a trajectory in flight has so far.

Promises: pieces of several segments, in any interleaving and over any number of crashes, are read as the segments that
they are pieces of; a call that must not be repeated is in the file when it begins and when it ends; both are gone when
the trajectory is judged.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import StoreError
from stretto.core.events import RecordedCall
from stretto.core.records import NOTHING, PROMPT, Segment, State, StopReason
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.partials import UnfinishedMember
from stretto.store.ledger.reading import read_unfinished
from tests.store import make
from tests.store.make import Make, ledger_at, sql

ID = "0.1.0/0"


def ledger_in(path: Path) -> Ledger:
    ledger = Ledger(path, StoreConfig(flush_seconds=60))
    ledger.issue("0.1.0", Make.prompt, 1, 0)
    return ledger


def crash(ledger: Ledger) -> None:
    """What is not flushed is lost."""
    ledger._connection.close()


def member(path: Path) -> UnfinishedMember:
    (group,) = read_unfinished(path)
    return group.members.get(0, UnfinishedMember())


def sampled(*tokens: int, parent: int | None = None, end: StopReason | None = None, cause: str = "") -> Segment:
    logprobs = [-0.25 * token for token in tokens]
    return make.sampled((0,) * len(tokens), tokens, end, behavior_logprobs=logprobs, parent=parent, cause=cause)


def test_what_is_taken_back_of_a_segment_is_gone_and_what_other_segments_have_stays(path: Path) -> None:
    with closing(ledger_in(path)) as ledger:
        pieces = sampled(2, 3), sampled(parent=0), sampled(4), sampled(7, 8), sampled(5)
        for piece, node in zip(pieces, (0, 1, 0, 1, 0), strict=True):
            ledger.journal(ID, piece, node)
        ledger.retract(ID, 2)
        crash(ledger)
    assert member(path).segments == (sampled(2, 3), sampled(7, 8, parent=0))
    with ledger_at(path, flush_seconds=60) as ledger:
        ledger.journal(ID, sampled(6))
        ledger.retract(ID, 3)  # nothing is behind it
        ledger.retract(ID, 0, node=1)
        ledger.flush()
        assert member(path).segments == (sampled(2, 3, 6), sampled(parent=0))
        ledger.journal(ID, sampled(end=StopReason.STOP))  # an end without a token of its own
        ledger.retract(ID, 3)
        assert member(path).segments == (sampled(2, 3, 6), sampled(parent=0))


def test_a_single_turn_is_written_without_a_place(path: Path) -> None:
    with closing(ledger_in(path)) as ledger:
        ledger.journal(ID, sampled(4, 5))
    [(begin, piece)] = sql(path, "SELECT begin, payload FROM partials")
    assert (begin, piece[8:9]) == (0, b"\x9a"), "a segment of ten fields"


def test_a_call_begins_once_and_ends_once(path: Path) -> None:
    with closing(ledger_in(path)) as ledger:
        ledger.begin_call(ID, 1, b"a", durable=False)
        for number in (0, 1):
            with pytest.raises(StoreError, match=rf"call {number} of trajectory 0\.1\.0/0 has begun before"):
                ledger.begin_call(ID, number, b"b", durable=False)
        ledger.end_call(ID, 1, b"c")
        for number in (1, 2):
            with pytest.raises(StoreError, match=rf"call {number} of .* was never begun, or has ended"):
                ledger.end_call(ID, number, b"d")
        ledger.settle(ID, State.FAILED, "lost")
        with pytest.raises(StoreError, match="its state is final"):
            ledger.begin_call(ID, 3, b"e", durable=True)


def test_pieces_and_calls_are_gone_when_the_trajectory_is_judged(path: Path) -> None:
    with closing(ledger_in(path)) as ledger:
        ledger.journal(ID, sampled(4))
        ledger.begin_call(ID, 0, b"a", durable=True)
        ledger.journal(ID, Segment.of((9,)), node=1)
        ledger.buffer(Make.group("0.1.0", Make.trajectory("0.1.0")))
        ledger.flush()
        for table in ("partials", "calls"):
            assert ledger._query(f"SELECT count(*) FROM {table}") == [(0,)]


def test_a_call_that_has_changed_is_named(path: Path) -> None:
    with closing(ledger_in(path)) as ledger:
        ledger.begin_call(ID, 0, b"a", durable=True)
        ledger.end_call(ID, 0, b"b")
    sql(path, "UPDATE calls SET reply = x'63'")
    for reading in (read_unfinished, ledger_in):
        with pytest.raises(StoreError, match=r"call 0 of trajectory 0\.1\.0/0 is not what was written"):
            reading(path)


Piece = tuple[int, Segment]


@st.composite
def journals(draw: st.DrawFn) -> tuple[list[Segment], list[Piece | None]]:
    """Segments, and an interleaving of their pieces; None is a crash behind a flush."""
    segments = list[Segment]()
    queues = list[list[Segment]]()
    for place in range(draw(st.integers(1, 4))):
        tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        parent = draw(st.sampled_from([None, NOTHING, PROMPT, *range(place)])) if place else None
        end = draw(st.sampled_from([None, *StopReason]))
        whole = sampled(*tokens, parent=parent, end=end) if draw(st.booleans()) else Segment.of(tokens, parent=parent)
        segments.append(whole)
        queues.append(list(pieces_of(whole, draw(st.integers(0, len(tokens))))))
    order = list[Piece | None]()
    while waiting := [place for place, queue in enumerate(queues) if queue]:
        place = draw(st.sampled_from(waiting))
        order.append((place, queues[place].pop(0)))
        order += [None] * draw(st.integers(0, 1))
    return segments, order


def pieces_of(segment: Segment, cut: int) -> Iterator[Segment]:
    """Two pieces of a sampled segment, either of which may be empty; a given one is one piece."""
    if not segment.sampled:
        yield segment
        return
    head = segment.token_ids[:cut], segment.behavior_logprobs[:cut], segment.versions[:cut]
    yield Segment.of(*head, parent=segment.parent, cause=segment.cause)
    yield segment.after(cut)


@settings(max_examples=20)
@given(journals())
def test_any_interleaving_over_any_crashes_is_read_as_the_segments_that_were_journaled(
    journal: tuple[list[Segment], list[Piece | None]],
) -> None:
    segments, order = journal
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = ledger_in(path)
        for entry in order:
            if entry is None:
                ledger.flush()
                crash(ledger)
                ledger = Ledger(path, StoreConfig(flush_seconds=60))
            else:
                node, piece = entry
                ledger.journal(ID, piece, node)
        ledger.close()
        assert member(path).segments == tuple(segments)


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[str, int, Segment, bool]]:
    """Pieces of segments and begins and ends of calls, as a session writes them; True flushes."""
    _, order = draw(journals())
    pieces = [entry for entry in order if entry is not None]
    events = [("piece", node, piece, False) for node, piece in pieces]
    calls, at = draw(st.integers(0, 3)), 0
    for number in range(calls):
        at = draw(st.integers(at, len(events)))
        durable = draw(st.booleans())
        events.insert(at, ("begin", number, Segment(), durable))
        if draw(st.booleans()):
            events.insert(draw(st.integers(at + 1, len(events))), ("end", number, Segment(), durable))
        at += 1
    return events


def told(ledger: Ledger, event: tuple[str, int, Segment, bool]) -> None:
    kind, number, piece, durable = event
    if kind == "piece":
        ledger.journal(ID, piece, number)
    elif kind == "begin":
        ledger.begin_call(ID, number, b"asked %d" % number, durable=durable)
    else:
        ledger.end_call(ID, number, b"reply %d" % number)


@given(sessions(), st.integers(0, 8))
@settings(max_examples=20)
def test_a_crash_loses_what_came_after_the_last_flush_and_nothing_before_it(
    events: list[tuple[str, int, Segment, bool]], crashes_after: int
) -> None:
    """A durable call flushes with it all that came before; what the session goes on with joins what was kept."""
    before, after = events[:crashes_after], events[crashes_after:]
    kept = before[: max((at + 1 for at, event in enumerate(before) if event[3]), default=0)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = ledger_in(path)
        ledger.flush()
        for event in before:
            told(ledger, event)
        crash(ledger)
        assert member(path) == expected(kept)
        ledger = Ledger(path, StoreConfig(flush_seconds=60))
        for event in before[len(kept) :] + after:  # it begins again, and is told what was lost once more
            told(ledger, event)
        ledger.close()
        assert member(path) == expected(events)


def expected(events: list[tuple[str, int, Segment, bool]]) -> UnfinishedMember:
    segments = dict[int, Segment]()
    calls = dict[int, RecordedCall]()
    for kind, number, piece, _ in events:
        if kind == "piece":
            segments[number] = segments[number] + piece if number in segments else piece
        else:
            reply = b"reply %d" % number if kind == "end" else None
            calls[number] = RecordedCall(number, b"asked %d" % number, reply)
    whole = tuple(segments.get(node, Segment.of(parent=NOTHING)) for node in range(max(segments, default=-1) + 1))
    return UnfinishedMember(whole, tuple(calls.values()))
