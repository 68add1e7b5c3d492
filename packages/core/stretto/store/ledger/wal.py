"""Check of the ledger's write-ahead log before SQLite reads it. A torn end is accepted; damage in the middle is
refused.

    header, 32 bytes     magic · format · page size · checkpoint · salt 1 · salt 2 · checksum
    frame, 24 + page     page number · pages after the commit, or 0 · salt 1 · salt 2 · checksum │ page

The checksum of a frame covers all frames before it. So SQLite reads a log up to the first broken frame and ignores the
rest. This is right if a kill has torn the end of the log. If a bit has flipped in the middle, it silently drops
transactions. The two cases can be told apart: a kill breaks at most the frame that was being written, and no frame with
the same salts follows it (section 4 of sqlite.org/fileformat2.html).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path

from stretto.core.errors import StoreError

LARGEST = 1 << 30  #: most bytes of a log that is checked; SQLite moves a log into its file at a few MiB
_HEADER, _FRAME = 32, 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # magic number: byte order in which checksums are computed

Sums = tuple[int, int]


def log_of(ledger: Path) -> Path:
    """Path of the write-ahead log of the ledger at this path."""
    return ledger.with_name(f"{ledger.name}-wal")


def check_log(ledger: Path, largest: int = LARGEST) -> None:
    """Check the write-ahead log of a ledger that no process has open; does nothing if there is no log. An unchanged log
    is read only once.

    Raises:
        StoreError: valid frames follow a broken one, so SQLite would drop them silently; or the log is larger than
            `largest` bytes.
    """
    log = log_of(ledger)
    try:
        found = log.stat()
        if found.st_size > largest:
            raise StoreError(
                f"{log}: is not checked: it has {found.st_size:,} bytes, more than {largest:,}; fold it into the "
                f"ledger: sqlite3 {ledger} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
        broken = _damage(log, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{log}: cannot be read: {error.strerror or error}") from error
    if broken is not None:
        raise StoreError(
            f"{log}: damaged at byte {broken:,} of {found.st_size:,}, before the end; restore the file, "
            f"or give up what follows the damage: truncate -s {broken} {log}"
        )


@lru_cache(maxsize=1_024)
def _damage(log: Path, stamp: tuple[int, ...]) -> int | None:
    """Byte offset of the first broken frame, if valid frames follow it, which would be lost; else None. `stamp`:
    identifies the file's contents, for the cache."""
    data = log.read_bytes()
    broken = _first_broken(data)
    return broken if broken is not None and _goes_on(data, broken) else None


def _first_broken(data: bytes) -> int | None:
    """Byte offset of the first broken header or frame, or of the first frame that an earlier log has left behind; None
    if there is none."""
    order = _MAGIC.get(int.from_bytes(data[:4], "big"))
    if order is None or len(data) < _HEADER:
        return 0
    sums = _checksum(data[:24], (0, 0), order)
    if sums != struct.unpack_from(">II", data, 24):
        return 0
    if _page_size(data) % 8:  # SQLite has written no such page
        return 0
    frame = _FRAME + _page_size(data)
    for at in range(_HEADER, len(data) - frame + 1, frame):
        sums = _checksum(data[at : at + 8] + data[at + _FRAME : at + frame], sums, order)
        if data[at + 8 : at + 16] != data[16:24] or sums != struct.unpack_from(">II", data, at + 16):
            return at
    return None


def _goes_on(data: bytes, broken: int) -> bool:
    """Whether frames of the same log follow the broken one at offset `broken`; after a broken header (0), whether there
    is room for any frame."""
    if broken == 0:
        return len(data) >= _HEADER + _FRAME
    frame = _FRAME + _page_size(data)
    return any(data[at + 8 : at + 16] == data[16:24] for at in range(broken + frame, len(data) - frame + 1, frame))


def _page_size(data: bytes) -> int:
    return int.from_bytes(data[8:12], "big")


def _checksum(data: bytes, sums: Sums, order: str) -> Sums:
    """Continue SQLite's checksum `sums` (s0, s1) over `data`: ``s0 += x0 + s1; s1 += x1 + s0`` for each pair (x0, x1)
    of 32-bit words. `order`: byte order, "<" or ">"."""
    s0, s1 = sums
    for x0, x1 in struct.iter_unpack(f"{order}II", data):
        s0 = (s0 + x0 + s1) & 0xFFFFFFFF
        s1 = (s1 + x1 + s0) & 0xFFFFFFFF
    return s0, s1
