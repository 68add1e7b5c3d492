"""Trajectories of a run as columns, updated as the ledger grows and states change."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.core.records import Outcome, Record, State, StopReason
from stretto.core.states import OPEN
from stretto.store.files import identity
from stretto_report.watch.index.columns import Cache, Column, GrowingColumns
from stretto_report.watch.index.files import LEDGER, ledger_stamp, read_ledger

_PART, _COUNTED = "trajectories", "counts"
_COUNTS = "SELECT state, count(*) FROM trajectories GROUP BY state"
_LONG_SECONDS = 0.02
_AT_ONCE = 5_000
_KEPT_FROM = 20_000
_SELECT = """
    SELECT t.key, group_key, member, state, reason, ifnull(trained_step, -1), verdict, reward, stop_reason, tokens,
        ifnull(oldest_version, -1), ifnull(newest_version, -1), interrupted, admitted_version, prompt_id, members
    FROM trajectories AS t JOIN groups ON groups.key = group_key
"""
_NEW = f"{_SELECT} WHERE t.key > ? ORDER BY t.key LIMIT ?"
_AGAIN = f"{_SELECT} WHERE t.key IN (SELECT value FROM json_each(?)) ORDER BY t.key"
_ANCHOR = "SELECT t.seal FROM groups AS t ORDER BY key LIMIT 1"
_NUMBERS = {"key": "i8", "group_key": "i8", "member": "i4", "step": "i4", "length": "i4", "oldest": "i4"}
_NUMBERS |= {"newest": "i4", "interrupted": "i4", "admitted": "i4", "members": "i4"}
_WORDS = {"state": "i1", "verdict": "i1", "stop": "i1", "reason": "i4", "prompt": "i4"}
_WORD_BYTES = 200  # about, of a word with its number
_ORDER: tuple[str, ...] = ("key", "group_key", "member", "state", "reason", "step", "verdict", "reward", "stop")
_ORDER += ("length", "oldest", "newest", "interrupted", "admitted", "prompt", "members")

NONE = -1  #: stands for a missing number or word


class WordCodes:
    """Codes of words as small integers, from 0 in the order of first use; -1 stands for no word. `all`: the words in
    the order of their codes."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.all = list(known)
        self._codes = {word: code for code, word in enumerate(self.all)}

    def codes(self, words: Sequence[str | None]) -> list[int]:
        """Return the codes of words; new words get new codes, and None is -1."""
        known = {word: self.code(word) for word in dict.fromkeys(words)}
        return [known[word] for word in words]

    def code(self, word: str | None) -> int:
        """Return the code of a word; a new word gets a new code. -1 for None."""
        if word is None:
            return NONE
        code = self._codes.get(word)
        if code is None:
            code = self._codes[word] = len(self.all)
            self.all.append(word)
        return code

    @property
    def held(self) -> int:
        """Approximate memory in bytes."""
        return _WORD_BYTES * len(self.all)

    def find(self, word: str) -> int | None:
        """Return the code of a word; None if it has none."""
        return self._codes.get(word)

    def __getitem__(self, code: int) -> str | None:
        return None if code == NONE else self.all[code]


class _Facts(Record, frozen=True):
    ledger: tuple[int, int]
    anchor: str
    words: dict[str, list[str]]


class Trajectories:
    """The ledger's rows of trajectories as columns of `table`, read by `advance`. A row in a final state is read once;
    other rows are read again.

    Columns: the numbers of the ledger's row, -1 where missing; ``reward`` with NaN; and ``state``, ``verdict``,
    ``stop``, ``reason``, ``prompt`` as codes of `words`. `indexed`: share of the ledger's trajectories that were read.
    `changes` grows when rows are new or have changed. `fault`: always None, since `advance` raises.
    """

    def __init__(self, folder: Path, cache: Cache) -> None:
        self._folder, self._cache = folder, cache
        self._ledger = folder / LEDGER
        self.fault: str | None = None
        self._reset()
        if (kept := cache.load(_PART, _Facts)) is not None and kept[1].ledger == identity(self._ledger):
            self._restore(*kept)

    def _reset(self) -> None:
        self.table = GrowingColumns(_NUMBERS | _WORDS | {"reward": "f8"})
        self.words = {name: WordCodes() for name in _WORDS}
        self.words |= {"state": WordCodes(State), "verdict": WordCodes(Outcome), "stop": WordCodes(StopReason)}
        self.indexed, self.changes = 0.0, 0
        self._more = True  # also true if the last read was exactly full and nothing follows
        self._stamp: object = None
        self._kept, self._anchor, self._file = 0, "", (0, 0)

    def _restore(self, arrays: dict[str, Column], facts: _Facts) -> None:
        if self.table.restore(arrays) and facts.words.keys() == self.words.keys():
            self.words = {name: WordCodes(words) for name, words in facts.words.items()}
            self._kept, self._anchor, self._file = self.table.rows, facts.anchor, facts.ledger

    def advance(self) -> bool:
        """Read up to 5,000 new rows, and, after the last one, the rows that may have changed; return whether there may
        be more. Does nothing if the ledger is as it was after the last row. A ledger that was replaced is read from its
        beginning. Raises StoreError if the ledger cannot be read; rows read so far stay."""
        if (stamp := ledger_stamp(self._folder)) == self._stamp and not self._more:
            return False
        with read_ledger(self._folder) as connection:
            anchor = (connection.execute(_ANCHOR).fetchone() or (b"",))[0].hex()
            if self._file != (file := identity(self._ledger) or (0, 0)) or (self.table.rows and self._anchor != anchor):
                self._reset()
            self._file, self._anchor = file, anchor
            last = int(self.table["key"][-1]) if self.table.rows else -1
            rows = connection.execute(_NEW, (last, _AT_ONCE)).fetchall()
            again = self._open_places() if len(rows) < _AT_ONCE else np.empty(0, int)
            keys = msgspec.json.encode(self.table["key"][again].tolist()).decode()
            renewed = connection.execute(_AGAIN, (keys,)).fetchall() if len(again) else []
            newest = connection.execute("SELECT coalesce(max(key), -1) FROM trajectories").fetchone()[0]
        if renewed:
            self._renew(renewed)
        if rows:
            self.table.append(self._columns(rows))
            self.changes += 1
        last = int(self.table["key"][-1]) if self.table.rows else -1
        more = self._more = len(rows) == _AT_ONCE
        self.indexed = (last + 1) / (newest + 1) if more else 1.0
        self._stamp = stamp
        if not more and self.table.rows > max(_KEPT_FROM, 1.2 * self._kept):
            self.keep()
        return more

    @property
    def held(self) -> int:
        """Approximate memory in bytes."""
        return self.table.held + sum(words.held for words in self.words.values())

    def keep(self) -> None:
        """Save all that was read to the cache."""
        self._kept = self.table.rows
        facts = _Facts(self._file, self._anchor, {name: words.all for name, words in self.words.items()})
        self._cache.save(_PART, {name: self.table[name] for name in self.table.names}, facts)

    def _open_places(self) -> Column:
        states = [self.words["state"].code(state) for state in OPEN]
        return np.flatnonzero(np.isin(self.table["state"], states))

    def _renew(self, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = self._columns(rows)
        places = np.searchsorted(self.table["key"], columns["key"])
        if any((self.table[name][places] != columns[name]).any() for name in ("state", "length", "step")):
            self.table.put(places, columns)
            self.changes += 1

    def _columns(self, rows: Sequence[tuple[Any, ...]]) -> Mapping[str, Column]:
        columns: dict[str, Sequence[Any]] = dict(zip(_ORDER, zip(*rows, strict=True), strict=True))
        for name in _WORDS:
            columns[name] = self.words[name].codes(columns[name])
        kinds = _NUMBERS | _WORDS | {"reward": "f8"}
        return {name: np.array(values, kinds[name]) for name, values in columns.items()}

    def count(self, name: str) -> dict[str, int]:
        """Return the number of rows for each word of the column `name`, most frequent first, without words that no row
        has; "none" stands for a missing word."""
        values = self.table[name].astype(np.int64)
        least = values.min(initial=0)
        counts = np.bincount(values - least)
        order = np.argsort(-counts, kind="stable")
        return {self.words[name][int(at + least)] or "none": int(counts[at]) for at in order if counts[at]}

    @property
    def staleness(self) -> Column:
        """Versions between the oldest token and the update that trained on it, [rows]; -1 if untrained or without
        tokens."""
        step, oldest = self.table["step"], self.table["oldest"]
        return np.where((step >= 0) & (oldest >= 0), step - 1 - oldest, NONE)


class _Counted(Record, frozen=True):
    stamp: list[tuple[int, int, int]]
    counts: dict[str, int]


def count_states(connection: sqlite3.Connection, folder: Path, cache: Cache) -> dict[str, int]:
    """Return the number of trajectories in each state that has any, from the ledger in `folder`, open as `connection`.
    A count that took long is cached until the ledger changes."""
    stamp, since = ledger_stamp(folder), time.monotonic()
    if (kept := cache.load(_COUNTED, _Counted)) is not None and kept[1].stamp == stamp:
        return kept[1].counts
    counts = dict(connection.execute(_COUNTS).fetchall())
    if time.monotonic() - since >= _LONG_SECONDS:
        cache.save(_COUNTED, {}, _Counted(stamp, counts))
    return counts
