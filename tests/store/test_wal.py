"""What a kill can leave of a ledger's log is accepted, also in front of what an earlier log has left; damage is refused
with its place and what can be done.
"""

import os
import re
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.store.ledger.schema import check_log

FRAME = 24 + 4096


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A log that was begun anew: two frames of it, then frames of the one before."""
    connection = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript("CREATE TABLE many (x BLOB)")
    connection.execute("INSERT INTO many VALUES (zeroblob(40000))")
    assert connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[0] == 0
    for _ in range(2):
        connection.execute("INSERT INTO many VALUES (1)")
    yield tmp_path / "ledger.sqlite-wal"
    connection.close()


def flip(log: Path, at: int) -> None:
    data = bytearray(log.read_bytes())
    data[at] ^= 4
    log.write_bytes(data)


def check(log: Path) -> None:
    check_log(log.with_name("ledger.sqlite"))


def test_a_whole_log_with_the_rest_of_another_behind_it_is_accepted(log: Path) -> None:
    data = log.read_bytes()
    assert len(data) > 32 + 8 * FRAME
    assert [data[at + 8 : at + 16] == data[16:24] for at in range(32, len(data), FRAME)][:4] == [
        True,
        True,
        False,
        False,
    ]
    check(log)


def test_a_last_frame_that_was_half_written_is_accepted(log: Path) -> None:
    flip(log, 32 + FRAME + 2000)
    check(log)


@pytest.mark.parametrize("at", [32 + 3, 32 + 9, 32 + 20, 32 + 24, 32 + 4000])
def test_a_frame_that_is_damaged_in_front_of_another_is_refused(log: Path, at: int) -> None:
    flip(log, at)
    for size in (log.stat().st_size, 32 + 2 * FRAME):  # the other frame may be the file's last
        os.truncate(log, size)
        with pytest.raises(StoreError, match=re.escape(f"{log}: damaged at byte 32 of {size:,}")) as refused:
            check(log)
        assert f"truncate -s 32 {log}" in str(refused.value)


@pytest.mark.parametrize("at", [0, 9, 17, 30])
def test_a_damaged_header_is_refused(log: Path, at: int) -> None:
    flip(log, at)
    with pytest.raises(StoreError, match="damaged at byte 0 of "):
        check(log)


def test_no_log_and_the_beginning_of_one_are_accepted(log: Path, tmp_path: Path) -> None:
    check_log(tmp_path / "other.sqlite")
    data = log.read_bytes()
    for size in (0, 7, 31, 32, 32 + FRAME - 1, 32 + 2 * FRAME):
        log.write_bytes(data[:size])
        check(log)


def test_a_log_that_stays_as_it_is_is_read_once(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(log, (1.0, 1.0))
    check(log)
    with monkeypatch.context() as patched:
        patched.delattr(Path, "read_bytes")
        check(log)
    flip(log, 32 + 2000)
    os.utime(log, (2.0, 2.0))
    with pytest.raises(StoreError, match="damaged at byte 32"):
        check(log)


def test_a_log_that_is_too_large_is_not_read(log: Path) -> None:
    os.truncate(log, 100 << 30)
    with pytest.raises(StoreError, match="has 107,374,182,400 bytes"):
        check(log)


def test_a_page_size_that_sqlite_never_wrote_is_damage(tmp_path: Path) -> None:
    words = (0x377F0683, 3_007_000, 5, 0, 0, 0)
    s0 = s1 = 0
    for x0, x1 in zip(words[::2], words[1::2], strict=True):
        s0 = (s0 + x0 + s1) & 0xFFFFFFFF
        s1 = (s1 + x1 + s0) & 0xFFFFFFFF
    (tmp_path / "ledger.sqlite-wal").write_bytes(struct.pack(">8I", *words, s0, s1) + bytes(100))
    with pytest.raises(StoreError, match="damaged at byte 0"):
        check_log(tmp_path / "ledger.sqlite")
