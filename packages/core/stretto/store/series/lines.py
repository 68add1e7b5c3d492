"""Append-only JSON lines: one record a line, readable while a run writes, harmless when the disk is full."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from stretto.core.errors import StoreError
from stretto.store.files import identity, write_atomically

Line = TypeVar("Line")

_log = logging.getLogger(__name__)


class LineWriter(Generic[Line]):
    """Appends records to one file.

    A measurement is worth less than its run: when the file cannot be written, one warning is logged, the lines are
    counted in `lost`, and training continues.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._folder = identity(path.parent)
        self._attempt(self._cut_torn_line, lines=0)

    def append(self, lines: Iterable[Line]) -> None:
        """Append whole lines, unbuffered: readers see them at once, and a crash of the process keeps them."""
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
    """Read all complete lines of a file; empty if there is no file. An incomplete last line is left out.

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
    """Rewrite the file with only the lines for which `keep` is true.

    An unreadable line is dropped, and a file that cannot be written stays unchanged, each with a warning.
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
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                yield StoreError(f"{path}: line {number} cannot be read: {error}")
