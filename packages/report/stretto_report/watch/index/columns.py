"""Growing columnar table in memory, which the pages filter, sort and draw, and the cache of what the server has read
of a run, for its next start.

A cache that is missing, damaged, of another format, or of an earlier run at the same path is rebuilt.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.core.errors import UNREADABLE

Column = npt.NDArray[Any]
_FIRST = 1024


class GrowingColumns:
    """Columns of equal length, each an array that doubles when full.

    Example::

        table = GrowingColumns({"reward": "f8", "length": "i4"})
        table.append({"reward": [1.0, 0.0], "length": [29, 64]})
        table["reward"].mean()
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """Create columns without rows. `kinds`: numpy dtype of each column, by name."""
        self._arrays = {name: np.zeros(_FIRST, kind) for name, kind in kinds.items()}
        self.rows = 0

    def __getitem__(self, name: str) -> Column:
        """View of the current rows of a column, [rows]. Raises KeyError if there is no such column."""
        return self._arrays[name][: self.rows]

    @property
    def held(self) -> int:
        """Memory of the arrays in bytes."""
        return sum(array.nbytes for array in self._arrays.values())

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def add(self, name: str) -> None:
        """Add a column of floats; existing rows get NaN."""
        capacity = len(next(iter(self._arrays.values())))
        self._arrays[name] = np.full(capacity, np.nan)

    def append(self, columns: Mapping[str, Sequence[Any] | Column]) -> None:
        """Append rows, given as columns of equal length by name. Columns that are not given must be of floats, and get
        NaN. Names that the table lacks are ignored."""
        count = len(next(iter(columns.values())))
        begin, end = self.rows, self.rows + count
        for name, array in self._arrays.items():
            if end > len(array):
                self._arrays[name] = array = np.resize(array, max(end, 2 * len(array)))
            array[begin:end] = columns.get(name, np.nan)
        self.rows = end

    def put(self, places: Column, columns: Mapping[str, Column]) -> None:
        """Replace the values of some columns in the rows with the indices `places`."""
        for name, values in columns.items():
            self._arrays[name][places] = values

    def restore(self, arrays: Mapping[str, Column]) -> bool:
        """Replace the table by `arrays`, all of which become columns; return True. If a present column is missing or
        has another type, or the arrays differ in length, change nothing and return False."""
        shapes = {array.shape for array in arrays.values()}
        fitting = all(name in arrays and arrays[name].dtype == own.dtype for name, own in self._arrays.items())
        if not fitting or len(shapes) != 1:
            return False
        self._arrays, (self.rows,) = dict(arrays), next(iter(shapes))
        return True


_FORMAT = 2
_TABLES = f"""
CREATE TABLE IF NOT EXISTS columns (part TEXT, name TEXT, kind TEXT, data BLOB, PRIMARY KEY (part, name)) STRICT;
CREATE TABLE IF NOT EXISTS facts (part TEXT PRIMARY KEY, value TEXT) STRICT;
PRAGMA user_version = {_FORMAT};
"""
_LOCK_SECONDS = 1.0

Facts = TypeVar("Facts")


class Cache:
    """Cache of what was read of one run: columns and facts in named parts, in the SQLite file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, part: str, columns: Mapping[str, Column], facts: object) -> None:
        """Store the columns and facts of a part, in place of those stored before. If that fails (on a full disk, say),
        the cache file is deleted, and all parts are read from the run again next time; nothing is raised."""
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
        """Load the columns by name, and the facts decoded as `kind`, of a part; None if the part is missing or
        unreadable."""
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
