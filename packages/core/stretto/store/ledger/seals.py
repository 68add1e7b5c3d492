"""Seals: checksums of the ledger's rows. SQLite itself notices a torn page, but not a flipped bit within a page."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.frames import encoded
from stretto.core.records import Batch, Segment, Trajectory

SIZE = 8  #: size of a seal in bytes
_PACKED = 6  # first format with packed tokens

Value = TypeVar("Value")

_encode = msgspec.msgpack.Encoder().encode

META = "SELECT name, value, seal FROM meta"
_OLD_ROWS = {"groups": "SELECT id, prompt_id, admitted_version, seal FROM groups", "meta": META}
#: By table: query for the columns that its seal covers, and the seal.
_ROWS = {
    "groups": "SELECT * FROM groups",
    "trajectories": "SELECT * FROM trajectories",
    "steps": "SELECT step, version, oldest_trainable, trajectories, trained_tokens, masked_tokens, staleness, batch,"
    " committed, seal, row_seal FROM steps",
    "meta": META,
}


def seal(*content: object) -> bytes:
    """Compute the XXH3 checksum (64 bits) of these values, in order."""
    return xxhash.xxh3_64_digest(_encode(content))


def fact_text(value: object) -> str:
    """Return the JSON of a fact, as it is written. Raises StoreError if it could not be read again: a number that is
    not finite, a lone surrogate."""
    try:
        return encoded(value).decode()
    except (UnicodeEncodeError, *UNREADABLE) as error:
        raise StoreError(f"a fact cannot be written: {error}") from error


def find_fact(rows: Iterable[tuple[str, str, object]], path: Path, name: str, kind: type[Value]) -> Value | None:
    """Find the fact `name` and decode it as `kind`; None if there is none. The seals of all rows are checked: the
    damage may be in a name.

    Args:
        rows: rows (name, value, seal) of the table ``meta``.
        path: of the ledger, for messages.

    Raises:
        StoreError: a row is damaged, or the fact is no `kind`.
    """
    facts = dict[str, str]()
    for known, value, sealed in rows:
        check(sealed, seal(known, value), f"{path}: {known}")
        facts[known] = value
    try:
        return msgspec.json.decode(facts[name], type=kind) if name in facts else None
    except UNREADABLE as error:
        raise StoreError(f"{path}: {name} cannot be read: {error}") from error


def batch_seal(batch: Batch, ledger_format: int = 6) -> bytes:
    """Compute the checksum of all data of a batch that affect the weights: tokens, log-probabilities, versions,
    rewards, and their order.

    `ledger_format`: in which the step was recorded. Since format 6 the checksum of each segment's packed tokens stands
    for the tokens, and the result has 16 bytes in place of 8.
    """
    groups = [
        (group.id, group.prompt.token_ids, [_sealed(group.id, one, ledger_format) for one in group.trajectories])
        for group in batch.groups
    ]
    own = [sorted(batch.oldest_by_group.items())] if batch.oldest_by_group else []
    content = (batch.step, batch.version, batch.oldest_trainable, groups, *own)
    return seal(*content) if ledger_format < _PACKED else xxhash.xxh3_128_digest(_encode(content))


def format_of_step(sealed: bytes, ledger_format: int) -> int:
    """Return the format in which a step was recorded, from the length of `sealed`, its batch seal. A ledger of format
    `ledger_format` may have steps of an earlier one, if the run was resumed by a newer stretto."""
    return min(ledger_format, _PACKED - 1) if len(sealed) == SIZE else ledger_format


def _sealed(group: str, trajectory: Trajectory, ledger_format: int) -> tuple[object, ...]:
    verdict = trajectory.verdict
    if ledger_format > 2:
        decisive = _decisive if ledger_format < _PACKED else _decisive_packed
        return trajectory.id, [decisive(segment) for segment in trajectory.segments], verdict.outcome, verdict.reward
    (segment,) = trajectory.segments
    completion = {
        "request": group,
        "member": trajectory.member,
        "token_ids": segment.token_ids,
        "behavior_logprobs": segment.behavior_logprobs,
        "versions": segment.versions,
        "stop_reason": segment.stop_reason,
        "interrupted": segment.interrupted,
        "top_logprobs": (),
    }
    return completion, verdict.outcome, verdict.reward


def _decisive(segment: Segment) -> tuple[object, ...]:
    """Fields of a segment that affect the weights, before format 6. Parent and reward are included only if the segment
    has either."""
    tokens = (segment.token_ids, segment.behavior_logprobs, segment.versions)
    fields = (*tokens, segment.interrupted, segment.stop_reason)
    plain = segment.parent is None and segment.reward is None
    return fields if plain else (*fields, segment.parent, segment.reward)


def _decisive_packed(segment: Segment) -> tuple[object, ...]:
    return segment.checksum, segment.interrupted, segment.stop_reason, segment.parent, segment.reward


def check(found: object, expected: bytes, what: str) -> None:
    """Compare a recorded seal (`found`, as SQLite returns it) with the one computed from the data. Raises StoreError if
    they differ: the data are damaged; `what` names the data in its message."""
    if found != expected:
        raise StoreError(f"{what} is not what was written: its checksum does not fit")


def check_rows(connection: sqlite3.Connection, path: Path) -> None:
    """Check that no row of the ledger at `path`, open in `connection`, is damaged or missing. Payloads, partials and
    calls are not checked here: each is checked when it is decoded.

    Begins a transaction and leaves it open: later queries on the connection see the checked state, even while the run
    writes.

    Raises:
        StoreError: a row is damaged or missing; names the first one.
    """
    connection.execute("BEGIN")
    for (found,) in connection.execute("PRAGMA integrity_check(1)"):
        if found != "ok":
            raise StoreError(f"{path}: is damaged: {found}")
    for table, row, *_ in connection.execute("PRAGMA foreign_key_check"):
        raise StoreError(f"{path}: row {row} of {table} belongs to a row that is missing")
    (ledger_format,) = connection.execute("PRAGMA user_version").fetchone()
    for table, statement in (_OLD_ROWS if ledger_format == 2 else _ROWS).items():
        for *content, found in connection.execute(statement):
            check(found, seal(*content), f"{path}: row {content[0]} of {table}")
    for (step,) in connection.execute("SELECT step FROM steps WHERE published_version != step"):
        raise StoreError(f"{path}: step {step} did not publish version {step}")
    issued, known = connection.execute(
        "SELECT (SELECT coalesce(sum(members), 0) FROM groups), (SELECT count(*) FROM trajectories)"
    ).fetchone()
    if issued != known:
        raise StoreError(f"{path}: {issued} trajectories were issued, and {known} have a row")
