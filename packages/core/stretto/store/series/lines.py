"""Writing and reading append-only JSON-lines files: one record per line. They can be read while a run writes, and a
full disk does not end the run."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store.files import identity, write_atomically

Line = TypeVar("Line")

_log = logging.getLogger(__name__)


class LineWriter(Generic[Line]):
    """Appends records to one file. An incomplete last line, left by a kill, is cut off when the writer is created.

    If the file cannot be written, one warning is logged, `lost` counts the lines that are not in the file, and nothing
    is raised: losing measurements must not end a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._folder = identity(path.parent)
        self._attempt(self._cut_torn_line, lines=0)

    def append(self, lines: Iterable[Line]) -> None:
        """Append one line per record, without buffering: readers see the lines at once, and they survive a kill."""
        encoded = [msgspec.json.encode(line) for line in lines]
        if encoded:
            self._attempt(lambda: self._write(b"\n".join(encoded) + b"\n"), lines=len(encoded))

    def _attempt(self, write: Callable[[], None], lines: int) -> None:
        try:
            write()
        except OSError as error:
            if not self.lost:
                _log.warning("%s cannot be written (%s); the run continues without it", self.path, error.strerror)
            self.lost += lines

    def _write(self, data: bytes) -> None:
        if self._folder not in (None, identity(self.path.parent)):
            raise OSError(errno.ENOENT, "its folder was moved or removed")
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(data) != len(data):  # the disk filled up in the middle of a line
                file.truncate(end)
                raise OSError(0, "no space left for a whole line")

    def _cut_torn_line(self) -> None:
        """Remove the incomplete last line that a killed writer left."""
        if not self.path.is_file():
            return
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def read_lines(path: Path, decoder: msgspec.json.Decoder[Line]) -> list[Line]:
    """Read all complete lines of a file; an incomplete last line is left out. Empty if there is no file.

    Raises:
        StoreError: a complete line cannot be read; names file and line.
    """
    return list(iterate_lines(path, decoder))


def iterate_lines(path: Path, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
    """Same as `read_lines`, one line at a time.

    Raises:
        StoreError: as `read_lines`.
    """
    for line in _each_line(path, decoder):
        if isinstance(line, StoreError):
            raise line
        yield line


def keep_lines(path: Path, decoder: msgspec.json.Decoder[Line], keep: Callable[[Line], bool]) -> None:
    """Rewrite the file with only the records for which `keep` returns True.

    Unreadable lines are dropped, with a warning. A file that cannot be written stays as it is, with a warning.
    """
    if not path.exists():
        return
    kept, broken = [], []
    try:
        for line in _each_line(path, decoder):
            if isinstance(line, StoreError):
                broken.append(line)
            elif keep(line):
                kept.append(msgspec.json.encode(line) + b"\n")
        write_atomically(path, b"".join(kept))
    except OSError as error:
        _log.warning("%s cannot be rewritten (%s); the run continues with it as it is", path, error.strerror)
        return
    if broken:
        _log.warning("%s; the run continues without this line and %d more", broken[0], len(broken) - 1)


def _each_line(path: Path, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line | StoreError]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, row in enumerate(file, start=1):
            if not row.endswith(b"\n"):
                return
            try:
                yield decoder.decode(row)
            except UNREADABLE as error:
                yield StoreError(f"{path}: line {number} cannot be read: {error}")
