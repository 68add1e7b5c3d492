"""The ledger: an SQLite file with the state of every trajectory of a run, from its issue to its end.

    issue ─► in_flight ─► buffered ─► trained
                 │            │
                 └────────────┴─────► filtered · expired · failed (each with its reason)

The ledger keeps two promises. *The balance*: at any moment, also after a crash, the number of issued trajectories is
the sum over all states. *The batch first*: when `commit_batch` returns, the members of the batch and their order are in
the file, written in one transaction. So each published update has its batch on record.

Changes are buffered and written together: before a batch is trained, once a second, when a group is issued
``flush_seconds`` or more after the last flush, and when a group has ended and payloads of 32 MiB wait. Facts and events
wait for one of these, so that changes that belong together are in one transaction: for example, a group ends and its
prompt is given back. A kill loses all changes since the last flush. Nothing outside has seen the effect of a lost
change, since every process of a run ends with its conductor. A loss of power may take all changes since `sync`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.machine import sync
from stretto.core.records import Batch, Group, Prompt, Segment, State, Trajectory, Update, trajectory_id
from stretto.core.states import UNTRAINED
from stretto.store.config import StoreConfig
from stretto.store.files import identity
from stretto.store.ledger.partials import decode_piece, encode_piece, read_calls, retraction
from stretto.store.ledger.reading import BOUNDS, states_on_record
from stretto.store.ledger.rows import (
    COUNTED,
    Balance,
    LiveRow,
    MostInFlight,
    Tally,
    encode_payload,
    oldest_unfinished,
    step_columns,
    update_columns,
)
from stretto.store.ledger.schema import (
    FORGET_PROMPTS,
    FORGET_TRAINED,
    FORGET_UNTRAINED,
    PAGE,
    UNSETTLED,
    log_of,
    open_for_writing,
)
from stretto.store.ledger.seals import META, fact_text, find_fact, seal
from stretto.store.totals import OnRecord

Value = TypeVar("Value")

_HEAVY = 32 << 20  # bytes: with less, SQLite waits for the disk more often than it computes
_INSERT_GROUP = "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)"
_INSERT_PAYLOAD = "INSERT OR IGNORE INTO payloads VALUES (?, ?)"
_INSERT_STEP = "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_STEP = "UPDATE steps SET published_version = ?, metrics = ? WHERE step = ?"
_UPSERT_META = """
    INSERT INTO meta VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value, seal = excluded.seal
"""
_INSERT_EVENT = "INSERT INTO events VALUES (?, ?, ?)"
_LIVE = """
    SELECT groups.id, trajectories.* FROM trajectories JOIN groups ON groups.key = group_key
    WHERE trajectories.key >= ? AND state IN ('in_flight', 'buffered') ORDER BY trajectories.key
"""
_LAST_GROUP = "SELECT key + members FROM groups ORDER BY key DESC LIMIT 1"
_PARTIALS = "SELECT key, begin, payload FROM partials ORDER BY key, begin"
_INSERT_PARTIAL = "INSERT INTO partials VALUES (?, ?, ?)"
_DELETE_PARTIALS = "DELETE FROM partials WHERE key = ?"
_INSERT_CALL = "INSERT INTO calls VALUES (?, ?, ?, NULL, ?)"
_END_CALL = "UPDATE calls SET reply = ?1, seal = seal(?4, number, asked, ?1) WHERE key = ?2 AND number = ?3"
_DELETE_CALLS = "DELETE FROM calls WHERE key = ?"
_CALLING = "SELECT DISTINCT key FROM calls"


class Ledger:
    """Writer of ``ledger.sqlite``; a run has only one. Changes are buffered (see the module).

    Example, with groups of two::

        ledger.issue("0.17.0", prompt, members=2, admitted_version=6)                  # 2 in flight
        ledger.settle("0.17.0/1", State.FAILED, "timeout after 1 s")                   # 1 in flight, 1 failed
        ledger.buffer(group)                                                           # 1 buffered,  1 failed
        ledger.commit_batch(Batch(step=9, version=8, groups=(group,)))                 # 1 trained,   1 failed

    Raises (from every method):
        StoreError: the state of the trajectory does not allow the change, or the file is gone or cannot be written.
            After a failed write every method raises: a run that cannot record its state must end.
    """

    def __init__(
        self, path: Path, config: StoreConfig, clock: Callable[[], float] = time.monotonic, page: int = PAGE
    ) -> None:
        """Open the ledger at `path` (a new one: `page` bytes a page) and restore its live rows, or raise StoreError."""
        self._path, self._config, self._clock = path, config, clock
        self._connection = open_for_writing(path, page)
        self._broken: StoreError | None = None
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._partials: list[tuple[str, tuple[Any, ...]]] = []  # pieces and calls, in the order of the events
        self._facts: dict[str, str] = {}
        self._sources: dict[str, Callable[[], object]] = {}
        self._dirty: dict[int, LiveRow] = {}
        self._live: dict[str, LiveRow] = {}
        self._flushed, self._weight = self._clock(), 0  # bytes of the buffered payloads
        self._file = identity(path)
        try:
            self._read_back()
        except (sqlite3.Error, ValueError, TypeError, AssertionError, *UNREADABLE) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from error

    def _read_back(self) -> None:
        """Restore live rows, counts and keys from the file. Raises StoreError for a damaged row, ValueError for an
        unknown state."""
        facts = self._query(META)
        for group_id, *columns in self._query(_LIVE, (oldest_unfinished(facts, self._path),)):
            row = LiveRow.restored(tuple(columns))
            self._live[trajectory_id(group_id, row.member)] = row
        self._resume_partials()
        last = self._query(_LAST_GROUP)
        self._next_key: int = last[0][0] if last else 0
        live, keep = self._live.values(), self._config.keep_payloads
        known = Tally.restored(facts, self._path, self._next_key, live, keep)
        self._tally = Tally(*states_on_record(self._connection)) if known is None else known
        self._sources[COUNTED] = lambda: self._tally.fact(self._next_key, live, keep)
        self._changes = find_fact(facts, self._path, BOUNDS, list[BoundChange]) or []
        self._flights = MostInFlight(facts, self._path, live, self._changes)

    # The life of a trajectory.

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        """Record that a group with `members` trajectories, ``group_id/0`` and so on, is in flight, admitted at version
        `admitted_version`. Flushes if ``flush_seconds`` are over. StoreError if the group is in flight or buffered."""
        key = self._next_key
        if trajectory_id(group_id, 0) in self._live:
            raise StoreError(f"{self._path}: group {group_id} was issued before")
        tokens = msgspec.msgpack.encode(prompt.token_ids)
        columns = (key, group_id, prompt.id, members, admitted_version, tokens)
        self._note(_INSERT_GROUP, (*columns, seal(*columns)))
        for member in range(members):
            row = LiveRow(key + member, key, member)
            self._live[trajectory_id(group_id, member)] = self._dirty[row.key] = row
        self._next_key += max(members, 1)
        self._facts |= self._flights.issued(key, members)
        self._tally.states[State.IN_FLIGHT] += members
        if self._clock() - self._flushed >= self._config.flush_seconds:
            self.flush()

    def buffer(self, group: Group) -> None:
        """Record that the trajectories of `group` are judged and wait to be trained on. Raises StoreError if one is not
        in flight."""
        for trajectory in group.trajectories:
            self._move(trajectory.id, State.BUFFERED, "", trajectory)

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        """Record that the trajectory `id` has ended untrained. Raises StoreError if it cannot enter `state`.

        Args:
            state: filtered, expired or failed.
            reason: why, for readers of the run.
            trajectory: the judged trajectory; None if it has no completion.
        """
        if state not in UNTRAINED:
            raise StoreError(f"trajectory {id} cannot be settled as {state}; only commit_batch trains")
        self._move(id, state, reason, trajectory)

    def commit_batch(self, batch: Batch) -> None:
        """Record that the trainer trains on this batch, in step `batch.step`. On return, the batch and all earlier
        changes are in the file. With nothing recorded, raises StoreError if a trajectory is not buffered, BoundViolated
        if a token is of a later version than `batch.version`."""
        step = step_columns(batch, self.unix_time)
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        for trajectory in trajectories:
            row = self._row(trajectory.id)
            if row.state is not State.BUFFERED:
                raise StoreError(f"trajectory {trajectory.id} is {row.state} and cannot be trained")
        for trajectory in trajectories:
            row = self._move(trajectory.id, State.TRAINED, "")
            row.trained_step = batch.step
        self._tally.trained(step)
        self._note(_INSERT_STEP, step)
        self.flush()

    def record_update(self, update: Update) -> None:
        """Record the published version and the metrics of a step whose batch is committed."""
        self._note(_UPDATE_STEP, update_columns(update))

    # Trajectories in flight, and payloads that are no longer needed.

    def journal(self, id: str, piece: Segment, node: int = 0) -> None:
        """Append the tokens of `piece` to segment `node` (an index) of the trajectory `id`, which is in flight. After a
        crash, sampling continues after the recorded tokens.

        A sampled segment may come in several pieces. The first has its `parent` and `cause`, and may have no tokens
        yet. A segment of given tokens (tool output, a user's turn) comes in one piece.
        """
        row = self._row(id)
        self._partials.append((_INSERT_PARTIAL, (row.key, row.journaled, encode_piece(id, piece, node))))
        row.journaled += max(1, piece.length)

    def retract(self, id: str, count: int, node: int = 0) -> None:
        """Delete all tokens but the first `count` of segment `node` of the trajectory `id`, and the segment's end, if
        that is on record; `count` must be the end of a recorded piece. Flushes."""
        self.flush()
        self._partials += retraction(self._query, id, self._row(id).key, count, node)
        self.flush()

    def begin_call(self, id: str, number: int, asked: bytes, *, durable: bool) -> None:
        """Record that the session of the trajectory `id`, which is in flight, is about to make a call: to a tool, or of
        an agent to the gateway.

        Args:
            number: of the call, greater than those before (else StoreError).
            asked: the request, encoded.
            durable: flush now, and in `end_call`: a call that must not be repeated is on record before it is made.
        """
        row = self._row(id)
        if number < row.calls:
            raise StoreError(f"{self._path}: call {number} of trajectory {id} has begun before")
        row.calls, row.open_calls[number] = number + 1, durable
        self._partials.append((_INSERT_CALL, (row.key, number, asked, seal(id, number, asked, None))))
        if durable:
            self.flush()

    def end_call(self, id: str, number: int, reply: bytes) -> None:
        """Record the encoded `reply` to call `number` of the trajectory `id`, which an earlier process of the run may
        have begun. Flushes if it is durable. StoreError if it was never begun, or has ended."""
        row = self._row(id)
        if number not in row.open_calls:
            raise StoreError(f"{self._path}: call {number} of trajectory {id} was never begun, or has ended")
        self._partials.append((_END_CALL, (reply, row.key, number, id)))
        if row.open_calls.pop(number):
            self.flush()

    def forget(self, step: int) -> None:
        """Delete the payloads and prompts that ``store.keep_payloads`` does not keep; "all": does nothing. `step`: step
        of the oldest checkpoint that a resume may start from; payloads of later steps stay. Flushes.

        Groups that had nothing left to delete at the last call are skipped: a long run has many of them.
        """
        if self._config.keep_payloads == "all":
            return
        self._note(FORGET_UNTRAINED, (self._tally.settled,))
        if self._config.keep_payloads == "none":
            self._note(FORGET_TRAINED, (self._tally.settled, step))
            self._note(FORGET_PROMPTS, (self._tally.settled, step))
        self.flush()
        ((unsettled,),) = self._query(UNSETTLED, (self._tally.settled, step))
        self._tally.settled = self._next_key if unsettled is None else unsettled

    def sync(self) -> None:
        """Flush, and sync the write-ahead log to disk. To be called before a checkpoint is written: a power loss must
        not leave a checkpoint without the batches that led to it. Raises StoreError if that fails.

        The ledger file itself must not be opened and synced here. A process that closes any descriptor of a file
        releases all its locks on that file, SQLite's included; the next reader would then take itself for the only user
        and remove the log (sqlite.org/howtocorrupt, 2.2). SQLite syncs the file before it restarts the log.
        """
        self.flush()
        log = log_of(self._path)
        try:
            if log.exists():
                sync(log)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be forced to disk: {error.strerror or error}") from error

    # Facts beside the trajectories.

    def put(self, name: str, value: object) -> None:
        """Store `value` as JSON under a name, replacing an earlier one: a *fact*, such as the seed or the totals.

        The fact is written in the same transaction as the changes of state since the last flush. Raises StoreError if
        it could not be read again, as with a number that is not finite.
        """
        self._put(name, value)

    def _put(self, name: str, value: object) -> None:
        """Store a fact as `put` does, also under a name that a subclass keeps for the ledger itself."""
        self._facts[name] = fact_text(value)

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Return the fact stored under `name`, decoded as `kind`; None if there is none. Flushes."""
        self.flush()
        return find_fact(self._query(META), self._path, name, kind)

    def watch(self, name: str, source: Callable[[], object]) -> None:
        """Call `source` at each flush that has something to write, and store the value as the fact `name`, so that it
        agrees with the states in the file."""
        self._sources[name] = source

    def change_bound(self, change: BoundChange) -> None:
        """Record that a bound of the controller has changed for all groups issued from now on: as a fact, for resumes
        and checks (`change.key` is set here), and as an event, for readers of the run."""
        self._flights.changed()
        self._changes.append(msgspec.structs.replace(change, key=self._next_key))
        self._put(BOUNDS, self._changes)
        told = f"{change.name} {change.before} -> {change.after} after step {change.step}: {change.reason}"
        self.event("bound", told)

    def event(self, name: str, detail: str) -> None:
        """Record an event, with the time, for readers of the run. `name`: its kind ("checkpoint"); `detail`: a text."""
        self._note(_INSERT_EVENT, (self.unix_time, name, detail))

    def last_step(self) -> int | None:
        """The newest step whose batch is committed; None if there is none."""
        found: int | None = self._query("SELECT max(step) FROM steps")[0][0]
        return found

    def last_update(self) -> int:
        """The newest step whose update is in the file; unflushed ones (`record_update`) do not count. 0: none."""
        found: int = self._query("SELECT coalesce(max(step), 0) FROM steps WHERE published_version IS NOT NULL")[0][0]
        return found

    def balance(self) -> Balance:
        """Count the trajectories by state, unflushed changes included."""
        return Balance(**{state.value: self._tally.states[state] for state in State})

    @property
    def unix_time(self) -> float:
        """This moment as a date to write down. It may jump, so no wait and no decision may depend on it."""
        return time.time()

    @property
    def on_record(self) -> OnRecord:
        """Sampled tokens by the state of their trajectory (`OnRecord`), unflushed changes included."""
        return self._tally.on_record

    # Writing.

    def flush(self) -> None:
        """Write all buffered changes in one transaction, with the facts of `watch`; does nothing if there are none.
        Raises StoreError if the file is gone or cannot be written."""
        if self._broken is not None:
            raise self._broken
        self._flushed = self._clock()
        if identity(self._path) != self._file:
            self._broken = StoreError(
                f"{self._path}: the ledger, or its folder, was moved or removed while the run was writing to it"
            )
            raise self._broken
        if not (self._dirty or self._pending or self._partials or self._facts):
            return
        self._facts |= {name: fact_text(source()) for name, source in self._sources.items()}
        rows: dict[str, list[tuple[object, ...]]] = {}
        for _, row in sorted(self._dirty.items()):  # neighbours share pages
            statement, columns = row.written()
            rows.setdefault(statement, []).append(columns)
        pending = self._pending
        self._execute("BEGIN IMMEDIATE")
        self._many(_INSERT_GROUP, pending.pop(_INSERT_GROUP, []))
        for statement, alike in rows.items():
            self._many(statement, alike)
        for statement, pieces in groupby(self._partials, itemgetter(0)):
            self._many(statement, map(itemgetter(1), pieces))
        self._many(_INSERT_PAYLOAD, sorted(pending.pop(_INSERT_PAYLOAD, [])))
        for statement, parameters in pending.items():
            self._many(statement, parameters)
        self._many(_UPSERT_META, [(name, value, seal(name, value)) for name, value in self._facts.items()])
        self._execute("COMMIT")
        self._pending, self._partials, self._dirty, self._facts = {}, [], {}, {}
        self._weight = 0

    def relieve(self) -> None:
        """Flush if the buffered payloads have 32 MiB or more. To be called when a group has ended and everything about
        its end is recorded: with thousands that end together, memory would grow, and be cold when it is written."""
        if self._weight >= _HEAVY:
            self.flush()

    def close(self) -> None:
        """Flush, unless a write has failed before, and close the file."""
        try:
            if self._broken is None:
                self.flush()
        finally:
            self._connection.close()

    def _row(self, id: str) -> LiveRow:
        row = self._live.get(id)
        if row is None:
            raise StoreError(f"{self._path}: trajectory {id} was never issued, or its state is final")
        return row

    def _move(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> LiveRow:
        row = self._row(id)
        before, tokens = row.state, row.tokens
        row.move(state, reason)
        self._flights.moved(row, before)
        if trajectory is not None and not row.finished:
            row.finish(trajectory)
            if state is State.BUFFERED or self._config.keep_payloads == "all":
                self._note(_INSERT_PAYLOAD, (row.key, payload := encode_payload(trajectory)))
                self._weight += len(payload)
        self._tally.moved(row, before, tokens)
        if row.journaled:
            self._partials.append((_DELETE_PARTIALS, (row.key,)))
            row.journaled = 0
        if row.calls:
            self._partials.append((_DELETE_CALLS, (row.key,)))
            row.calls, row.open_calls = 0, {}
        if state is not State.BUFFERED:
            del self._live[id]
        self._dirty[row.key] = row
        return row

    def _resume_partials(self) -> None:
        by_key = {row.key: (id, row) for id, row in self._live.items()}
        for key, begin, payload in self._query(_PARTIALS):
            if key not in by_key:
                raise StoreError(f"{self._path}: holds partial tokens of trajectory {key}, which is not in flight")
            id, row = by_key[key]
            row.journaled = begin + max(1, decode_piece(id, payload)[1].length)
        for (key,) in self._query(_CALLING):
            if key not in by_key:
                raise StoreError(f"{self._path}: holds calls of trajectory {key}, which is not in flight")
            id, row = by_key[key]
            for call in read_calls(self._connection, id, key):
                row.calls = call.number + 1
                row.open_calls |= {call.number: True} if call.reply is None else {}

    def _note(self, statement: str, parameters: tuple[Any, ...]) -> None:
        self._pending.setdefault(statement, []).append(parameters)

    def _query(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return self._execute(statement, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"{self._path}: cannot be read: {error}") from error

    def _execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, parameters)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._break(error) from error

    def _many(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        try:
            self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            raise self._break(error) from error

    def _break(self, error: Exception) -> StoreError:
        """Roll the transaction back and make every later write raise; returns the error to raise."""
        if self._connection.in_transaction:
            self._connection.rollback()
        self._broken = StoreError(f"{self._path}: cannot be written: {error}")
        return self._broken


def put_fact(path: Path, name: str, value: object) -> None:
    """Store `value` as JSON under a name, replacing an earlier one, in the ledger at `path`, which no process has open
    for writing. Raises StoreError if the file is missing, is no ledger, is damaged, or cannot be written."""
    text = fact_text(value)
    with closing(open_for_writing(path, None)) as connection:
        try:
            connection.execute(_UPSERT_META, (name, text, seal(name, text)))
        except sqlite3.Error as error:
            raise StoreError(f"{path}: cannot be written: {error}") from error
