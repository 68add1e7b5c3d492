"""Read names, shapes and file sizes from safetensors headers, without the weights."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a safetensors file. `dtype`: as safetensors names it ("F32", "BF16"); `end`: offset of its end in
    the data, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


_POINTER = b"version https://git-lfs"
POINTS = "is a pointer of git-lfs, and what it points to was not fetched: run `git lfs pull` in the folder"


def is_pointer(file: Path) -> bool:
    """Whether the file is a git-lfs pointer instead of the real content."""
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


class BrokenHeader(ValueError):
    """The file is not a complete safetensors file; the text is the reason."""


def read_headers(file: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file; returns its tensors by name.

    Raises:
        BrokenHeader: the header cannot be read, or does not match the file size.
    """
    size = file.stat().st_size
    if is_pointer(file):
        raise BrokenHeader(POINTS)
    with file.open("rb") as stream:
        start = stream.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise BrokenHeader(f"is {size} bytes, too short for a safetensors file")
        (length,) = _LENGTH.unpack(start)
        if length > min(size - _LENGTH.size, _LARGEST_HEADER):
            raise BrokenHeader(f"announces a header of {length:,} bytes in a file of {size:,}")
        tensors = _parse(stream.read(length))
    expected = _LENGTH.size + length + max((tensor.end for tensor in tensors.values()), default=0)
    if size != expected:
        raise BrokenHeader(f"is {size:,} bytes, its header says {expected:,}")
    return tensors


def _parse(header: bytes) -> dict[str, TensorHeader]:
    try:
        entries = json.loads(header)
        return {
            name: TensorHeader(entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise BrokenHeader(f"has a header that cannot be read ({type(error).__name__}: {error})") from None
