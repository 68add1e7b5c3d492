"""The tables of the ledger, the check of its write-ahead log, opening its file, and the SQL by which `Ledger.forget`
deletes what ``store.keep_payloads`` does not keep.

    groups ──1:n── trajectories ──1:0..1── payloads        steps        meta        events
                              ├──1:n───── partials
                              └──1:n───── calls

A trajectory's key is its group's key plus its member number, so the id ``group/member`` is stored once per group.
The payload (tokens, log-probabilities, text) has a table of its own, so that a change of state does not rewrite it.
Partials are the tokens of a trajectory in flight, piece by piece; calls are those of its session. Both are deleted when
the trajectory ends (`store.ledger.partials`). Every row, except in the table ``events``, has a *seal*: a checksum
(`store.ledger.seals`). In the table ``steps``, `seal` covers the batch and `row_seal` the row.

The write-ahead log::

    header, 32 bytes     magic · format · page size · checkpoint · salt 1 · salt 2 · checksum
    frame, 24 + page     page number · pages after the commit, or 0 · salt 1 · salt 2 · checksum │ page

The checksum of a frame covers all frames before it. So SQLite reads a log up to the first broken frame and ignores the
rest. This is right if a kill has torn the end of the log. If a bit has flipped in the middle, it silently drops
transactions. The two cases can be told apart: a kill breaks at most the frame that was being written, and no frame with
the same salts follows it (section 4 of sqlite.org/fileformat2.html).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store import lock
from stretto.store.files import write_atomically
from stretto.store.ledger.seals import seal

LARGEST = 1 << 30  #: most bytes of a log that is checked
_FOLDED = 4 << 20  # bytes of a log that SQLite moves into its file
#: Bytes of a page of a new ledger. In pages of 4 KiB, which older ledgers keep, a row with 1,024 tokens costs SQLite a
#: quarter more.
PAGE = 8192
#: Of a new ledger whose batches have 32 MiB of tokens or more: a completion of 1,024 tokens then costs SQLite and the
#: kernel a quarter less. A short transaction writes a few pages, whatever they hold, so others have smaller ones.
LARGE_PAGE, _LARGE_BATCH, _TOKEN_BYTES = 65536, 32 << 20, 8
_HEADER, _FRAME = 32, 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # magic number: byte order in which checksums are computed

Sums = tuple[int, int]
Read = TypeVar("Read")
_BEGINNINGS = 3


def log_of(ledger: Path) -> Path:
    """Path of the write-ahead log of the ledger at this path."""
    return ledger.with_name(f"{ledger.name}-wal")


def check_log(ledger: Path, largest: int = LARGEST) -> None:
    """Check the write-ahead log of the ledger at this path, which no process has open; does nothing if there is no log.
    An unchanged log is read only once in a process.

    Raises:
        StoreError: valid frames follow a broken one, so SQLite would drop them silently; or the log is larger than
            `largest` bytes, or cannot be read.
    """
    log = log_of(ledger)
    try:
        found = log.stat()
        if found.st_size > largest:
            raise StoreError(
                f"{log}: is not checked: it has {found.st_size:,} bytes, more than {largest:,}; fold it into the "
                f"ledger: sqlite3 {ledger} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
        broken = _damage(log, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{log}: cannot be read: {error.strerror or error}") from error
    if broken is not None:
        raise StoreError(
            f"{log}: damaged at byte {broken:,} of {found.st_size:,}, before the end; restore the file, "
            f"or give up what follows the damage: truncate -s {broken} {log}"
        )


@lru_cache(maxsize=1_024)
def _damage(log: Path, stamp: tuple[int, ...]) -> int | None:
    """Byte offset of the first broken header or frame, if frames follow it, which would be lost; None if none is
    broken, or none follows. `stamp`: identifies the file's contents, for the cache."""
    data = log.read_bytes()
    broken = _first_broken(data)
    return broken if broken is not None and _goes_on(data, broken) else None


def _first_broken(data: bytes) -> int | None:
    """Byte offset of the first broken frame, or of the first frame that an earlier log has left behind; 0 if the header
    is broken or incomplete, None if nothing is. `data`: the whole log. An incomplete frame at its end is not
    broken."""
    order = _MAGIC.get(int.from_bytes(data[:4], "big"))
    if order is None or len(data) < _HEADER:
        return 0
    sums = _checksum(data[:24], (0, 0), order)
    if sums != struct.unpack_from(">II", data, 24):
        return 0
    if _page_size(data) % 8:  # SQLite has written no such page
        return 0
    frame = _FRAME + _page_size(data)
    for at in range(_HEADER, len(data) - frame + 1, frame):
        sums = _checksum(data[at : at + 8] + data[at + _FRAME : at + frame], sums, order)
        if data[at + 8 : at + 16] != data[16:24] or sums != struct.unpack_from(">II", data, at + 16):
            return at
    return None


def _goes_on(data: bytes, broken: int) -> bool:
    """Whether frames of the same log follow the broken one at offset `broken`; after a broken header (0), whether there
    is room for any frame."""
    if broken == 0:
        return len(data) >= _HEADER + _FRAME
    frame = _FRAME + _page_size(data)
    return any(data[at + 8 : at + 16] == data[16:24] for at in range(broken + frame, len(data) - frame + 1, frame))


def _page_size(data: bytes) -> int:
    return int.from_bytes(data[8:12], "big")


def _checksum(data: bytes, sums: Sums, order: str) -> Sums:
    """Continue SQLite's checksum `sums` (s0, s1) over `data`: ``s0 += x0 + s1; s1 += x1 + s0`` for each pair (x0, x1)
    of 32-bit words. `order`: byte order, "<" or ">"."""
    s0, s1 = sums
    for x0, x1 in struct.iter_unpack(f"{order}II", data):
        s0 = (s0 + x0 + s1) & 0xFFFFFFFF
        s1 = (s1 + x1 + s0) & 0xFFFFFFFF
    return s0, s1


FORGET_UNTRAINED = """
    DELETE FROM payloads WHERE key IN (
        SELECT key FROM trajectories WHERE key >= ? AND state IN ('filtered', 'expired', 'failed'))
"""
FORGET_TRAINED = """
    DELETE FROM payloads WHERE key IN (SELECT key FROM trajectories WHERE key >= ? AND trained_step <= ?)
"""
FORGET_PROMPTS = """
    UPDATE groups SET prompt_token_ids = NULL, seal = seal(key, id, prompt_id, members, admitted_version, NULL)
    WHERE key >= ? AND NOT EXISTS (
        SELECT 1 FROM trajectories WHERE key >= groups.key AND key < groups.key + members
            AND (state IN ('in_flight', 'buffered') OR trained_step > ?))
"""
UNSETTLED = """
    SELECT min(group_key) FROM trajectories
    WHERE key >= ? AND (state IN ('in_flight', 'buffered') OR trained_step > ?)
"""

FORMAT = 6
_RESUMABLE = 3  # the oldest format that can be resumed; before 6 tokens are not packed, before 5 there are no calls,
# and before 4 no names of engines
_FIRST_CALLS = 5
_PATIENCE = 5.0  # seconds
_READABLE = 2  # the oldest format that can be read; trajectories, steps, prompts and the start have no seals in it

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


def page_for(tokens: int) -> int:
    """Page size, in bytes, of a new ledger whose batches have at most so many sampled tokens."""
    return LARGE_PAGE if tokens * _TOKEN_BYTES >= _LARGE_BATCH else PAGE


def open_for_writing(path: Path, page: int | None = PAGE) -> sqlite3.Connection:
    """Open the ledger at `path` for writing. A missing or empty file is created with its tables, in pages of `page`
    bytes (None: it is refused), and files that SQLite left beside it are removed; an older format is upgraded. The
    caller holds the lock of the run folder.

    The connection has no automatic transactions: the caller begins and ends them.

    Raises:
        StoreError: the file has a format that cannot be resumed, is no ledger, is damaged, or cannot be written.
    """
    check_log(path)
    with ExitStack() as undo:
        try:
            if not path.exists() or not path.stat().st_size:  # an earlier version, killed here, left an empty file
                if page is None:  # it would take the log of one that was moved away
                    raise StoreError(f"{path}: is missing or empty")
                for left in ("-journal", "-wal", "-shm"):  # of another file: SQLite would play them into the new one
                    path.with_name(f"{path.name}{left}").unlink(missing_ok=True)
                _create(path, page)
            # `verbs.ledger` uses the connection from several threads, one at a time.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            undo.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            (found,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA wal_autocheckpoint = {_FOLDED // found}")
            # An earlier version, killed a moment later, left a file with a header and no table.
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
            connection.create_function("seal", -1, seal, deterministic=True)
            if (found := _check_format(path, connection, _RESUMABLE)) != FORMAT:
                calls = _CALLS if found < _FIRST_CALLS else ""
                connection.executescript(f"BEGIN; {calls} PRAGMA user_version = {FORMAT}; COMMIT;")
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be opened as a ledger: {error}") from error
        undo.pop_all()
    return connection


def _create(path: Path, page: int) -> None:
    """Write a ledger without rows to `path`. A kill leaves either no file there or one with all tables."""
    with closing(sqlite3.connect(":memory:")) as memory:
        memory.executescript(f"PRAGMA page_size = {page}; {_TABLES} PRAGMA user_version = {FORMAT};")
        image = bytearray(memory.serialize())
    # It has a write-ahead log from the start (section 1.3.3 of sqlite.org/fileformat2.html). A later change would need
    # a rollback journal, and a reader cannot roll back after a kill.
    image[18:20] = b"\x02\x02"
    write_atomically(path, image)


def open_for_reading(path: Path, patience: float = _PATIENCE) -> sqlite3.Connection:
    """Open the ledger at `path` read-only, also while a run writes. `patience`: seconds that a query waits for a lock
    of SQLite before it fails. Reading changes nothing in the ledger, but SQLite may create its index file beside a
    write-ahead log.

    Raises:
        StoreError: the file is missing, has an unknown format, is no ledger, or is damaged.
    """
    if not path.is_file():
        raise StoreError(f"{path}: does not exist")
    check_resting_log(path)
    with ExitStack() as undo:
        try:
            connection = open_copy(path) if needs_copy(path) else _connect(_address(path), patience)
            undo.callback(connection.close)
            _check_format(path, connection, _READABLE)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be read as a ledger: {error}") from error
        undo.pop_all()
    return connection


@contextmanager
def reading(path: Path, patience: float = _PATIENCE) -> Iterator[sqlite3.Connection]:
    """Context manager: the ledger at `path`, opened as by `open_for_reading` and closed at the end.

    Raises:
        StoreError: as `open_for_reading`; or the block raised an error of SQLite, ValueError, TypeError or
            AssertionError, as reading a damaged value does. Also at the end of the block, if a run began to write
            meanwhile: what is not damaged may have been read torn, or in part.
    """
    resting = at_rest(path)
    try:
        with closing(open_for_reading(path, patience)) as connection:
            yield connection
    # A damaged page yields values of unexpected types, and text that is not UTF-8.
    except (StoreError, sqlite3.Error, ValueError, TypeError, AssertionError, *UNREADABLE) as error:
        if resting and resting != at_rest(path):
            raise _Began(_BEGAN.format(path)) from error
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if resting and resting != at_rest(path):
        raise _Began(_BEGAN.format(path))


@contextmanager
def reading_on(path: Path) -> Iterator[sqlite3.Connection]:
    """Context manager: as `reading`, but the block ends without an error if a run began to write meanwhile. A caller
    that has not come to its end opens the ledger again."""
    with suppress(_Began), reading(path) as connection:
        yield connection


class _Began(StoreError):
    """A run began to write while a ledger at rest was read."""


_BEGAN = "{}: a run began to write while it was read: try again"


def once_at_rest(path: Path, read: Callable[[], Read]) -> Read:
    """Result of `read`, which reads the ledger at `path`. It is called again if a run began to write meanwhile: a
    ledger to which no run writes is read without locks, so what was read may be of two times."""
    for _ in range(_BEGINNINGS):
        resting = at_rest(path)
        with suppress(_Began):
            found = read()
            if not resting or resting == at_rest(path):
                return found
    return read()


def at_rest(path: Path) -> tuple[int, int] | None:
    """Time and size of the ledger at `path` if it is read without locks (`_address`), since no run writes to it; None
    if one does, its log is not empty, or there is no file."""
    try:
        found, log = path.stat(), log_of(path)
        busy = lock.is_held(path.parent) or (log.exists() and log.stat().st_size > 0)
    except OSError:
        return None
    return None if busy else (found.st_mtime_ns, found.st_size)


def check_resting_log(path: Path) -> None:
    """Check the write-ahead log of the ledger at `path` with `check_log`, and raise its errors, unless a run is
    writing: the end of its log may be incomplete."""
    if not lock.is_held(path.parent):
        check_log(path)


def _address(path: Path) -> str:
    """URI with which SQLite opens the ledger at `path` for reading.

    SQLite reads a write-ahead log through an index file beside it. If there is no log, and no run is writing or no
    index can be created, the ledger is opened as immutable: SQLite then creates no file.
    """
    log, index = log_of(path), path.with_name(f"{path.name}-shm")
    bare = not (log.exists() and log.stat().st_size)
    resting = not lock.is_held(path.parent) or (not index.exists() and not os.access(path.parent, os.W_OK))
    how = "mode=ro&immutable=1" if bare and resting else "mode=ro"
    return f"{path.absolute().as_uri()}?{how}"


def _connect(address: str, patience: float = _PATIENCE) -> sqlite3.Connection:
    return sqlite3.connect(address, timeout=patience, isolation_level=None, uri=True)


def needs_copy(path: Path) -> bool:
    """Whether SQLite cannot read the ledger at its place: a killed run has left a write-ahead log without its index,
    and no index can be created, because the folder is not writable."""
    log, index = log_of(path), path.with_name(f"{path.name}-shm")
    return log.exists() and log.stat().st_size > 0 and not index.exists() and not os.access(path.parent, os.W_OK)


def open_copy(path: Path) -> sqlite3.Connection:
    """Open a private copy of the ledger at `path`, into which its write-ahead log is folded, read-only. The copy is on
    the disk of temporary files and unlinked at once, so its room is free when the connection is closed.

    Raises:
        OSError: a file cannot be read, or there is no room for the copy.
        sqlite3.Error: the ledger is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        connection = _connect(f"{copy_into(Path(folder), path).as_uri()}?mode=ro&immutable=1")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from now on the file is open
        return connection


def copy_into(folder: Path, path: Path) -> Path:
    """Copy the ledger at `path` into the folder, and fold its write-ahead log into the copy; returns its path. Raises
    as `open_copy`."""
    copy = folder / path.name
    for own, other in ((path, copy), (log_of(path), log_of(copy))):
        shutil.copyfile(own, other)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return copy


def _check_format(path: Path, connection: sqlite3.Connection, oldest: int) -> int:
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if not oldest <= found <= FORMAT:
        connection.close()
        verb = "reads" if oldest == _READABLE else "resumes"
        raise StoreError(f"{path}: has format {found}, this version of stretto {verb} formats {oldest} to {FORMAT}")
    return found
