"""Files that are killed, cut and bent: what is read is what was written, or nothing.

- A kill at every file-system call of a checkpoint, and of a ledger's commit, leaves the old state or the new one.
- A checkpoint or a ledger that was cut, or has a flipped bit, at every 128th byte is refused, or read as it was; of a
  ledger's log the end may be missing, never the middle.
- So does a kill where nothing can be renamed or forced to disk, as in a bucket of objects.
- A disk that refuses to force or to take any more ends the commit with the path; what was there stays.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.core.records import Segment
from stretto.store.folder.checkpoints import Checkpoints, verify
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto_report.audit.check import check_run
from tests.faults.one_step import RECIPE, one_step
from tests.store.make import Make

ROOT = Path(__file__).parents[2]
CALLS: tuple[str, ...] = ("write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "ftruncate")
CALLS += ("unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "sendfile")
MOST_CALLS = 100
#: One in this number of calls of a commit is a kill; each of them in the long campaign.
STRIDE = int(os.environ.get("STRETTO_FAULT_STRIDE", "5"))

CHECKPOINT = """
import sys
from pathlib import Path
from stretto.store.folder.checkpoints import Checkpoints
def fill(folder):
    for name in "ab":
        (folder / name).write_bytes(b"new" * 1000)
Checkpoints(Path(sys.argv[1]), keep=1).save(10, fill)
"""
COMMIT = """
import sys
from pathlib import Path
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.faults.one_step import one_step
ledger = Ledger(Path(sys.argv[1]) / "ledger.sqlite", StoreConfig())
one_step(ledger, 2)
ledger.sync()
"""


def traced(script: str, folder: Path, *injections: str) -> int:
    """The exit code of a script under strace, which injects something into its file-system calls."""
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={','.join(CALLS)}"]
    command += [word for injection in injections for word in ("-e", f"inject={injection}")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command += [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


def strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    probe = ["strace", "-qq", "-o", os.devnull, "-e", "inject=fsync:error=EIO:when=1", "true"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


def old(folder: Path) -> None:
    (folder / "a").write_bytes(b"old" * 1000)


STRACE = pytest.mark.skipif(not strace_works(), reason="strace cannot trace here: not tested")


def killed_at_every_call(
    script: str, folder: Path, prepare: Callable[[], None], judge: Callable[[], object], stride: int = 1
) -> int:
    """Kill the script at its first call of each kind, at its second one, ... until it comes through; how many kills."""
    kills = 0
    for call in CALLS:
        for number in range(1, MOST_CALLS, stride):
            prepare()
            code = traced(script, folder, f"{call}:signal=KILL:when={number}")
            judge()
            if code == 0:
                break
            kills += 1
    return kills


@STRACE
def test_a_kill_at_every_call_of_a_checkpoint_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    checkpoints, seen = Checkpoints(tmp_path, keep=1), set()

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        checkpoints.save(5, old)

    def judge() -> None:
        newest = checkpoints.latest()
        assert newest is not None
        assert newest.broken == ()
        seen.add(newest.step)

    calls = killed_at_every_call(CHECKPOINT, tmp_path, prepare, judge)
    assert calls >= 12
    assert seen == {5, 10}


@STRACE
def test_without_renames_and_fsync_a_checkpoint_is_whole_or_known_as_broken_wherever_it_is_killed(
    tmp_path: Path,
) -> None:
    checkpoints, seen = Checkpoints(tmp_path, keep=2), set()
    bucket = "rename,renameat,renameat2,fsync,fdatasync:error=ENOSYS"
    for call in ("mkdir", "sendfile"):
        for number in range(1, MOST_CALLS):
            shutil.rmtree(tmp_path)
            checkpoints.save(5, old)
            code = traced(CHECKPOINT.replace("keep=1", "keep=2"), tmp_path, bucket, f"{call}:signal=KILL:when={number}")
            newest = checkpoints.latest()
            assert newest is not None
            seen.add((newest.step, len(newest.broken)))
            if code == 0:
                assert newest.step == 10
                break
    assert seen == {(5, 0), (5, 1), (10, 0)}


@STRACE
def test_a_kill_at_every_call_of_a_commit_leaves_the_batch_whole_or_absent(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", set()

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)
        with closing(Ledger(folder / "ledger.sqlite", StoreConfig())) as ledger:
            one_step(ledger, 1)

    def judge() -> None:
        with closing(Ledger(folder / "ledger.sqlite", StoreConfig())) as ledger:
            last = ledger.last_step() or 0
        assert len(list(read_batches(folder / "ledger.sqlite", 0, last))) == last
        breaches = check_run(folder).breaches
        assert not breaches["nothing is trained twice"] + breaches["everything issued has one state"]
        seen.add(last)

    calls = killed_at_every_call(COMMIT, folder, prepare, judge, STRIDE)
    assert calls >= 5
    assert seen == {1, 2}


@STRACE
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EROFS"])
def test_a_disk_that_refuses_leaves_the_old_checkpoint(tmp_path: Path, error: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(5, old)
    for call in ("write", "fsync", "rename"):
        assert traced(
            CHECKPOINT, tmp_path, f"{call}:error={error}:when=2" if call != "rename" else f"{call}:error={error}"
        )
        newest = checkpoints.latest()
        assert newest is not None
        assert (newest.step, newest.broken) == (5, ())


def damaged(data: bytes) -> list[bytes]:
    """Cut at every 128th byte, and one bit flipped in every 128th byte."""
    cuts = [data[:size] for size in range(0, len(data), 128)]
    return cuts + [
        data[:at] + bytes([data[at] ^ 1 << at // 128 % 8]) + data[at + 1 :] for at in range(0, len(data), 128)
    ]


def test_a_damaged_checkpoint_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_bytes(os.urandom(4_000))

    path = Checkpoints(tmp_path).save(5, fill)
    manifest = verify(path)
    for file in (path / "a", path / "manifest.json"):
        whole = file.read_bytes()
        for data in damaged(whole):
            file.write_bytes(data)
            try:
                assert verify(path) == manifest
            except StoreError:
                continue
        file.write_bytes(whole)


def test_a_damaged_ledger_is_never_read_as_something_else(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.put("standing", {"position": {"epoch": 0, "index": 5}})
        for step in (1, 2):
            one_step(ledger, step)
        ledger.issue("0.8.0", Make.prompt, 2, 1)
        ledger.journal("0.8.0/1", Segment.of(token_ids=(4, 5), behavior_logprobs=(-0.5, -0.25), versions=(1, 1)))
        ledger.journal("0.8.0/1", Segment.of(token_ids=(9, 9), parent=0, cause="history_rewritten"), node=1)
        ledger.begin_call("0.8.0/1", 0, b"2 + 2", durable=True)
        ledger.end_call("0.8.0/1", 0, b"4")
        ledger.issue("0.9.0", Make.prompt, 1, 1)
        ledger.buffer(Make.group("0.9.0", Make.trajectory("0.9.0")))
    whole, expected = path.read_bytes(), read(path)
    refused = 0
    for data in damaged(whole):
        path.write_bytes(data)
        for leftover in ("-wal", "-shm"):
            path.with_name(path.name + leftover).unlink(missing_ok=True)
        try:
            assert read(path) in (expected, None)
        except StoreError:
            refused += 1
    assert refused > len(whole) // 256


def test_a_damaged_log_of_a_ledger_loses_its_end_at_most(tmp_path: Path) -> None:
    path, states = tmp_path / "ledger.sqlite", []
    log = path.with_name("ledger.sqlite-wal")
    with closing(sqlite3.connect(path)) as connection:  # small pages: a log of many frames
        connection.executescript("PRAGMA page_size = 512; PRAGMA user_version = 1; PRAGMA user_version = 0;")
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.flush()
        connection = ledger._connection
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        base = path.read_bytes()
        for step in (1, 2, 3):
            ledger.put("standing", {"position": {"epoch": 0, "index": step}})
            one_step(ledger, step)
            ledger.flush()
            states.append((log.read_bytes(), read_copy(tmp_path, base, log.read_bytes())))
    whole, expected = states[-1]
    prefixes = [read_copy(tmp_path, base, b"")] + [state for _, state in states]
    assert len({repr(state) for state in prefixes}) == 4
    frame, refused = 24 + 512, 0
    for data in damaged(whole):
        try:
            found = read_copy(tmp_path, base, data)
        except StoreError:
            refused += 1
        else:
            cut = len(data) < len(whole)
            assert found in prefixes if cut else found == expected or data[:-frame] == whole[:-frame]
    assert refused >= (len(whole) - 2 * frame) // 128


def read_copy(folder: Path, ledger: bytes, log: bytes) -> object:
    """What a ledger and its log are read as."""
    copy = folder / "copy.sqlite"
    for leftover in ("-wal", "-shm"):
        copy.with_name(copy.name + leftover).unlink(missing_ok=True)
    copy.write_bytes(ledger)
    copy.with_name("copy.sqlite-wal").write_bytes(log)
    return read(copy)


def read(path: Path) -> object:
    """Everything that a run goes on from; None for a file so short that SQLite takes it for a new one."""
    with closing(Ledger(path, StoreConfig())) as ledger:
        state, last = ledger.get("standing", dict), ledger.last_step()
    if state is None:
        return None
    return state, last, list(read_batches(path, 0, last or 0)), read_unfinished(path)
