"""Messages that a server of weights and a mirror exchange beside a publication's bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import xxhash

from stretto.core.errors import TornPublication, naming
from stretto.core.records import Record
from stretto.weights.manifest import LENGTH, read_header

_LONGEST_HEADER = 1 << 28
_PIECE = 1 << 20

#: HTTP headers: the run, its newest version, the encoding of a publication, and the bytes that the server has read so
#: far for a list that it does not have yet.
RUN, NEWEST, FORM, READ = "stretto-run", "stretto-newest", "stretto-form", "stretto-read"


def seal_of(file: int) -> str:
    """Check the header of an open file, given by its descriptor; returns its seal. The tensors are not checked.

    Raises:
        TornPublication: the header is incomplete, damaged, or longer than any publication's.
    """
    length = int.from_bytes(os.pread(file, LENGTH, 0), "little")
    if length > _LONGEST_HEADER:
        raise TornPublication(f"a header of {length} bytes, which no publication has")
    return read_header(memoryview(os.pread(file, LENGTH + length, 0)))[0].seal


class ModelFile(Record, frozen=True):
    """A file of a model folder that a weights server offers. `digest`: its 128-bit xxh3 in hexadecimal digits."""

    name: str
    size: int
    digest: str


def digest_of(path: Path, read: Callable[[int], object] = lambda size: None) -> str:
    """The 128-bit xxh3 of a file, in hexadecimal digits. `read` is called with the size of each piece that was read: a
    large file on a slow disk takes minutes."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            read(len(piece))
    return digest.hexdigest()


def write_at(file: FileIO, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at `offset`; the file's own position does not move.

    Raises:
        OSError: the system's error, with the path.
    """
    with naming(Path(str(file.name))):
        while data:
            written = os.pwrite(file.fileno(), data, offset)
            data, offset = data[written:], offset + written
