"""Progress of a load: number of bytes that a worker has read, kept in a file beside the weights.

A server replies only when a load is finished. So each worker writes its progress to a file, which the adapter reads. If
the worker cannot write to the folder (on another machine, say), no progress is visible.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: Folder of the modules that a worker imports, for the server's PYTHONPATH.
FOLDER = str(Path(__file__).parent)
_SUFFIX = ".advance"


class Advance:
    """Counter of the bytes that this worker process has read from `folder`, earlier loads included; kept in a file
    there."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, f"{os.getpid()}{_SUFFIX}")
        self._read = _number(self._file)

    def add(self, size: int) -> None:
        """Add `size` bytes and write the sum to the file; a file that cannot be written stays as it is."""
        self._read += size
        with suppress(OSError):
            self._file.write_text(str(self._read), encoding="utf-8")


def read_of(folder: Path) -> int:
    """Number of bytes that all workers of a server have read: the sum of the counter files in `folder`. Called by the
    adapter."""
    return sum(_number(file) for file in folder.glob(f"*{_SUFFIX}"))


def remove_counters(folder: Path) -> None:
    """Remove the counter files from `folder` once a load is over; those that cannot be removed stay. Called by the
    adapter for a folder that is not its own."""
    for file in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            file.unlink()


def _number(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_bytes())
    return 0
