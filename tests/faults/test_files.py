"""Files that are killed, cut and bent: what is read is what was written, or nothing.

- A kill at every file-system call of a checkpoint, and of a ledger's commit, leaves the old state or the new one. A new
  ledger is absent, or has all its tables.
- A checkpoint or a ledger that was cut, or has a flipped bit, at every 128th byte is refused, or read as it was; of a
  ledger's log the end may be missing, never the middle.
- So does a kill where nothing can be renamed or forced to disk, as in a bucket of objects.
- A disk that refuses to force or to take any more ends the commit with the path; what was there stays.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.core.records import Segment
from stretto.store.checkpoints import Checkpoints, verify
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto_report.audit.check import check_run
from stretto_report.audit.history import read_history
from tests.faults.one_step import RECIPE, one_step
from tests.store.make import Make

ROOT = Path(__file__).parents[2]
CALLS: tuple[str, ...] = ("write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "ftruncate")
CALLS += ("unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "sendfile")
MOST_CALLS = 100

#: Copies of a process that has imported what they need: each does its work on a folder once strace watches it.
COPIES = """
import os, sys
from contextlib import suppress
from pathlib import Path
from stretto.store.checkpoints import Checkpoints
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.faults.one_step import one_step

def fill(folder):
    for name in "ab":
        (folder / name).write_bytes(b"new" * 1000)

def checkpoint(folder, keep):
    Checkpoints(folder, keep=keep).save(10, fill)

def commit(folder, step):
    ledger = Ledger(folder / "ledger.sqlite", StoreConfig())
    one_step(ledger, step)
    ledger.sync()

while line := sys.stdin.readline():
    work, folder, number = line.split()
    if not (pid := os.fork()):
        code = 1
        with suppress(Exception):
            os.read(0, 1)
            {"checkpoint": checkpoint, "commit": commit}[work](Path(folder), int(number))
            code = 0
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Traced:
    """Work on a folder under strace, which injects something into its file-system calls."""

    def __init__(self, copies: subprocess.Popen[str]) -> None:
        self._copies = copies

    def __call__(self, work: str, folder: Path, number: int, *injections: str) -> int:
        """The exit code of `work` on the folder."""
        self._tell(f"{work} {folder} {number}\n")
        pid = self._told()
        command = ["strace", "-f", "-o", os.devnull, "-e", f"trace={','.join(CALLS)}", "-p", str(pid)]
        command += [word for injection in injections for word in ("-e", f"inject={injection}")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            assert "attached" in (said := strace.stderr.readline()), said
            self._tell("\n")
            return self._told()

    def _tell(self, text: str) -> None:
        assert self._copies.stdin is not None
        self._copies.stdin.write(text)
        self._copies.stdin.flush()

    def _told(self) -> int:
        assert self._copies.stdout is not None
        return int(self._copies.stdout.readline())


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", "-c", COPIES]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as copies:
        yield Traced(copies)
        copies.kill()


def strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    with subprocess.Popen(["sleep", "0.1"]) as watched:  # beside it, as copies are
        probe = ["strace", "-o", os.devnull, "-e", "inject=fsync:error=EIO:when=1", "-p"]
        done = subprocess.run([*probe, str(watched.pid)], check=False, capture_output=True)
    return b"attached" in done.stderr


def old(folder: Path) -> None:
    (folder / "a").write_bytes(b"old" * 1000)


STRACE = pytest.mark.skipif(not strace_works(), reason="strace cannot trace here: not tested")


def killed_at_every_call(work: Callable[[str], int], prepare: Callable[[], None], judge: Callable[[], object]) -> int:
    """Kill the work at its first call of each kind, at its second one, ... until it comes through; how many kills."""
    kills = 0
    for call in CALLS:
        for number in range(1, MOST_CALLS):
            prepare()
            code = work(f"{call}:signal=KILL:when={number}")
            judge()
            if code == 0:
                break
            kills += 1
    return kills


@STRACE
def test_a_kill_at_every_call_of_a_checkpoint_leaves_the_old_one_or_the_new_one(traced: Traced, memory: Path) -> None:
    checkpoints, seen = Checkpoints(memory, keep=1), set()

    def prepare() -> None:
        shutil.rmtree(memory)
        checkpoints.save(5, old)

    def judge() -> None:
        newest = checkpoints.latest()
        assert newest is not None
        assert newest.broken == ()
        seen.add(newest.step)

    calls = killed_at_every_call(partial(traced, "checkpoint", memory, 1), prepare, judge)
    assert calls >= 12
    assert seen == {5, 10}


@STRACE
def test_without_renames_and_fsync_a_checkpoint_is_whole_or_known_as_broken_wherever_it_is_killed(
    traced: Traced, memory: Path
) -> None:
    checkpoints, seen = Checkpoints(memory, keep=2), set()
    bucket = "rename,renameat,renameat2,fsync,fdatasync:error=ENOSYS"
    for call in ("mkdir", "sendfile"):
        for number in range(1, MOST_CALLS):
            shutil.rmtree(memory)
            checkpoints.save(5, old)
            code = traced("checkpoint", memory, 2, bucket, f"{call}:signal=KILL:when={number}")
            newest = checkpoints.latest()
            assert newest is not None
            seen.add((newest.step, len(newest.broken)))
            if code == 0:
                assert newest.step == 10
                break
    assert seen == {(5, 0), (5, 1), (10, 0)}


@STRACE
def test_a_kill_at_every_call_of_a_commit_leaves_the_batch_whole_or_absent(traced: Traced, memory: Path) -> None:
    folder, seen = memory / "run", set()

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

    calls = killed_at_every_call(partial(traced, "commit", folder, 2), prepare, judge)
    assert calls >= 12
    assert seen == {1, 2}


@STRACE
def test_a_kill_at_every_call_of_a_ledgers_beginning_leaves_none_or_one_that_can_be_read(
    traced: Traced, memory: Path
) -> None:
    folder, seen = memory / "run", set()

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)

    def judge() -> None:
        begun = (folder / "ledger.sqlite").exists()
        seen.add((begun, len(read_history(folder).steps) if begun else 0))
        with closing(Ledger(folder / "ledger.sqlite", StoreConfig())) as ledger:
            ledger.sync()

    calls = killed_at_every_call(partial(traced, "commit", folder, 1), prepare, judge)
    assert calls >= 12
    assert seen == {(False, 0), (True, 0), (True, 1)}


@STRACE
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EROFS"])
def test_a_disk_that_refuses_leaves_the_old_checkpoint(traced: Traced, memory: Path, error: str) -> None:
    checkpoints = Checkpoints(memory, keep=1)
    checkpoints.save(5, old)
    for call in ("write", "fsync", "rename"):
        assert traced(
            "checkpoint", memory, 1, f"{call}:error={error}:when=2" if call != "rename" else f"{call}:error={error}"
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


def test_a_damaged_ledger_is_never_read_as_something_else(memory: Path) -> None:
    path = memory / "ledger.sqlite"
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


def test_a_damaged_log_of_a_ledger_loses_its_end_at_most(memory: Path) -> None:
    path, states = memory / "ledger.sqlite", []
    log = path.with_name("ledger.sqlite-wal")
    Ledger(path, StoreConfig()).close()
    with closing(sqlite3.connect(path)) as connection:  # small pages: a log of many frames
        connection.executescript("PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM;")
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.flush()
        connection = ledger._connection
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        base = path.read_bytes()
        for step in (1, 2, 3):
            ledger.put("standing", {"position": {"epoch": 0, "index": step}})
            one_step(ledger, step)
            ledger.flush()
            states.append((log.read_bytes(), read_copy(memory, base, log.read_bytes())))
    whole, expected = states[-1]
    prefixes = [read_copy(memory, base, b"")] + [state for _, state in states]
    assert len({repr(state) for state in prefixes}) == 4
    frame, refused = 24 + 512, 0
    for data in damaged(whole):
        try:
            found = read_copy(memory, base, data)
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
