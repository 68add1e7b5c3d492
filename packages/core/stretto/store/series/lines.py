"""Append-only JSON-lines files, one record per line: writing and reading them, and following one that another process
writes.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec
import xxhash

from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.events import Span
from stretto.core.frames import encoded
from stretto.core.machine import sync
from stretto.store.files import identity, whole_file

Line = TypeVar("Line")
Extent = tuple[int, str]  #: number of bytes at the beginning of a file, and their XXH3 checksum (128 bits, hexadecimal)

_TAIL = 1 << 16  # bytes that are read at a time from the end of a file

_log = logging.getLogger(__name__)


class LineWriter(Generic[Line]):
    """Appends records to one file, which the first line creates. An incomplete last line, left by a kill, is cut off
    when the writer is created. Nothing is written once the file's folder was moved or replaced.

    If the file or a line cannot be written, one warning is logged, `lost` counts the lines that are not in the file,
    and nothing is raised: losing measurements must not end a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._folder = identity(path.parent)
        self._sum, self._size = xxhash.xxh3_128(), 0  # of the bytes so far, once `extent` was called
        self._attempt(self._cut_torn_line, lines=0)

    @property
    def extent(self) -> Extent:
        """Size and checksum of the file; of nothing if it cannot be read. The first call reads the file, a long one a
        gigabyte in a tenth of a second; later ones need not, since only this writer appends."""
        try:
            if self.path.stat().st_size != self._size:
                self._sum, self._size = _sum_of(self.path)
        except (OSError, StoreError):  # it does not exist, is no file
            self._sum, self._size = xxhash.xxh3_128(), 0
        return self._size, self._sum.hexdigest()

    def append(self, lines: Iterable[Line]) -> None:
        """Append one line per record, without buffering: readers see the lines at once, and they survive a kill. A
        record that readers would refuse, as one with a number that is not finite, is lost."""
        texts = list[bytes]()
        for line in lines:
            try:
                texts.append(encoded(line))
            except (UnicodeEncodeError, *UNREADABLE) as error:
                self._lose(1, str(error))
        if texts:
            self._attempt(lambda: self._write(b"\n".join(texts) + b"\n"), lines=len(texts))

    def _attempt(self, write: Callable[[], None], lines: int) -> None:
        try:
            write()
        except OSError as error:
            self._lose(lines, str(error.strerror))

    def _lose(self, lines: int, why: str) -> None:
        if not self.lost:
            _log.warning("%s cannot be written (%s); the run continues without it", self.path, why)
        self.lost += lines

    def _write(self, data: bytes) -> None:
        if self._folder not in (None, identity(self.path.parent)):
            raise OSError(errno.ENOENT, "its folder was moved or removed")
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(data) != len(data):  # the disk filled up in the middle of a line
                file.truncate(end)
                raise OSError(0, "no space left for a whole line")
        if end == self._size:
            self._sum.update(data)
            self._size += len(data)

    def _cut_torn_line(self) -> None:
        if not self.path.is_file():
            return
        whole = _complete_bytes(self.path)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)


#: Appends to ``spans.jsonl``: time spans of every role's work, for the timeline plot.
SpanLog = LineWriter[Span]


def read_lines(path: Path, decoder: msgspec.json.Decoder[Line]) -> list[Line]:
    """Read all complete lines of a file; an incomplete last line is left out. Empty if there is no file.

    Raises:
        StoreError: a complete line cannot be read (names file and line), or the path is a pipe.
        OSError: the file cannot be read, or is a folder.
    """
    return list(iterate_lines(path, decoder))


def iterate_lines(path: Path, decoder: msgspec.json.Decoder[Line], but: bytes | tuple[()] = ()) -> Iterator[Line]:
    """Yield the complete lines of a file, which is read as it is iterated; none without a file. Lines that begin with
    `but` are left out, and not decoded. Raises StoreError at a line that cannot be read, and the other errors of
    `read_lines`."""
    for _, line in _each_line(path, decoder, but=but):
        if isinstance(line, StoreError):
            raise line
        yield line


def keep_lines(
    path: Path, decoder: msgspec.json.Decoder[Line], keep: Callable[[Line], bool], written: Extent | None = None
) -> None:
    """Leave only the records in the file for which `keep` returns True (it may be called twice for a record). A file
    that has no others stays as it is, and of one that has them at its end, they are cut off; else it is rewritten. One
    that does not exist is not created.

    Unreadable lines are dropped, with a warning, and an incomplete last line without one. A file that cannot be written
    stays as it is, with a warning. One line is in memory at a time: a long run has hundreds of thousands.

    Args:
        written: of an earlier time, when all records were to be kept (`LineWriter.extent`). Only what follows is
            decoded, unless the file has changed there.
    """
    if not path.exists():
        return
    broken, goes, behind = list[StoreError](), False, False
    try:
        start = end = written[0] if written is not None and _begins_with(path, written) else 0
        for row, line in _each_line(path, decoder, start):
            if isinstance(line, StoreError):
                broken.append(line)
            stays = not isinstance(line, StoreError) and keep(line)
            goes, behind = goes or not stays, behind or (goes and stays)
            end += 0 if goes else len(row)
        if behind:
            with whole_file(path) as file:
                with path.open("rb") as before:
                    _pass_on(before, end, file.write)
                for row, line in _each_line(path, decoder, end):
                    if not isinstance(line, StoreError) and keep(line):
                        file.write(row)
            sync(path.parent)
        elif end < path.stat().st_size:
            os.truncate(path, end)
            sync(path)
    except OSError as error:
        _log.warning("%s cannot be rewritten (%s); the run continues with it as it is", path, error.strerror)
        return
    if broken:
        _log.warning("%s; the run continues without this line and %d more", broken[0], len(broken) - 1)


def _begins_with(path: Path, written: Extent) -> bool:
    """Whether the file begins with these bytes, whole lines that were written earlier."""
    try:
        found, size = _sum_of(path, written[0])
    except StoreError:  # it is no file
        return False
    return (size, found.hexdigest()) == written


def _sum_of(path: Path, size: int | None = None) -> tuple[xxhash.xxh3_128, int]:
    """Checksum of the first `size` bytes of a file (None: all), and how many it has."""
    found = xxhash.xxh3_128()
    with open(open_plain(path, links=True), "rb") as file:
        _pass_on(file, os.fstat(file.fileno()).st_size if size is None else size, found.update)
        return found, file.tell()


def _pass_on(file: BinaryIO, size: int, to: Callable[[bytes], object]) -> None:
    """Call `to` with the next `size` bytes of a file, or fewer at its end, part by part."""
    while size and (data := file.read(min(size, _BLOCK))):
        to(data)
        size -= len(data)


def _complete_bytes(path: Path) -> int:
    """Number of bytes up to the end of the last complete line. The file is read from its end. 0 without a complete
    line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _TAIL)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def _each_line(
    path: Path, decoder: msgspec.json.Decoder[Line], start: int = 0, but: bytes | tuple[()] = ()
) -> Iterator[tuple[bytes, Line | StoreError]]:
    """Yield each complete line from byte `start` on, and what it is decoded to; those that begin with `but` are left
    out."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        descriptor = open_plain(path, links=True)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        file.seek(start)
        for number, row in enumerate(file, start=1):
            if not row.endswith(b"\n"):
                return
            if row.startswith(but):
                continue
            try:
                yield row, decoder.decode(row)
            except UNREADABLE as error:
                number += _lines_in(path, start)  # only of a damaged file
                yield row, StoreError(f"{path}: line {number} cannot be read: {error}")


def _lines_in(path: Path, size: int) -> int:
    """Number of lines in the first `size` bytes of a file."""
    counts = list[int]()
    with path.open("rb") as file:
        _pass_on(file, size, lambda block: counts.append(block.count(b"\n")))
    return sum(counts)


Decoded = TypeVar("Decoded", bound=msgspec.Struct)
_FIRST_BYTES = 4_096  # bytes of the first line by which a file is recognised: times and roles in it differ by run
_BLOCK = 1 << 20  #: bytes that are read at a time
_LONGEST_LINE = 64 << 20
_LARGEST_NUMBER = (1 << 63) - 1
_NO_FILE = (0, 0, "")
_AND = "+"  # between two digests


def open_plain(path: Path, links: bool = False) -> int:
    """Open a regular file for reading; returns its descriptor, which the caller closes. `links`: follow a link.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreError: the path is a pipe or a folder; or, without `links`, is a link or cannot be read.
        OSError: with `links`, the file cannot be read.
    """
    try:
        kept = 0 if links else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDONLY | kept | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if links:
            raise
        found = "is a link" if path.is_symlink() else error.strerror or str(error)
        raise StoreError(f"{path.name}: is not read: {found}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path.name}: is not read: it is no regular file")
    return descriptor


def decode_line(decoder: msgspec.json.Decoder[Decoded], row: bytes) -> Decoded:
    """Decode one line to a record. Raises StoreError if the line is invalid, or a field of it is an integer outside
    ±(2**63 - 1), for which readers have no type."""
    try:
        line = decoder.decode(row)
    except UNREADABLE as error:
        raise StoreError(str(error)) from error
    for name in line.__struct_fields__:
        value = getattr(line, name)
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise StoreError(f"{name} has more than 64 bits")
    return line


class LineFollower(Generic[Decoded]):
    """Reads the complete lines of a JSON-lines file as they are appended; each `read_on` reads some more. A file that
    was rewritten is read again from its start.

    Lines that cannot be decoded are skipped. `fault`: error message of the first skipped line; None if there is none.
    `more`: whether the next call may find more lines at once.
    A caller that stores `identity`, `offset` and `number`, and sets them on another follower of the file, continues.
    """

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[Decoded], *, links: bool = False) -> None:
        """Prepare to read the file at `path` from its start; `read_on` opens it. `links`: the path may be a link to a
        file."""
        self._path, self._decoder, self._links = path, decoder, links
        # Device, inode, digests of the first line and of the bytes before `offset`. A file system may give a rewritten
        # file the inode of an earlier one, and a rewritten file begins like the earlier one.
        self.identity: tuple[int, int, str] = _NO_FILE
        self.offset, self.number = 0, 0  # bytes and lines that have been read
        self._before = b""  # newest bytes before `offset`
        self.more = True  # whether there may be more than has been read
        self.fault: str | None = None

    def read_on(self) -> tuple[list[Decoded], bool]:
        """Read the complete lines that follow those read so far: about 1 MiB, or one line if it is longer. A file that
        does not exist has no lines.

        Returns:
            The lines, and whether the file was rewritten or removed, so that these lines are its first.

        Raises as `open_plain`, except for a file that does not exist; StoreError also if a line is longer than 64 MiB.
        """
        try:
            descriptor = open_plain(self._path, self._links)
        except FileNotFoundError:
            self.more = False
            return [], self._begin()
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            again = bool(self.offset) and not self._is_known(file, found) and self._begin()
            file.seek(self.offset)
            data = file.read(_BLOCK)
            while b"\n" not in data and len(data) < _LONGEST_LINE and (block := file.read(_BLOCK)):
                data += block
        if len(data) >= _LONGEST_LINE and b"\n" not in data:
            raise StoreError(f"{self._path.name}: line {self.number + 1} is longer than {_LONGEST_LINE:,} bytes")
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            first = self.identity[2].partition(_AND)[0] if self.offset else _digest(whole)
            # A line may be longer than what is read here: the bytes before the offset are those of the last line.
            self._before = (self._before + whole)[-_FIRST_BYTES:]
            self.identity = (found.st_dev, found.st_ino, f"{first}{_AND}{_digest_of(self._before)}")
        self.offset += len(whole)
        self.more = bool(whole) and found.st_size > self.offset
        return self._lines(whole), again

    def skip(self) -> None:
        """Take all lines as read, of which the last is complete. Raises as `open_plain`."""
        with open(open_plain(self._path, self._links), "rb") as file:
            found = os.fstat(file.fileno())
            first = _digest(file.read(_FIRST_BYTES))
            file.seek(max(0, found.st_size - _FIRST_BYTES))
            self._before = file.read()
        self.identity = (found.st_dev, found.st_ino, f"{first}{_AND}{_digest_of(self._before)}")
        self.offset = found.st_size

    def _is_known(self, file: BinaryIO, found: os.stat_result) -> bool:
        """Whether the open file, with the status `found`, is the one that was read so far; moves its position. An
        identity that an earlier version of stretto has kept has no digest of the bytes before the offset."""
        first, _, before = self.identity[2].partition(_AND)
        if found.st_size < self.offset or (found.st_dev, found.st_ino) != self.identity[:2]:
            return False
        if _digest(file.read(_FIRST_BYTES)) != first:
            return False
        file.seek(max(0, self.offset - _FIRST_BYTES))
        self._before = file.read(min(self.offset, _FIRST_BYTES))
        return before in ("", _digest_of(self._before))

    def _begin(self) -> bool:
        """Reset to the start of the file; returns whether anything had been read before."""
        had = self.offset > 0
        self.identity, self.offset, self.number, self.fault, self._before = _NO_FILE, 0, 0, None, b""
        return had

    def _lines(self, data: bytes) -> list[Decoded]:
        lines: list[Decoded] = []
        for row in data.split(b"\n")[:-1]:
            self.number += 1
            try:
                lines.append(decode_line(self._decoder, row))
            except StoreError as error:
                self.fault = self.fault or f"{self._path.name}: line {self.number} cannot be read: {error}"
        return lines


def _digest(lines: bytes) -> str:
    """Digest of the first line of `lines`, of its first 4 KiB if it is longer."""
    return _digest_of(lines.partition(b"\n")[0][:_FIRST_BYTES])


def _digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
