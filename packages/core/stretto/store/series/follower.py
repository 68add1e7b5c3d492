"""Reading a JSON-lines file that grows while it is read, for processes other than the run. The file is not trusted:
links are refused, pipes do not block the reader, and the length of a line is bounded."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from stretto.core.errors import UNREADABLE, StoreError

Line = TypeVar("Line", bound=msgspec.Struct)
_FIRST_BYTES = 4_096  # bytes of the first line by which a file is recognised: times and roles in it differ by run
_BLOCK = 1 << 20  #: bytes that are read at a time
_LONGEST_LINE = 64 << 20
_LARGEST_NUMBER = (1 << 63) - 1
_NO_FILE = (0, 0, "")


def open_plain(path: Path) -> int:
    """Open a regular file for reading; returns its descriptor, which the caller closes.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreError: the path is a link, a pipe or a folder, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        found = "is a link" if path.is_symlink() else error.strerror or str(error)
        raise StoreError(f"{path.name}: is not read: {found}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path.name}: is not read: it is no regular file")
    return descriptor


def decode_line(decoder: msgspec.json.Decoder[Line], row: bytes) -> Line:
    """Decode one line to a record.

    Raises:
        StoreError: the line is invalid, or has an integer of more than 64 bits, for which readers have no type.
    """
    try:
        line = decoder.decode(row)
    except UNREADABLE as error:
        raise StoreError(str(error)) from error
    for name in line.__struct_fields__:
        value = getattr(line, name)
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise StoreError(f"{name} has more than 64 bits")
    return line


class LineFollower(Generic[Line]):
    """Reads the complete lines of a JSON-lines file as they are appended. A file that was rewritten is read again from
    its start.

    Lines that cannot be decoded are skipped. `fault`: error message of the first skipped line; None if there is none.
    """

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[Line]) -> None:
        self._path, self._decoder = path, decoder
        self.identity: tuple[int, int, str] = _NO_FILE  # device, inode, digest of the first line
        self.offset, self.number = 0, 0  # bytes and lines that have been read
        self.more = True  # whether there may be more than has been read
        self.fault: str | None = None

    def read_on(self) -> tuple[list[Line], bool]:
        """Read the complete lines that follow those read so far: about `_BLOCK` bytes, or one line if it is longer. A
        file that does not exist has no lines.

        Returns:
            The lines, and whether the file was rewritten or removed, so that these lines are its first.

        Raises:
            StoreError: the path is a link, a pipe or a folder, or cannot be read; or a line is too long.
        """
        try:
            descriptor = open_plain(self._path)
        except FileNotFoundError:
            self.more = False
            return [], self._begin()
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            identity, again = (found.st_dev, found.st_ino, _digest(file.read(_FIRST_BYTES))), False
            if self.offset and (found.st_size < self.offset or identity != self.identity):
                again = self._begin()
            file.seek(self.offset)
            data = file.read(_BLOCK)
            while b"\n" not in data and len(data) < _LONGEST_LINE and (block := file.read(_BLOCK)):
                data += block
        if len(data) >= _LONGEST_LINE and b"\n" not in data:
            raise StoreError(f"{self._path.name}: line {self.number + 1} is longer than {_LONGEST_LINE:,} bytes")
        whole = data[: data.rfind(b"\n") + 1]
        if whole and not self.offset:
            self.identity = (*identity[:2], _digest(whole))
        self.offset += len(whole)
        self.more = bool(whole) and found.st_size > self.offset
        return self._lines(whole), again

    def _begin(self) -> bool:
        """Reset to the start of the file; returns whether anything had been read before."""
        had = self.offset > 0
        self.identity, self.offset, self.number, self.fault = _NO_FILE, 0, 0, None
        return had

    def _lines(self, data: bytes) -> list[Line]:
        lines: list[Line] = []
        for row in data.split(b"\n")[:-1]:
            self.number += 1
            try:
                lines.append(decode_line(self._decoder, row))
            except StoreError as error:
                self.fault = self.fault or f"{self._path.name}: line {self.number} cannot be read: {error}"
        return lines


def _digest(lines: bytes) -> str:
    return hashlib.blake2b(lines.partition(b"\n")[0][:_FIRST_BYTES], digest_size=8).hexdigest()
