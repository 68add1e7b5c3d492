"""How far a load is: the bytes that a worker has read of versions, in a file beside the weights.

A server replies to an order when it has carried it out, so the order itself does not say whether it goes on. The worker
counts, the adapter looks. Where the worker cannot write, on another machine say, nothing shows.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: Of what a worker imports, for the server's PYTHONPATH.
FOLDER = str(Path(__file__).parent)
_SUFFIX = ".advance"


class Advance:
    """The worker's end. It goes on counting where an earlier load of this process has ended."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, f"{os.getpid()}{_SUFFIX}")
        self._read = _number(self._file)

    def add(self, size: int) -> None:
        """So many bytes more."""
        self._read += size
        with suppress(OSError):
            self._file.write_text(str(self._read))


def read_of(folder: Path) -> int:
    """The adapter's end: bytes that all workers have read."""
    return sum(_number(file) for file in folder.glob(f"*{_SUFFIX}"))


def _number(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
