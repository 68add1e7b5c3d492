"""The tables of the ledger, and opening its file.

    groups ──1:n── trajectories ──1:0..1── payloads        steps        meta        events
                              ├──1:n───── partials
                              └──1:n───── calls

A trajectory's key is its group's key plus its member number, so the id ``group/member`` is stored once per group.
The payload (tokens, log-probabilities, text) has a table of its own, so that a change of state does not rewrite it.
Partials are the tokens of a trajectory in flight, piece by piece; calls are those of its session. Both are deleted when
the trajectory ends (`store.ledger.partials`). Every row, except in the table ``events``, has a *seal*: a checksum
(`store.ledger.seals`). In the table ``steps``, `seal` covers the batch and `row_seal` the row.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store import lock
from stretto.store.ledger.seals import seal
from stretto.store.ledger.wal import check_log, log_of

FORMAT = 6
_BEFORE = 3  # the oldest format that can be resumed; before 6 tokens are not packed, before 5 there are no calls,
# and before 4 no names of engines
_FIRST_CALLS = 5
_PATIENCE = 5.0  # seconds
_OLDEST = 2  # the oldest format that can be read; trajectories, steps, prompts and the start have no seals in it

_CALLS = """
CREATE TABLE calls (
    key INTEGER NOT NULL REFERENCES trajectories (key),
    number INTEGER NOT NULL,
    asked BLOB NOT NULL,
    reply BLOB,
    seal BLOB NOT NULL,
    PRIMARY KEY (key, number)
) STRICT;
"""
_TABLES = f"""{_CALLS}
CREATE TABLE groups (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL,
    members INTEGER NOT NULL,
    admitted_version INTEGER NOT NULL,
    prompt_token_ids BLOB,
    seal BLOB NOT NULL
) STRICT;
CREATE TABLE trajectories (
    key INTEGER PRIMARY KEY,
    group_key INTEGER NOT NULL REFERENCES groups (key),
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    trained_step INTEGER,
    verdict TEXT,
    reward REAL,
    stop_reason TEXT,
    tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    interrupted INTEGER NOT NULL,
    seal BLOB NOT NULL
) STRICT;
CREATE TABLE payloads (
    key INTEGER PRIMARY KEY REFERENCES trajectories (key),
    payload BLOB NOT NULL
) STRICT;
CREATE TABLE partials (
    key INTEGER NOT NULL REFERENCES trajectories (key),
    begin INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (key, begin)
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    oldest_trainable INTEGER NOT NULL,
    trajectories INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    masked_tokens INTEGER NOT NULL,
    staleness TEXT NOT NULL,
    batch TEXT NOT NULL,
    committed REAL NOT NULL,
    published_version INTEGER,
    metrics TEXT,
    seal BLOB NOT NULL,
    row_seal BLOB NOT NULL
) STRICT;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL, seal BLOB NOT NULL) STRICT;
CREATE TABLE events (at REAL NOT NULL, name TEXT NOT NULL, detail TEXT NOT NULL) STRICT;
"""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the ledger at `path` for writing. A missing file is created, an older format upgraded.

    The connection has no automatic transactions: the caller begins and ends them.

    Raises:
        StoreError: the file has an unknown format, is no ledger, is damaged, or cannot be written.
    """
    check_log(path)
    with ExitStack() as undo:
        try:
            # `verbs.ledger` uses the connection from several threads, one at a time.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            undo.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
            connection.create_function("seal", -1, seal, deterministic=True)
            if (found := _check_format(path, connection, _BEFORE)) != FORMAT:
                calls = _CALLS if found < _FIRST_CALLS else ""
                connection.executescript(f"BEGIN; {calls} PRAGMA user_version = {FORMAT}; COMMIT;")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be opened as a ledger: {error}") from error
        undo.pop_all()
    return connection


def open_for_reading(path: Path, patience: float = _PATIENCE) -> sqlite3.Connection:
    """Open the ledger at `path` read-only, also while a run writes. `patience`: seconds to wait for a lock.

    Reading changes nothing in the ledger, but SQLite may create its index file beside a write-ahead log.

    Raises:
        StoreError: the file is missing, has an unknown format, is no ledger, or is damaged.
    """
    if not path.is_file():
        raise StoreError(f"{path}: does not exist")
    check_resting_log(path)
    with ExitStack() as undo:
        try:
            connection = sqlite3.connect(_address(path), timeout=patience, isolation_level=None, uri=True)
            undo.callback(connection.close)
            _check_format(path, connection, _OLDEST)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be read as a ledger: {error}") from error
        undo.pop_all()
    return connection


@contextmanager
def reading(path: Path, patience: float = _PATIENCE) -> Iterator[sqlite3.Connection]:
    """Open the ledger with `open_for_reading`, and close it at the end of the block.

    Raises:
        StoreError: as `open_for_reading`; or the block has read a damaged value.
    """
    try:
        with closing(open_for_reading(path, patience)) as connection:
            yield connection
    # A damaged page yields values of unexpected types, and text that is not UTF-8.
    except (sqlite3.Error, ValueError, TypeError, AssertionError, *UNREADABLE) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def check_resting_log(path: Path) -> None:
    """Check the write-ahead log with `check_log`, unless a run is writing: the end of its log may be incomplete.

    Raises:
        StoreError: no run is writing, and the log is damaged.
    """
    if not lock.is_held(path.parent):
        check_log(path)


def _address(path: Path) -> str:
    """URI with which SQLite opens the ledger for reading.

    SQLite reads a write-ahead log through an index file beside it. If there is no log, and no run is writing or no
    index can be created, the ledger is opened as immutable: SQLite then creates no file.
    """
    log, index = log_of(path), path.with_name(f"{path.name}-shm")
    bare = not (log.exists() and log.stat().st_size)
    resting = not lock.is_held(path.parent) or (not index.exists() and not os.access(path.parent, os.W_OK))
    how = "mode=ro&immutable=1" if bare and resting else "mode=ro"
    return f"{path.absolute().as_uri()}?{how}"


def _check_format(path: Path, connection: sqlite3.Connection, oldest: int) -> int:
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if not oldest <= found <= FORMAT:
        connection.close()
        verb = "reads" if oldest == _OLDEST else "resumes"
        raise StoreError(f"{path}: has format {found}, this version of stretto {verb} formats {oldest} to {FORMAT}")
    return found
