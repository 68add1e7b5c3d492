"""Tiles of decode attention on a GPU: a small table, of which the fastest is taken.

A tile decides in which order sums are rounded, so all engines of a run take the same one: the first that comes measures
while it holds the lock of a file of the run, the others read it there. Without a file the first of the table is taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.records import Record
from stretto.model.kernels.choice import locked

log = logging.getLogger(__name__)

FILE = "tiles.json"
_GAIN = 1.03  # speedup below which the first of the table stays


class Tile(Record, frozen=True):
    """Bytes of keys, and as many of values, that a program processes while it loads the next; its warps, and the tiles
    in flight. float32 has twice as many warps: its products do not use tensor cores."""

    size: int = 16 * 1024
    warps: int = 4
    stages: int = 2


TABLE = (Tile(), Tile(32 * 1024), Tile(16 * 1024, 8), Tile(8 * 1024, 4, 3), Tile(16 * 1024, 4, 3))


def chosen(name: str, seconds: Callable[[Tile], float], record: Path | None) -> Tile:
    """The tile for `name` (device, dtype, shape): from the record, else the fastest by `seconds`, which is recorded. A
    tile that the device cannot run is passed over."""
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
    except (OSError, msgspec.MsgspecError):
        return {}
