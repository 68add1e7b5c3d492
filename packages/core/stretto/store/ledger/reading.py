"""Reading a ledger for a resume: the batches that were trained on, and the unfinished groups."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.errors import StoreError
from stretto.core.records import Batch, Group, Outcome, Prompt, Record, State, Trajectory, Verdict, trajectory_id
from stretto.store.ledger.partials import UnfinishedMember, read_member
from stretto.store.ledger.rows import BatchMember, decode_payload, oldest_unfinished
from stretto.store.ledger.schema import once_at_rest, reading, reading_on
from stretto.store.ledger.seals import META, Value, batch_seal, check, find_fact, format_of_step, seal
from stretto.store.totals import OnRecord

_STEPS = "SELECT step, version, oldest_trainable, batch, seal FROM steps WHERE step > ? AND step <= ? ORDER BY step"
_GROUP = "SELECT key, members, prompt_id, admitted_version, prompt_token_ids FROM groups WHERE id = ?"
_TRAJECTORIES = """
    SELECT member, verdict, reward, stop_reason, interrupted, payload
    FROM trajectories LEFT JOIN payloads ON payloads.key = trajectories.key
    WHERE trajectories.key >= ? AND trajectories.key < ?
"""
_STATES = "SELECT state, count(*), sum(tokens), sum(verdict IS NULL) FROM trajectories GROUP BY state"
_MASKED = "SELECT coalesce(sum(masked_tokens), 0) FROM steps"
_LIVE = """
    SELECT groups.id, prompt_id, admitted_version, groups.key, members, prompt_token_ids, groups.seal,
        member, trajectories.key, state,
        verdict, reward, stop_reason, interrupted, payload
    FROM trajectories JOIN groups ON groups.key = group_key LEFT JOIN payloads USING (key)
    WHERE trajectories.key >= ? AND state IN ('in_flight', 'buffered') ORDER BY trajectories.key
"""

BOUNDS = "bounds"  #: name of the fact with each `BoundChange` of the run

_tokens = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_membership = msgspec.json.Decoder(list[BatchMember]).decode


class UnfinishedGroup(Record, frozen=True):
    """A group that is buffered or in flight.

    A buffered group has `trajectories`. A group in flight has none, and `members`: by member number, the recorded
    segments and calls of those that have any. A single turn is one segment; it has ended if it has a stop reason.
    `max_staleness`: the bound when it was admitted; None: the run's first bound.
    """

    id: str
    prompt_id: str
    admitted_version: int
    trajectories: tuple[Trajectory, ...] = ()
    members: Mapping[int, UnfinishedMember] = {}
    max_staleness: int | None = None  # the bound when it was admitted; None: the run's first bound


def read_batches(path: Path, after: int, until: int) -> Iterator[Batch]:
    """Yield the batches of the steps ``after + 1`` to ``until`` in the ledger at `path`, as they were trained on. Their
    prompts have token ids, but no text. Errors are raised while the batches are iterated.

    Raises:
        StoreError: a step or a payload (``store.keep_payloads``) is missing, or the file is damaged.
    """
    wanted = True
    while wanted:  # again behind the last batch, which its seal has proven, if a run began to write meanwhile
        with reading_on(path) as connection:
            for read in _batches(path, connection, after, until):
                yield read
                after = read.step
            wanted = False


def _batches(path: Path, connection: sqlite3.Connection, after: int, until: int) -> Iterator[Batch]:
    (ledger_format,) = connection.execute("PRAGMA user_version").fetchone()
    rows = connection.execute(_STEPS, (after, until)).fetchall()
    if (found := [row[0] for row in rows]) != list(range(after + 1, until + 1)):
        raise StoreError(f"{path}: steps {after + 1} to {until} are wanted, on record are {found}")
    for step, version, oldest_trainable, batch, sealed in rows:
        placed = _membership(batch)
        groups = tuple(_trained(path, connection, one.group, one.members) for one in placed)
        own = {one.group: one.oldest_trainable for one in placed if one.oldest_trainable is not None}
        read = Batch(step, version, groups, oldest_trainable, own)
        check(sealed, batch_seal(read, format_of_step(sealed, ledger_format)), f"{path}: the batch of step {step}")
        yield read


def read_unfinished(path: Path) -> list[UnfinishedGroup]:
    """Read all groups of the ledger at `path` that are in flight or buffered, in the order of their admission; empty if
    there are none.

    Raises:
        StoreError: the payload of a buffered trajectory is missing, or the file is missing or damaged.
    """

    def read() -> list[UnfinishedGroup]:
        with reading(path) as connection:
            (ledger_format,) = connection.execute("PRAGMA user_version").fetchone()
            facts = connection.execute(META).fetchall()
            rows = connection.execute(_LIVE, (oldest_unfinished(facts, path),)).fetchall()
            groups = groupby(rows, key=lambda row: row[0])
            changes = find_fact(facts, path, BOUNDS, list[BoundChange]) or []
            return [_unfinished(path, connection, list(group), ledger_format, changes) for _, group in groups]

    return once_at_rest(path, read)


def tokens_on_record(connection: sqlite3.Connection) -> OnRecord:
    """Count the sampled tokens in the ledger by the state of their trajectory. Masked tokens of trained trajectories
    count as masked, not as trained."""
    return states_on_record(connection)[1]


def states_on_record(connection: sqlite3.Connection) -> tuple[dict[str, int], OnRecord]:
    """Return (number of trajectories in the ledger by their state, `tokens_on_record`). States without any are left
    out. The whole table is read, once."""
    found = connection.execute(_STATES).fetchall()
    rows = {state: (tokens, unjudged) for state, _, tokens, unjudged in found}
    ((masked,),) = connection.execute(_MASKED)
    tokens = {name: rows.get(name, (0, 0))[0] for name in ("trained", "buffered", "filtered", "expired", "failed")}
    unjudged = {f"{name}_unjudged": rows.get(name, (0, 0))[1] for name in ("expired", "failed")}
    on_record = OnRecord(**tokens | unjudged | {"masked": masked, "trained": tokens["trained"] - masked})
    return {state: count for state, count, _, _ in found}, on_record


def last_step(path: Path) -> int:
    """The newest step whose batch is committed in the ledger at `path`; 0 if there is none. Raises StoreError if the
    file is missing or damaged."""

    def read() -> int:
        with reading(path) as connection:
            found: int = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]
            return found

    return once_at_rest(path, read)


def read_fact(path: Path, name: str, kind: type[Value]) -> Value | None:
    """Read the fact that `Ledger.put` stored under `name` in the ledger at `path`, as a `kind`; None if there is none.
    Raises StoreError if the file is missing or damaged, a fact in it is damaged, or the value is no `kind`."""

    def read() -> Value | None:
        with reading(path) as connection:
            return find_fact(connection.execute(META), path, name, kind)

    return once_at_rest(path, read)


def fact(connection: sqlite3.Connection, name: str, kind: type[Value]) -> Value | None:
    """Read the fact `name` from an open ledger and decode it as `kind`, without checking its seal; None if there is
    none. A value that is no `kind` raises msgspec's error, which `reading` makes a StoreError."""
    found = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return msgspec.json.decode(found[0], type=kind) if found else None


def _trained(path: Path, connection: sqlite3.Connection, id: str, members: Sequence[int]) -> Group:
    found = connection.execute(_GROUP, (id,)).fetchone()
    if found is None:
        raise StoreError(f"{path}: group {id} was trained on and never issued")
    key, wanted, prompt_id, admitted_version, tokens = found
    rows = {row[0]: row[1:] for row in connection.execute(_TRAJECTORIES, (key, key + wanted))}
    if tokens is None or any(member not in rows or rows[member][-1] is None for member in members):
        raise StoreError(f"{path}: the tokens of group {id} were not kept (store.keep_payloads)")
    return Group(
        id=id,
        prompt=Prompt(id=prompt_id, token_ids=_tokens(tokens), text="", answer=""),
        admitted_version=admitted_version,
        trajectories=tuple(_trajectory(id, member, *rows[member]) for member in members),
    )


def _trajectory(
    group: str, member: int, outcome: str, reward: float, stop_reason: str, interrupted: int, sealed: bytes
) -> Trajectory:
    id = trajectory_id(group, member)
    payload = decode_payload(id, (outcome, reward, stop_reason, interrupted), sealed)
    verdict = Verdict(outcome=Outcome(outcome), reward=reward, rewards=payload.rewards)
    return Trajectory(id, payload.segments, verdict, payload.text, payload.session)


def _unfinished(
    path: Path,
    connection: sqlite3.Connection,
    rows: Sequence[tuple[object, ...]],
    ledger_format: int,
    changes: Sequence[BoundChange],
) -> UnfinishedGroup:
    id, prompt_id, admitted_version, group_key, members, tokens, sealed = rows[0][:7]
    assert isinstance(group_key, int)
    bounds = [change.after for change in changes if change.name == "max_staleness" and change.key <= group_key]
    check(sealed, seal(group_key, id, prompt_id, members, admitted_version, tokens), f"{path}: group {id}")
    trajectories, unfinished = [], {}
    for row in rows:
        member, key, state, *columns = row[7:]
        assert isinstance(member, int)
        assert isinstance(key, int)
        if state == State.BUFFERED.value:
            if columns[-1] is None:
                raise StoreError(f"{path}: trajectory {id}/{member} is buffered, and its tokens are missing")
            trajectories.append(_trajectory(str(id), member, *columns))  # type: ignore[arg-type]  # columns of SQLite
            continue
        unfinished[member] = read_member(connection, trajectory_id(str(id), member), key, ledger_format)
    return msgspec.convert(
        {
            "id": id,
            "prompt_id": prompt_id,
            "admitted_version": admitted_version,
            "trajectories": tuple(trajectories),
            "members": {member: found for member, found in unfinished.items() if found.segments or found.calls},
            "max_staleness": bounds[-1] if bounds else None,
        },
        UnfinishedGroup,
    )
