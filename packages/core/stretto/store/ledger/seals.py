"""Seals: checksums of the ledger's rows. SQLite notices a torn page, not a flipped bit in the middle of one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Segment, Trajectory

SIZE = 8  #: bytes of a seal
_PACKED = 6  # since this format, tokens are packed

Value = TypeVar("Value")

_encode = msgspec.msgpack.Encoder().encode

META = "SELECT name, value, seal FROM meta"
_OLD_ROWS = {"groups": "SELECT id, prompt_id, admitted_version, seal FROM groups", "meta": META}
#: By table: the sealed columns, and the seal.
_ROWS = {
    "groups": "SELECT * FROM groups",
    "trajectories": "SELECT * FROM trajectories",
    "steps": "SELECT step, version, oldest_trainable, trajectories, trained_tokens, masked_tokens, staleness, batch,"
    " committed, seal, row_seal FROM steps",
    "meta": META,
}


def seal(*content: object) -> bytes:
    """XXH3 checksum (64 bits) of the content, in order."""
    return xxhash.xxh3_64_digest(_encode(content))


def find_fact(rows: Iterable[tuple[str, str, object]], path: Path, name: str, kind: type[Value]) -> Value | None:
    """Value of the table ``meta`` under `name`, or None. All `rows` are checked, since damage may be in a name.

    Raises:
        StoreError: a row is damaged.
    """
    facts = dict[str, str]()
    for known, value, sealed in rows:
        check(sealed, seal(known, value), f"{path}: {known}")
        facts[known] = value
    return msgspec.json.decode(facts[name], type=kind) if name in facts else None


def batch_seal(batch: Batch, number: int = 6) -> bytes:
    """Checksum of all data of a batch that affect the weights: tokens, log-probabilities, versions, rewards, and their
    order. `number` is the format in which its step is on record; since 6, the tokens are there by their own checksum,
    and the seal has twice the bytes."""
    groups = [
        (group.id, group.prompt.token_ids, [_sealed(group.id, trajectory, number) for trajectory in group.trajectories])
        for group in batch.groups
    ]
    own = [sorted(batch.oldest_by_group.items())] if batch.oldest_by_group else []
    content = (batch.step, batch.version, batch.oldest_trainable, groups, *own)
    return seal(*content) if number < _PACKED else xxhash.xxh3_128_digest(_encode(content))


def format_of_step(sealed: bytes, number: int) -> int:
    """The format in which a step is on record, in a ledger of format `number`; a resumed run may have earlier ones."""
    return min(number, _PACKED - 1) if len(sealed) == SIZE else number


def _sealed(group: str, trajectory: Trajectory, number: int) -> tuple[object, ...]:
    verdict = trajectory.verdict
    if number > 2:
        decisive = _decisive if number < _PACKED else _decisive_packed
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
    """Fields of a segment that affect the weights; parent and reward only if it has either."""
    tokens = (segment.token_ids, segment.behavior_logprobs, segment.versions)
    fields = (*tokens, segment.interrupted, segment.stop_reason)
    plain = segment.parent is None and segment.reward is None
    return fields if plain else (*fields, segment.parent, segment.reward)


def _decisive_packed(segment: Segment) -> tuple[object, ...]:
    return segment.checksum, segment.interrupted, segment.stop_reason, segment.parent, segment.reward


def check(found: object, expected: bytes, what: str) -> None:
    """Compare a seal with the expected one.

    Raises:
        StoreError: they differ, so the data read are damaged.
    """
    if found != expected:
        raise StoreError(f"{what} is not what was written: its checksum does not fit")


def check_rows(connection: sqlite3.Connection, path: Path) -> None:
    """Check that no row is damaged or missing, payloads excepted (they have their own seals). Later queries on the
    connection see the checked state, even while the run writes.

    Raises:
        StoreError: names the first damaged or missing row.
    """
    connection.execute("BEGIN")
    for (found,) in connection.execute("PRAGMA integrity_check(1)"):
        if found != "ok":
            raise StoreError(f"{path}: is damaged: {found}")
    for table, row, *_ in connection.execute("PRAGMA foreign_key_check"):
        raise StoreError(f"{path}: row {row} of {table} belongs to a row that is missing")
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    for table, statement in (_OLD_ROWS if number == 2 else _ROWS).items():
        for *content, found in connection.execute(statement):
            check(found, seal(*content), f"{path}: row {content[0]} of {table}")
    for (step,) in connection.execute("SELECT step FROM steps WHERE published_version != step"):
        raise StoreError(f"{path}: step {step} did not publish version {step}")
    issued, known = connection.execute(
        "SELECT (SELECT coalesce(sum(members), 0) FROM groups), (SELECT count(*) FROM trajectories)"
    ).fetchone()
    if issued != known:
        raise StoreError(f"{path}: {issued} trajectories were issued, and {known} have a row")
