"""Encoding the records of trajectories in flight: tokens of their segments, piece by piece, and calls of their
sessions.

    piece    seal · segment                                the first segment of a trajectory, all of a single turn
             seal · [index of the segment, segment]        any other

The pieces of one segment are in order; pieces of different segments may alternate. The first piece of a segment names
its parent. A call is recorded when it begins, with its request, and again when its reply has come.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from stretto.core.events import RecordedCall
from stretto.core.records import NOTHING, Record, Segment
from stretto.store.ledger.rows import segment_of
from stretto.store.ledger.seals import SIZE, check, seal

_PIECES = "SELECT payload FROM partials WHERE key = ? ORDER BY begin"
_BEGINS = "SELECT begin, payload FROM partials WHERE key = ? ORDER BY begin"
_DELETE_PIECE = "DELETE FROM partials WHERE key = ? AND begin = ?"
_CALLS = "SELECT number, asked, reply, seal FROM calls WHERE key = ? ORDER BY number"
_PAIR = b"\x92"  # begins a MessagePack array of two

_encode = msgspec.msgpack.Encoder().encode
_parts = msgspec.msgpack.Decoder(list[Any]).decode


#: Runs an SQL statement on the ledger, by (statement, parameters); returns its rows.
Query = Callable[[str, tuple[int, ...]], list[Any]]


class UnfinishedMember(Record, frozen=True):
    """The recorded segments and calls of a trajectory in flight, each in order.

    If a segment has no record but a later one has, its place is taken by an empty segment without a parent.
    """

    segments: tuple[Segment, ...] = ()
    calls: tuple[RecordedCall, ...] = ()


def encode_piece(id: str, piece: Segment, node: int = 0) -> bytes:
    """Encode a piece of segment `node` (an index) of the trajectory `id`, with a checksum in front."""
    body = _encode((node, piece) if node else piece)
    return seal(id, body) + body


def decode_piece(id: str, sealed: bytes) -> tuple[int, Segment]:
    """Decode one piece of the trajectory `id`; returns the index of its segment, and the piece. The last piece of a
    sampled segment has a stop reason. Raises StoreError if the bytes are damaged: the checksum does not match."""
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, body), f"a piece of trajectory {id}")
    parts = _parts(body)
    return (parts[0], segment_of(parts[1])) if body[:1] == _PAIR else (0, segment_of(parts))


def segments_of(pieces: Iterable[tuple[int, Segment]]) -> tuple[Segment, ...]:
    """Join the pieces of one trajectory, given as (segment index, piece), to whole segments, in order of the index. An
    index without a piece, below the highest one, gets an empty segment. Without pieces the result is empty."""
    found: dict[int, list[Segment]] = {}
    for node, piece in pieces:
        found.setdefault(node, []).append(piece)
    nothing = [Segment(parent=NOTHING)]
    return tuple(Segment.whole(found.get(node, nothing)) for node in range(max(found, default=-1) + 1))


def retraction(query: Query, id: str, key: int, count: int, node: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield SQL statements, each with its parameters, that delete all tokens but the first `count` of a segment, and
    its end (the stop reason). The caller runs them.

    Args:
        query: runs a statement on the ledger.
        id, key: id and row key of the trajectory.
        count: number of tokens to keep; pieces are deleted whole, so it must be the end of a piece.
        node: index of the segment.

    Raises:
        StoreError: a piece is damaged.
    """
    told = 0
    for begin, sealed in query(_BEGINS, (key,)):
        place, piece = decode_piece(id, sealed)
        told += piece.length if place == node else 0
        if place == node and (told > count or piece.stop_reason is not None):  # an end may have no tokens
            yield _DELETE_PIECE, (key, begin)


def read_calls(connection: sqlite3.Connection, id: str, key: int) -> Iterator[RecordedCall]:
    """Yield the recorded calls of the trajectory `id` with row key `key`, in order; the reply of one that has not ended
    is None. Raises StoreError if a call is damaged."""
    for number, asked, reply, sealed in connection.execute(_CALLS, (key,)):
        check(sealed, seal(id, number, asked, reply), f"call {number} of trajectory {id}")
        yield RecordedCall(number, asked, reply)


def read_member(connection: sqlite3.Connection, id: str, key: int, ledger_format: int) -> UnfinishedMember:
    """Read the recorded segments and calls of the trajectory `id` with row key `key`; both may be empty.
    `ledger_format`: of the ledger (``PRAGMA user_version``). Raises StoreError if a piece or a call is damaged."""
    pieces = (decode_piece(id, sealed) for (sealed,) in connection.execute(_PIECES, (key,)))
    calls = read_calls(connection, id, key) if ledger_format > 4 else ()  # earlier formats have no calls
    return UnfinishedMember(segments_of(pieces), tuple(calls))
