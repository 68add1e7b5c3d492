"""Memory of the CPU in large pages (2 MiB, where Linux has them), for what each step reads as a whole: with pages of 4
KiB a core waits for their addresses, up to a quarter of the time."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_LARGE = 2 << 20  # bytes of a page
_CHUNK = 8 * _LARGE
_LINE = 64  # bytes that a core reads at once

_CPU = torch.device("cpu")


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On the CPU it is in large pages if whole ones are at most an eighth more."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    more = -size % _LARGE
    if device.type != "cpu" or not count or more > size // 8 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    try:  # the system lets memory begin at a large page only if it ends at one
        memory = mmap.mmap(-1, size + more, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch's error names the memory that is missing
        return torch.zeros(shape, dtype=dtype, device=device)
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class _Pieces:
    """Gives out memory of a chunk, piece by piece; a chunk is freed after its last piece."""

    def __init__(self) -> None:
        self._lock, self._chunk, self._used = Lock(), torch.empty(0, dtype=torch.uint8), 0

    def take(self, size: int) -> Tensor:
        """The next `size` bytes, which no other piece has."""
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = zeros((_CHUNK,), torch.uint8, _CPU), 0
            start, self._used = self._used, self._used + -(-size // _LINE) * _LINE
            return self._chunk[start : start + size]


_pieces = _Pieces()


def piece(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU with any numbers, among others in large pages, which may each be smaller than a page."""
    size = math.prod(shape) * dtype.itemsize
    if size > _CHUNK // 2:
        return zeros(shape, dtype, _CPU)
    return _pieces.take(size).view(dtype).view(shape)
