"""Texts of a run's prompts, found by id without holding the texts in memory."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.records import Record
from stretto.store.run_folder import ExportedQuestion
from stretto.store.series.lines import open_plain

_BLOCK = 1 << 20
_LONGEST = 64 << 20  #: bytes of a line; a longer line is cut and skipped
_PLACE_BYTES = 300  # approximate memory of an id with its position
_MOST_SEARCHES = 4  # searches whose results are kept
_MOST_COMPARED = 1_000_000  # prompts
_question = msgspec.json.Decoder(ExportedQuestion).decode


class _Asked(msgspec.Struct):
    id: str
    prompt: str


_asked = msgspec.json.Decoder(_Asked).decode


class Repeats(Record, frozen=True):
    """Number (`duplicate`) and `share` of the texts that equal another text, among the `looked_at` texts; the share is
    0 if there are none."""

    looked_at: int
    duplicate: int
    share: float

    @classmethod
    def among(cls, counts: Collection[int]) -> Self:
        """Count repeats from the number of occurrences of each distinct text."""
        looked_at, duplicate = sum(counts), sum(count for count in counts if count > 1)
        return cls(looked_at, duplicate, duplicate / max(1, looked_at))


class Searched(Record, frozen=True):
    """Result of a search so far: ids of the prompts that contain the text, among the `share` of the file that was
    searched (1: all)."""

    ids: frozenset[str]
    share: float


@dataclass
class _Search:
    at: int = 0  # bytes that were searched
    found: set[str] = field(default_factory=set)


class PromptTexts:
    """Reader of the file ``questions.jsonl`` at `path`, which is written once before the run starts; a file that was
    replaced is read from its beginning. `fault`: always None, since `advance` raises."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fault: str | None = None
        self._places: dict[str, tuple[int, int]] = {}  # id: offset and size of its line
        self._read, self._identity = 0, (0, 0, 0)
        self._searches: dict[tuple[str, tuple[int, int, int]], _Search] = {}
        self._hashes = array("q")  # hashes of the texts of the first prompts

    def advance(self) -> bool:
        """Read about a megabyte more, from the beginning if the file was replaced; return whether there is more. False
        if there is no file. Unreadable lines are skipped. Raises StoreError if it is no regular file or cannot be
        opened."""
        try:
            descriptor = open_plain(self._path)
        except FileNotFoundError:
            return False
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if (identity := (found.st_dev, found.st_ino, found.st_mtime_ns)) != self._identity:
                self._places, self._read, self._identity, self._hashes = {}, 0, identity, array("q")
            file.seek(self._read)
            data = file.read(_BLOCK) + file.readline(_LONGEST)
        for begin, row in _rows(data):
            try:
                question = _asked(row)
            except UNREADABLE:  # this prompt is shown without its text
                continue
            self._places[question.id] = (self._read + begin, len(row))
            if len(self._hashes) < _MOST_COMPARED:
                self._hashes.append(hash(question.prompt))
        self._read += len(data)
        return self._read < found.st_size

    def find(self, ids: Iterable[str]) -> dict[str, ExportedQuestion]:
        """Return the questions with these ids, by id, as far as they have been read and are still in the file."""
        places = sorted((place, id) for id in set(ids) if (place := self._places.get(id)) is not None)
        found: dict[str, ExportedQuestion] = {}
        if places:  # the file may have been removed or changed meanwhile: return what was found
            with suppress(OSError, StoreError, *UNREADABLE), open(open_plain(self._path), "rb") as file:
                for (begin, size), id in places:
                    file.seek(begin)
                    found[id] = _question(file.read(size))
        return found

    def search(self, text: str, seconds: float) -> Searched:
        """Search the prompts for a text, ignoring case, for about `seconds`, and return what was found so far; a
        repeated call continues the search. If the file cannot be read, the result is empty and complete (share 1)."""
        until = time.monotonic() + seconds
        try:
            descriptor = open_plain(self._path)
        except (OSError, StoreError):  # there is no record of the questions: no prompt contains the text
            return Searched(frozenset(), 1.0)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            search = self._search(text, (status.st_dev, status.st_ino, status.st_mtime_ns))
            wanted = text.casefold()
            file.seek(search.at)
            while search.at < status.st_size:
                data = file.read(_BLOCK) + file.readline(_LONGEST)
                search.found.update(_containing(wanted, data))
                search.at = search.at + len(data) if data else status.st_size
                if time.monotonic() >= until:
                    break
        return Searched(frozenset(search.found), min(1.0, search.at / status.st_size) if status.st_size else 1.0)

    def _search(self, text: str, identity: tuple[int, int, int]) -> _Search:
        """Return the search for this text in the file with this identity (device, inode, time), with its results so
        far; a new one if there is none. The newest four are kept, so that several browser tabs do not restart each
        other's."""
        found = self._searches.pop((text, identity), None) or _Search()
        self._searches[text, identity] = found
        while len(self._searches) > _MOST_SEARCHES:
            del self._searches[next(iter(self._searches))]
        return found

    @property
    def repeats(self) -> Repeats:
        """Number and share of the prompts whose text another prompt has too, among the first million read."""
        return Repeats.among(np.unique(np.frombuffer(self._hashes, np.int64), return_counts=True)[1].tolist())

    @property
    def held(self) -> int:
        """Approximate memory in bytes."""
        return _PLACE_BYTES * len(self._places) + self._hashes.itemsize * len(self._hashes)


def _containing(wanted: str, data: bytes) -> Iterator[str]:
    """Yield the ids of the prompts in `data` (lines of JSON) that contain the case-folded text `wanted`. Unreadable
    lines are skipped."""
    for _, row in _rows(data):
        try:
            question = _asked(row)
        except UNREADABLE:
            continue
        if wanted in question.prompt.casefold():
            yield question.id


def _rows(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for row in data.split(b"\n"):
        if row:
            yield at, row
        at += len(row) + 1
