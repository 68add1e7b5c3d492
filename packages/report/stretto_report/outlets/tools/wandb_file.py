"""Read W&B's own log file of a run (LevelDB's log format; each record is a W&B message).

A point is safe once it is in the file; points still in W&B's process are lost with it.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32_768  # bytes
_PART = struct.Struct("<IHB")  # checksum, size, kind
_WHOLE, _LAST = 1, 4  # kinds of parts that end a record


class WrittenPoints:
    """Reads one W&B log file as it grows. `newest`: W&B's own step of the newest history record so far; 0: none."""

    def __init__(self, wandb: Any, path: Path) -> None:
        self._message = importlib.import_module(f"{wandb.__name__}.proto.wandb_internal_pb2").Record
        self._path, self._at, self._partial = path, _HEADER, b""
        self.newest = 0

    def read_on(self) -> int:
        """Read newly written records; returns `newest`."""
        for record in self._records():
            found = self._message.FromString(record)
            if found.HasField("history"):
                self.newest = max(self.newest, found.history.step.num)
        return self.newest

    def _records(self) -> Iterator[bytes]:
        """Complete records after the last one read; an incomplete one is left for later."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while True:
                if (room := _BLOCK - self._at % _BLOCK) < _PART.size:  # too little for a part
                    self._at += room
                file.seek(self._at)
                head = file.read(_PART.size)
                if len(head) < _PART.size:
                    return
                _, size, kind = _PART.unpack(head)
                body = file.read(size)
                if kind == 0 or len(body) < size:
                    return
                self._at += _PART.size + size
                self._partial += body
                if kind in (_WHOLE, _LAST):
                    yield self._partial
                    self._partial = b""


def written(wandb: Any, folder: Path, run: str) -> int:
    """W&B's own step of the newest history record of a run, in any log file below `folder`; 0: none."""
    files = folder.glob(f"*run-*/run-{run}.wandb")
    return max((WrittenPoints(wandb, path).read_on() for path in files), default=0)
