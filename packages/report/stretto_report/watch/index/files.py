"""Read untrusted run folders. Links out of the folder are refused, pipes do not block the reader, sizes are bounded."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stretto.core.errors import StoreError
from stretto.store import lock
from stretto.store.ledger.schema import check_log, copy_into, log_of, needs_copy, reading
from stretto.store.series.lines import decode_line, open_plain
from stretto.store.series.metrics import METRICS, EvaluationLine, MetricsLine, StepMetrics

_LARGEST_LOG = 64 << 20  # bytes of the ledger's log; checking it takes three seconds, once
_PATIENCE = 0.2  # seconds to wait for a locked ledger, while other requests wait
LEDGER = "ledger.sqlite"


def read_text(path: Path, largest: int, *, end: bool = False) -> str | None:
    """Return the first (or last, if `end`) `largest` bytes of a file as text, undecodable ones as U+FFFD; None if there
    is no file. Raises StoreError if the path is a link or no regular file, or cannot be opened."""
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if end:
            file.seek(max(0, os.fstat(descriptor).st_size - largest))
        return file.read(largest).decode("utf-8", errors="replace")


def refuse_strange_files(folder: Path) -> None:
    """Raise StoreError unless the ledger, SQLite's two files beside it and the lock are regular files or missing, or if
    one cannot be examined. (SQLite and the lock test follow links and block at pipes.)"""
    ledger = folder / LEDGER
    for path in (ledger, log_of(ledger), ledger.with_name(f"{LEDGER}-shm"), folder / lock.NAME):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"{path.name}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise StoreError(f"{path.name}: is not read: it is {'a link' if stat.S_ISLNK(mode) else 'no plain file'}")


def ledger_stamp(folder: Path) -> list[tuple[int, int, int]]:
    """Return the `stamp_of` the ledger and its write-ahead log."""
    return stamp_of(folder / LEDGER, log_of(folder / LEDGER))


def stamp_of(*paths: Path) -> list[tuple[int, int, int]]:
    """Return a value that changes when one of the files is written: inode, size and nanosecond of the last change of
    each. A missing file is left out."""
    found = []
    for path in paths:
        with suppress(OSError):
            known = path.lstat()
            found.append((known.st_ino, known.st_size, known.st_mtime_ns))
    return found


@contextmanager
def read_ledger(folder: Path) -> Iterator[sqlite3.Connection]:
    """Context manager: yield a read-only connection to the ledger of a run folder, in one read transaction; to a copy
    where it cannot be read at its place, the same while the file stays as it is. Raises StoreError if the ledger cannot
    be read, is no regular file or stays locked, or the write-ahead log of a run that has ended is too large."""
    refuse_strange_files(folder)
    if not lock.is_held(folder):
        check_log(folder / LEDGER, _LARGEST_LOG)
    copy = _copy_of(folder) if needs_copy(folder / LEDGER) else None
    with reading(folder / LEDGER if copy is None else copy.path, _PATIENCE) as connection:
        yield connection


class _Copy:
    """A copy of a ledger, as it was at `stamp`; it is removed once nothing refers to it."""

    def __init__(self, ledger: Path, stamp: object) -> None:
        self.stamp, folder = stamp, tempfile.mkdtemp(prefix="stretto-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = copy_into(Path(folder), ledger)
        self.size = self.path.stat().st_size


_COPYING = threading.Lock()
_COPIES: dict[Path, _Copy] = {}  # the newest is the last
_MOST_COPIED = 256 << 20  # bytes of all copies; the newest stays in any case


def _copy_of(folder: Path) -> _Copy:
    """Return a copy of the ledger in the folder, one that was made before if it is of the ledger as it is now."""
    with _COPYING:
        stamp, copy = ledger_stamp(folder), _COPIES.pop(folder, None)
        if copy is None or copy.stamp != stamp:
            try:
                copy = _Copy(folder / LEDGER, stamp)
            except (OSError, sqlite3.Error) as error:
                raise StoreError(f"{folder / LEDGER}: cannot be read as a ledger: {error}") from error
        _COPIES[folder] = copy
        while len(_COPIES) > 1 and sum(one.size for one in _COPIES.values()) > _MOST_COPIED:
            del _COPIES[next(iter(_COPIES))]
        return copy


_TAIL = 1 << 18  #: bytes


class NewestLines:
    """Reader of the last 256 KiB of the file ``metrics.jsonl`` at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoded: dict[str, MetricsLine | None] = {}  # by the line as it is written

    def read(self, *, keep: bool) -> tuple[list[StepMetrics], list[EvaluationLine]]:
        """Return the newest steps, and the newest evaluations of the held-out prompts (without further evaluation
        sets), each oldest first. Unreadable lines are left out; both lists are empty without a file.

        Args:
            keep: remember the decoded lines, so that the next call decodes only new ones; else forget them.

        Raises:
            StoreError: ``metrics.jsonl`` is no regular file.
        """
        known = self._decoded
        rows = (read_text(self._path, _TAIL, end=True) or "").split("\n")[:-1]
        found = {row: known[row] if row in known else _decoded(row) for row in rows}
        self._decoded = found if keep else {}
        lines = found.values()
        steps = [line for line in lines if isinstance(line, StepMetrics)]
        return steps, [line for line in lines if type(line) is EvaluationLine]


def _decoded(row: str) -> MetricsLine | None:
    """Decode a line; None if it is unreadable, as a first line that is cut off. (Damage is reported when the run is
    opened.)"""
    try:
        return decode_line(METRICS, row.encode())
    except StoreError:
        return None
