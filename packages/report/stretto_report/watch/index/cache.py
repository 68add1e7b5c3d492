"""Cache of what the server has read of a run, for its next start: an SQLite file in the user's cache folder.

A cache that is missing, damaged, of another format, or of an earlier run at the same path is rebuilt.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from stretto.core.errors import UNREADABLE
from stretto_report.watch.index.columns import Column

_FORMAT = 2
_TABLES = f"""
CREATE TABLE IF NOT EXISTS columns (part TEXT, name TEXT, kind TEXT, data BLOB, PRIMARY KEY (part, name)) STRICT;
CREATE TABLE IF NOT EXISTS facts (part TEXT PRIMARY KEY, value TEXT) STRICT;
PRAGMA user_version = {_FORMAT};
"""
_LOCK_SECONDS = 1.0

Facts = TypeVar("Facts")


class Cache:
    """Cached columns and facts of one run, in named parts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, part: str, columns: Mapping[str, Column], facts: object) -> None:
        """Store the columns and facts of a part. If that fails (on a full disk, say), the cache file is deleted, and
        all parts are read from the run again next time."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=_LOCK_SECONDS)) as connection, connection:
                if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                    connection.executescript(f"DROP TABLE IF EXISTS columns; DROP TABLE IF EXISTS facts; {_TABLES}")
                connection.execute("DELETE FROM columns WHERE part = ?", (part,))
                rows = [(part, name, array.dtype.str, array.tobytes()) for name, array in columns.items()]
                connection.executemany("INSERT INTO columns VALUES (?, ?, ?, ?)", rows)
                value = msgspec.json.encode(facts).decode()
                connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (part, value))
        except (sqlite3.Error, OSError):
            with contextlib.suppress(OSError):  # the path is a folder, say, or in a folder that is not writable
                self._path.unlink(missing_ok=True)

    def load(self, part: str, kind: type[Facts]) -> tuple[dict[str, Column], Facts] | None:
        """Load columns and facts (decoded as `kind`) of a part; None if it is missing or unreadable."""
        if not self._path.is_file():
            return None
        try:
            with closing(sqlite3.connect(self._path, timeout=_LOCK_SECONDS)) as connection:
                if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                    return None
                found = connection.execute("SELECT value FROM facts WHERE part = ?", (part,)).fetchone()
                rows = connection.execute("SELECT name, kind, data FROM columns WHERE part = ?", (part,)).fetchall()
            if found is None:
                return None
            facts = msgspec.json.decode(found[0], type=kind)
            return {name: np.frombuffer(data, kind).copy() for name, kind, data in rows}, facts
        except (sqlite3.Error, ValueError, TypeError, *UNREADABLE):
            return None
