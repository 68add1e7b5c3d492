"""Recompute the checksums of a ledger. This code is independent of the code that writes them.

A checksum is XXH3 (64 bits) of MessagePack, of

    groups      [key, id, prompt, members, admitted version, prompt tokens]; in format 2 [id, prompt, admitted version]
    payloads    [trajectory, [outcome, reward, stop reason, interruptions], body]; the checksum precedes the body
    partials    [trajectory, body]; likewise, of each piece
    calls       [trajectory, number, asked, reply], since format 5
    steps       [step, version, oldest trainable, [[group, prompt tokens, [trajectory, ..]], ..]]; if groups have an
                oldest trainable version of their own, also [[group, oldest trainable], ..] of these, sorted by group
    meta        [name, value]

where a trajectory is [id, segments, outcome, reward]. A segment has its first five fields (the names of its engines
are not covered), then parent and reward if at least one of them is set. In format 2 a trajectory is [completion,
outcome, reward].

Since format 6 a segment is packed: [columns, number of tokens, [[version, tokens], ..], checksum], followed by the
other fields; columns are the token ids (int32) and the log-probabilities (float32 or float64). Its checksum covers
the number, the versions and the bytes of the columns. The checksum of a step has 128 bits; of each segment it covers
[checksum, interruptions, stop reason, parent, reward].

Since format 3 there are also checksums of whole rows, in the order of their columns:

    trajectories    all of them
    steps           all but published_version and metrics, which come later; the batch's checksum is the last
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from stretto.core.errors import UNREADABLE

CHECKSUM_BYTES, _STEP_BYTES = 8, 16  # the latter since format 6
_ID_BYTES = 4
_ABSENT = ((), None, "", None)  # last fields of a segment
_OF_SEGMENT = 5  # fields of a segment that the checksum of a step covers
_PARENT, _REWARD = 6, 8  # fields that it also covers if either is set; absent before format 5

_GROUPS = "SELECT id, key, id, prompt_id, members, admitted_version, prompt_token_ids, seal FROM groups ORDER BY key"
_OLD_GROUPS = "SELECT id, id, prompt_id, admitted_version, seal FROM groups ORDER BY key"
_TRAJECTORIES = """
    SELECT id || '/' || member, trajectories.* FROM trajectories JOIN groups ON groups.key = group_key
    ORDER BY trajectories.key
"""
_STEP_ROWS = """
    SELECT step, step, version, oldest_trainable, trajectories, trained_tokens, masked_tokens, staleness, batch,
        committed, seal, row_seal
    FROM steps ORDER BY step
"""
_PAYLOADS = """
    SELECT id || '/' || member, state, verdict, reward, stop_reason, interrupted, payload
    FROM trajectories JOIN groups ON groups.key = group_key LEFT JOIN payloads ON payloads.key = trajectories.key
    WHERE payload IS NOT NULL OR state = 'buffered' ORDER BY trajectories.key
"""
_PARTIALS = """
    SELECT id || '/' || member, payload FROM partials JOIN trajectories ON trajectories.key = partials.key
    JOIN groups ON groups.key = group_key ORDER BY partials.key, begin
"""
_CALLS = """
    SELECT number || ' of trajectory ' || id || '/' || member, id || '/' || member, number, asked, reply, calls.seal
    FROM calls JOIN trajectories ON trajectories.key = calls.key JOIN groups ON groups.key = group_key
    ORDER BY calls.key, number
"""
_STEPS = "SELECT step, version, oldest_trainable, batch, seal FROM steps ORDER BY step"
_META = "SELECT name, value, seal FROM meta ORDER BY name"
_TRAINED_GROUP = "SELECT key, members, prompt_token_ids FROM groups WHERE id = ?"
_TRAINED_TRAJECTORIES = """
    SELECT member, verdict, reward, stop_reason, interrupted, payload
    FROM trajectories JOIN payloads ON payloads.key = trajectories.key
    WHERE trajectories.key >= ?1 AND trajectories.key < ?1 + ?2
"""  # the key of a trajectory is its group's key plus its member number


def broken_checksums(connection: sqlite3.Connection, number: int) -> Iterator[str]:
    """Yield a sentence for each checksum that does not match, in a ledger of format `number`, and for each buffered
    trajectory without tokens.

    The checksum of a step covers the tokens that it trained on; without them (`store.keep_payloads`) it is not checked.
    """
    yield from _broken_rows(connection, _OLD_GROUPS if number == 2 else _GROUPS, "group")
    for trajectory, state, *columns, payload in connection.execute(_PAYLOADS):
        if payload is None:
            yield f"trajectory {trajectory} is {state} and its tokens are missing"
        elif not payload_fits(trajectory, columns, payload):
            yield _does_not_fit(f"trajectory {trajectory}")
    for trajectory, piece in connection.execute(_PARTIALS):
        if piece[:CHECKSUM_BYTES] != _checksum(trajectory, piece[CHECKSUM_BYTES:]):
            yield _does_not_fit(f"a piece of trajectory {trajectory}")
    for step, version, oldest, batch, found in connection.execute(_STEPS):
        if not _step_fits(connection, (step, version, oldest), json.loads(batch), found):
            yield _does_not_fit(f"the batch of step {step}")
    for name, value, found in connection.execute(_META):
        if found != _checksum(name, value):
            yield _does_not_fit(f"the fact {name!r}")
    if number > 2:
        yield from _broken_rows(connection, _TRAJECTORIES, "the row of trajectory")
        yield from _broken_rows(connection, _STEP_ROWS, "the row of step")
    if number > 4:
        yield from _broken_rows(connection, _CALLS, "call")


def broken_files(folder: Path, start: Mapping[str, Mapping[str, Mapping[str, object]]]) -> Iterator[str]:
    """Yield a sentence for each file of a run's start that is missing or has changed. `start`: recorded size and XXH3
    checksum (128 bits), by folder and file."""
    for name, files in start.items():
        for file, seal in files.items():
            path = folder / name / file
            if not path.is_file():
                yield f"{path} is missing"
            elif (size := path.stat().st_size) != seal["size"]:
                yield f"{path} has {size} bytes, and had {seal['size']} when the run started"
            elif (found := _file_checksum(path)) != seal["xxh3"]:
                yield f"{path} has checksum {found}, and had {seal['xxh3']} when the run started"


def payload_fits(trajectory: str, columns: Sequence[object], payload: bytes) -> bool:
    """Whether the checksum with which the payload of a trajectory begins matches the rest and `columns`. `trajectory`:
    its id; `columns`: its outcome, reward, stop reason and interruptions."""
    return payload[:CHECKSUM_BYTES] == _checksum(trajectory, columns, payload[CHECKSUM_BYTES:])


def segments_of(bulk: Sequence[Any]) -> list[list[Any]] | None:
    """Return the segments of a decoded payload; None in format 2, which has a single turn without segments."""
    return bulk[0] if isinstance(bulk[1], str) else None


def _step_fits(
    connection: sqlite3.Connection, numbers: tuple[object, ...], batch: Sequence[Sequence[Any]], found: bytes
) -> bool:
    groups = []
    own = sorted((group, oldest[0]) for group, _, *oldest in batch if oldest)
    for group, members, *_ in batch:
        key, count, prompt = connection.execute(_TRAINED_GROUP, (group,)).fetchone() or (0, 0, None)
        trajectories = {row[0]: row[1:] for row in connection.execute(_TRAINED_TRAJECTORIES, (key, count))}
        if prompt is None or any(member not in trajectories for member in members):
            return True
        try:
            trained = [_trained(len(found), group, member, *trajectories[member]) for member in members]
            groups.append((group, msgspec.msgpack.decode(prompt), trained))
        except (ValueError, *UNREADABLE):
            return False  # it cannot be decoded
    content = (*numbers, groups, *([own] if own else []))
    return found == (_longer_checksum if len(found) == _STEP_BYTES else _checksum)(*content)


def _trained(
    size: int, group: str, member: int, outcome: str, reward: float, stop_reason: str, interrupted: int, payload: bytes
) -> tuple[object, ...]:
    """Return the part of a trajectory that the checksum of a step covers, made from the columns of its row. `size`:
    bytes of that checksum, 16 since format 6."""
    bulk = msgspec.msgpack.decode(payload[CHECKSUM_BYTES:])
    if (segments := segments_of(bulk)) is not None:
        decisive = _decisive_packed if size == _STEP_BYTES else _decisive
        return f"{group}/{member}", [decisive(segment) for segment in segments], outcome, reward
    tokens, logprobs, versions, _ = bulk
    completion = {
        "request": group,
        "member": member,
        "token_ids": tokens,
        "behavior_logprobs": logprobs,
        "versions": versions,
        "stop_reason": stop_reason,
        "interrupted": interrupted,
        "top_logprobs": (),
    }
    return completion, outcome, reward


def counted(segment: Sequence[Any]) -> list[Any]:
    """Return a segment's number of tokens, its number of log-probabilities, its versions in order as (version, number
    of tokens), and its other fields, as they were before format 6. Raises ValueError if packed columns are broken."""
    columns, tokens, versions, *further = segment
    if not isinstance(columns, bytes):
        stamps = tuple((version, len([*alike])) for version, alike in groupby(versions))
        return [len(columns), len(tokens), stamps, *further]
    ids = min(len(columns), _ID_BYTES * tokens)
    logprobs = len(columns) - ids
    size = _ID_BYTES if logprobs == ids else 2 * _ID_BYTES
    if ids % _ID_BYTES or logprobs % size:
        raise ValueError(f"{len(columns)} bytes are not the columns of {tokens} tokens")
    return [ids // _ID_BYTES, logprobs // size, tuple(map(tuple, versions)), *further[1:]]


def _decisive_packed(segment: list[Any]) -> list[object]:
    """Return what of a segment enters a step's checksum of 128 bits: one checksum of its tokens, log-probabilities and
    versions (0 without tokens), its interruptions, stop reason, parent and reward. A segment of an earlier format,
    buffered before the run was resumed by this version, is packed first."""
    if not isinstance(segment[0], bytes):
        segment = _packed(segment)
    columns, tokens, versions, _, interrupted, stop_reason, _, parent, _, reward = segment
    checksum = xxhash.xxh3_64(msgspec.msgpack.encode((tokens, versions)) + columns).intdigest() if tokens else 0
    return [checksum, interrupted, stop_reason, parent, reward]


def _packed(segment: list[Any]) -> list[Any]:
    ids, logprobs, versions, interrupted, stop_reason, *further = segment
    single = array("f", logprobs)
    columns = array("i", ids).tobytes() + (single if single.tolist() == logprobs else array("d", logprobs)).tobytes()
    stamps = [[version, len([*alike])] for version, alike in groupby(versions)]
    further += _ABSENT[len(further) :]
    return [columns, len(ids), stamps, 0, interrupted, stop_reason, *further]


def _decisive(segment: Sequence[object]) -> list[object]:
    further = [*segment[_PARENT : _PARENT + 1], *segment[_REWARD:]]
    return [*segment[:_OF_SEGMENT], *(further if any(value is not None for value in further) else [])]


def _broken_rows(connection: sqlite3.Connection, statement: str, what: str) -> Iterator[str]:
    for name, *content, found in connection.execute(statement):
        if found != _checksum(*content):
            yield _does_not_fit(f"{what} {name}")


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _checksum(*content: object) -> bytes:
    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(content))


def _longer_checksum(*content: object) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(content))


def _does_not_fit(what: str) -> str:
    return f"{what} is not what was written: its checksum does not fit"
