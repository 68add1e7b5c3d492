"""Whoever looks at a run takes nothing from it.

- What a run commits after somebody has looked at it is there after a kill, however he looked.
- A look at a dead run leaves its log as the kill left it; a damaged log is refused by every reader, and left as it is.
- A folder that cannot be written can be read.
"""

import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step, read_batches
from stretto.store.ledger.schema import PAGE, check_log
from stretto.store.lock import is_held
from stretto.store.run_folder import RunFolder
from stretto_report.audit.check import check_run
from stretto_report.audit.diff import diff_runs
from stretto_report.reading.export import read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.faults.one_step import RECIPE, one_step
from tests.faults.test_files import ROOT
from tests.verify.sandbox.other_users import ORDINARY, as_user

WRITER = """
import sys
from pathlib import Path
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from tests.faults.one_step import one_step
with RunFolder.create(Path(sys.argv[1])) as folder:
    ledger = Ledger(folder.ledger, StoreConfig(flush_seconds=0))
    for step, line in enumerate(sys.stdin, start=1):
        one_step(ledger, step)
        ledger.flush()
        if line == "sync\\n":
            ledger.sync()
        print(step, flush=True)
"""

READERS: dict[str, Callable[[Path], object]] = {
    "last step": lambda folder: last_step(folder / "ledger.sqlite"),
    "batches": lambda folder: list(read_batches(folder / "ledger.sqlite", 0, 1)),
    "inspect": inspect_run,
    "export": lambda folder: list(read_trajectories(folder)),
    "check": check_run,
    "diff": lambda folder: diff_runs(folder, folder),
}


class Writer:
    """A run that does a step when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self, then: str = "") -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{then}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip().isdecimal()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    command, environment = [sys.executable, "-c", WRITER, str(folder)], os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Writer(process)
        process.kill()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that was killed: they are in the log of its ledger. Nobody opens it but as a copy."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    with writing(folder) as writer:
        for _ in range(3):
            writer.step()
        writer.kill()
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture
def dead(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def outsider(folder: Path) -> None:
    """Somebody with SQLite's own tools, who might write and does not."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM steps").fetchone() == (1,)


@pytest.mark.parametrize("look", [outsider, inspect_run], ids=["outsider", "inspect"])
def test_what_a_run_commits_after_a_look_at_it_outlives_a_kill(tmp_path: Path, look: Callable[[Path], object]) -> None:
    folder = tmp_path / "run"
    with writing(folder) as writer:
        writer.step(then="sync")
        look(folder)
        assert (folder / "ledger.sqlite-wal").stat().st_size, "the reader takes itself for the last one"
        for _ in range(3):
            writer.step()
        writer.kill()
    with closing(Ledger(folder / "ledger.sqlite", StoreConfig())) as ledger:
        assert ledger.last_step() == 4
        assert ledger.balance().trained == 8


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_look_at_a_dead_run_leaves_what_the_kill_left(dead: Path, reader: Callable[[Path], object]) -> None:
    names = ("ledger.sqlite", "ledger.sqlite-wal")
    before = [(dead / name).read_bytes() for name in names]
    assert reader(dead) == reader(dead)
    assert [(dead / name).read_bytes() for name in names] == before
    assert last_step(dead / "ledger.sqlite") == 3


def test_a_folder_of_any_name_can_be_looked_at(dead: Path) -> None:
    strange = dead.rename(dead.with_name("100%41 sure? #1"))
    for reader in READERS.values():
        reader(strange)
    assert last_step(strange / "ledger.sqlite") == 3


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_damaged_log_is_refused_by_every_reader_and_stays(dead: Path, reader: Callable[[Path], object]) -> None:
    log = dead / "ledger.sqlite-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 4
    log.write_bytes(data)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"ledger\.sqlite-wal: damaged at byte"):
            reader(dead)
    assert log.read_bytes() == data


def test_the_log_of_a_run_that_is_running_is_left_to_the_run(dead: Path) -> None:
    """Its end may be half-written just now."""
    log = dead / "ledger.sqlite-wal"
    with RunFolder.resume(dead) as folder, closing(Ledger(folder.ledger, StoreConfig())) as ledger:
        one_step(ledger, 4)
        ledger.flush()
        whole, frame = log.read_bytes(), 24 + PAGE
        log.write_bytes(whole + whole[-frame : 100 - frame] + bytes(frame - 100) + whole[-frame:])
        with pytest.raises(StoreError, match="damaged"):
            check_log(folder.ledger)
        assert last_step(folder.ledger) == 4  # SQLite goes by its index


ON_AND_ON = """
import itertools, sys
from pathlib import Path
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from tests.faults.one_step import RECIPE, one_step
with RunFolder.create(Path(sys.argv[1])) as folder:
    folder.write("recipe.toml", RECIPE)
    ledger = Ledger(folder.ledger, StoreConfig(flush_seconds=0))
    for step in itertools.count(1):
        one_step(ledger, step)
        folder.policy(step).mkdir()
        print(step, flush=True)
"""


def test_a_run_that_goes_on_while_it_is_checked_is_no_false_alarm(tmp_path: Path) -> None:
    """The batch of a version is on record before its policy is there."""
    command, environment = [sys.executable, "-c", ON_AND_ON, str(tmp_path)], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            found = [check_run(tmp_path) for _ in range(10)]
        finally:
            process.kill()
    assert [breach for findings in found for breach in findings.breaches["versions grow by one"]] == []
    assert found[0].balance["trained"] < found[-1].balance["trained"], "it has not gone on"


def test_a_writer_is_not_kept_out_by_those_who_look(dead: Path) -> None:
    look = os.open(dead / "lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    timer = threading.Timer(0.03, os.close, (look,))
    timer.start()
    RunFolder.resume(dead).release()
    timer.join()
    assert not is_held(dead)
    with RunFolder.resume(dead):
        assert is_held(dead)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A folder that others may read, and nobody but its owner may write."""
    folder = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    yield folder
    for path in (folder, folder / "run"):
        if path.exists():
            path.chmod(0o755)
    shutil.rmtree(folder)


def shut(folder: Path) -> None:
    for path in (*folder.iterdir(), folder, folder.parent):
        path.chmod(0o555)


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_folder_that_cannot_be_written_can_be_read(foreign: Path, killed: Path, how: str) -> None:
    folder = Path(shutil.copytree(killed, foreign / "run"))
    if how == "ended":
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
            connection.execute("SELECT count(*) FROM steps")
        assert not (folder / "ledger.sqlite-wal").exists()
    shut(folder)
    before = sorted(path.name for path in folder.iterdir())

    def look() -> str:
        return f"{last_step(folder / 'ledger.sqlite')} {check_run(folder).balance['trained']}"

    assert as_user(ORDINARY if os.geteuid() == 0 else None, look) == "3 6"
    assert sorted(path.name for path in folder.iterdir()) == before
