"""Choice of the tile size of decode attention on a GPU: the fastest of a small table.

The tile determines the order of sums and so their rounding; all engines of a run must use the same tile. The first
engine measures while it holds the lock of a file of the run, and the others read its choice from the file. Without a
file the first tile of the table is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.errors import UNREADABLE
from stretto.core.records import Record
from stretto.model.kernels.choice import locked

log = logging.getLogger(__name__)

FILE = "tiles.json"
_GAIN = 1.03  # least speedup over the first tile for another tile to be chosen


class Tile(Record, frozen=True):
    """Tile of a GPU program. `size`: bytes of keys, and of values, that the program processes at a time. `warps`: of
    the program; twice as many for float32, whose products do not use tensor cores. `stages`: tiles that are loaded
    ahead."""

    size: int = 16 * 1024
    warps: int = 4
    stages: int = 2


TABLE = (Tile(), Tile(32 * 1024), Tile(16 * 1024, 8), Tile(8 * 1024, 4, 3), Tile(16 * 1024, 4, 3))


def chosen(name: str, seconds: Callable[[Tile], float], record: Path | None) -> Tile:
    """The tile for the case `name` (device, dtype, shape). It comes from the file `record`, or is the fastest by
    `seconds`, which measures a tile, and is then written to the file. Tiles that the device cannot run are skipped."""
    if record is None:
        return TABLE[0]
    with locked(record) as written:
        known = _read(record)
        if name in known:
            return known[name]
        if not written:  # another engine may measure otherwise
            return TABLE[0]
        found = _fastest(seconds)
        part = record.with_name(f".{record.name}.{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode({**known, name: found})) + b"\n")
        part.replace(record)
    return found


def _fastest(seconds: Callable[[Tile], float]) -> Tile:
    times = {TABLE[0]: seconds(TABLE[0])}
    for tile in TABLE[1:]:
        try:
            times[tile] = seconds(tile)
        except Exception as error:  # triton raises its own kinds where registers or shared memory do not suffice
            log.info("%s cannot be run: %s", tile, error)
    best = min(times, key=times.__getitem__)
    return best if times[best] * _GAIN < times[TABLE[0]] else TABLE[0]


def _read(record: Path) -> dict[str, Tile]:
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, Tile])
    except (OSError, *UNREADABLE):
        return {}
