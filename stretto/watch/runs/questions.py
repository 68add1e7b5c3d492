"""The prompts of a run as texts, found by their ids without being held in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from stretto.core.errors import StoreError
from stretto.store.export import ExportedQuestion
from stretto.store.series.follower import open_plain

_BLOCK = 1 << 20
_LONGEST = 64 << 20  #: bytes of a line; a longer one is no prompt
_question = msgspec.json.Decoder(ExportedQuestion).decode


class _Id(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Id).decode


class PromptTexts:
    """``questions.jsonl``, written once, before the run starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fault: str | None = None
        self._places: dict[str, tuple[int, int]] = {}  # id: where its line begins, and its bytes
        self._read, self._identity = 0, (0, 0, 0)
        self._searched: tuple[object, frozenset[str]] = (None, frozenset())

    def advance(self) -> bool:
        """Read a few megabytes more; whether there is more.

        Raises:
            StoreError: it is no plain file.
        """
        try:
            descriptor = open_plain(self._path)
        except FileNotFoundError:
            return False
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if (identity := (found.st_dev, found.st_ino, found.st_mtime_ns)) != self._identity:
                self._places, self._read, self._identity = {}, 0, identity
            file.seek(self._read)
            data = file.read(_BLOCK) + file.readline(_LONGEST)
        for begin, row in _rows(data):
            try:
                self._places[_id(row).id] = (self._read + begin, len(row))
            except (msgspec.MsgspecError, RecursionError):  # the text of one prompt is missing, and that is seen
                continue
        self._read += len(data)
        return self._read < found.st_size

    def find(self, ids: Iterable[str]) -> dict[str, ExportedQuestion]:
        """The questions with these ids, as far as they are on record."""
        places = sorted((place, id) for id in set(ids) if (place := self._places.get(id)) is not None)
        found: dict[str, ExportedQuestion] = {}
        if not places:
            return found
        try:
            with open(open_plain(self._path), "rb") as file:
                for (begin, size), id in places:
                    file.seek(begin)
                    found[id] = _question(file.read(size))
        except (OSError, StoreError, msgspec.MsgspecError, RecursionError):
            pass  # it has gone or changed since it was read: what was found is shown
        return found

    def search(self, text: str) -> frozenset[str]:
        """The ids of the prompts that contain a text; capitals do not count."""
        key = (text, self._read, self._identity)
        if self._searched[0] == key:
            return self._searched[1]
        wanted, found = text.casefold(), set[str]()
        try:
            with open(open_plain(self._path), "rb") as file:
                while data := file.read(_BLOCK) + file.readline(_LONGEST):
                    for _, row in _rows(data):
                        try:
                            question = _question(row)
                        except (msgspec.MsgspecError, RecursionError):
                            continue
                        if wanted in question.prompt.casefold():
                            found.add(question.id)
        except (OSError, StoreError):
            pass  # there is no record of the questions: no prompt contains the text
        self._searched = (key, frozenset(found))
        return self._searched[1]


def _rows(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for row in data.split(b"\n"):
        if row:
            yield at, row
        at += len(row) + 1
