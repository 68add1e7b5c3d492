"""Promises: a file that a user names never replaces a run's record; a file that was rewritten is told from the one that
was read, on any file system; a reader of a run that pauses does not let the run's log grow; a run is read where nothing
can be written, and where a file is none.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import RunFolderError, StoreError, UserError
from stretto.core.machine import cache_folder
from stretto.core.records import Group
from stretto.store import lock
from stretto.store.files import RECORDS, users_file
from stretto.store.ledger.reading import last_step
from stretto.store.ledger.schema import log_of, open_copy
from stretto.store.run_folder import ORIGIN, RunFolder
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import iterate_metrics
from stretto_report.reading.export import export_run, read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.store.make import buffered, judged, ledger_at, prompts


class Line(msgspec.Struct):
    step: int
    process: int


def run_at(folder: Path, groups: int = 3) -> Path:
    """A run with some buffered trajectories."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text("seed = 1\n")
    with ledger_at(folder / "ledger.sqlite") as ledger:
        for number, prompt in enumerate(prompts(groups)):
            id = f"0.{prompt.id}.0"
            buffered(ledger, Group(id, prompt, 0, (judged(f"{id}/0", versions=(0, 0)),)))
            ledger.put("number", number)
    return folder


def test_every_path_of_a_run_folder_is_a_record(tmp_path: Path) -> None:
    paths = [value for value in vars(RunFolder(tmp_path)).values() if isinstance(value, Path)]
    assert {path.name for path in paths if path != tmp_path} - {"plots"} <= RECORDS
    assert {ORIGIN, lock.NAME} <= RECORDS


@pytest.mark.parametrize("name", [*sorted(RECORDS), "policy/v000000/model.safetensors", "../run/recipe.toml", "link"])
def test_an_export_replaces_no_record_of_a_run(tmp_path: Path, name: str) -> None:
    run = run_at(tmp_path / "run")
    (run / "link").symlink_to(run / "recipe.toml")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(RunFolderError, match="is a record of the run"):
        export_run(run, run / name, "jsonl")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("name", ["rows.jsonl", "rows/metrics.jsonl", "../metrics.jsonl"])
def test_another_file_may_be_written_in_a_run_folder_and_beside_it(tmp_path: Path, name: str) -> None:
    run = run_at(tmp_path / "run")
    (run / "rows").mkdir()
    assert export_run(run, run / name) == 3
    with users_file(run / name) as file:  # and again
        file.write(b"1")


def written(path: Path, processes: list[int]) -> None:
    """Lines of the processes, in the same file: its inode stays, as that of a file whose successor was replaced may."""
    rows = [msgspec.json.encode(Line(step, process)) + b"\n" for step, process in enumerate(processes)]
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate()
        file.write(b"".join(rows))


@pytest.mark.parametrize("again", [[1, 1, 2, 2, 2, 2], [1, 1, 2, 2], [1, 2, 2, 2, 2, 2, 2, 2], [1, 2]])
def test_a_rewritten_file_is_told_from_the_one_that_was_read(tmp_path: Path, again: list[int]) -> None:
    path, decoder = tmp_path / "lines.jsonl", msgspec.json.Decoder(Line)
    written(path, [1, 1, 1, 1])
    follower = LineFollower(path, decoder)
    assert len(follower.read_on()[0]) == 4
    later = LineFollower(path, decoder)  # a cursor, or a cache, of an earlier process
    later.identity, later.offset, later.number = follower.identity, follower.offset, follower.number
    written(path, again)
    for one in (follower, later):
        lines, rewritten = one.read_on()
        assert (rewritten, [line.process for line in lines]) == (True, again)


def test_a_file_that_goes_on_is_read_on(tmp_path: Path) -> None:
    path, decoder = tmp_path / "lines.jsonl", msgspec.json.Decoder(Line)
    follower = LineFollower(path, decoder)
    for count in range(1, 400):
        written(path, [1] * count)
        if count % 3 == 0:  # another process, with what the earlier one has kept
            before, follower = follower, LineFollower(path, decoder)
            follower.identity, follower.offset, follower.number = before.identity, before.offset, before.number
        lines, rewritten = follower.read_on()
        assert (rewritten, [line.step for line in lines]) == (False, [count - 1])
    with path.open("ab") as file:
        file.write(b'{"step":')
    assert (follower.read_on(), follower.more) == (([], False), False)


def test_an_identity_that_an_earlier_version_kept_is_known(tmp_path: Path) -> None:
    path, decoder = tmp_path / "lines.jsonl", msgspec.json.Decoder(Line)
    written(path, [1, 1])
    follower = LineFollower(path, decoder)
    follower.read_on()
    device, inode, digests = follower.identity
    follower.identity = device, inode, digests.partition("+")[0]
    written(path, [1, 1, 1])
    assert [line.step for line in follower.read_on()[0]] == [2]


def test_a_reader_that_pauses_does_not_let_the_log_grow(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    with RunFolder.resume(run), ledger_at(run / "ledger.sqlite", flush_seconds=0) as ledger:
        rows = read_trajectories(run)
        next(rows)
        sizes = []
        for number in range(20):
            ledger.put("fact", f"{number % 10}" * 1_000_000)
            ledger.flush()
            sizes.append(log_of(run / "ledger.sqlite").stat().st_size)
        assert max(sizes) < 8 << 20  # of 20 MB that were written; SQLite folds a log in at 4 MiB
        assert len(list(rows)) == 2


def test_an_export_of_several_portions_has_each_row_once(tmp_path: Path) -> None:
    ids = [row.id for row in read_trajectories(run_at(tmp_path / "run", groups=600))]
    assert (len(ids), len(set(ids))) == (600, 600)


_KILLED = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("INSERT INTO events VALUES (1.0, 'x', 'y')")
os.kill(os.getpid(), 9)
"""
_READS = """
import os, sys
sys.path[:] = sys.argv[2].split(os.pathsep)
from stretto.store.ending import condition
from stretto_report.reading.export import read_trajectories
from stretto_report.reading.inspection import inspect_run
from stretto_report.audit.check import check_run
if os.getuid() == 0:
    os.setgid(12345)
    os.setuid(12345)
try:
    check_run(sys.argv[1])
except Exception as error:
    assert "recipe" in str(error), error  # it has none
run = sys.argv[1]
print(inspect_run(run).trajectories.issued, len(list(read_trajectories(run))), condition(run).state)
"""


def killed(run: Path) -> Path:
    subprocess.run([sys.executable, "-c", _KILLED, str(run / "ledger.sqlite")], check=False)
    run.joinpath("ledger.sqlite-shm").unlink()
    assert log_of(run / "ledger.sqlite").stat().st_size
    return run


def test_a_killed_run_is_read_where_nothing_can_be_written() -> None:
    with tempfile.TemporaryDirectory() as place:  # a folder of pytest is closed to other users
        os.chmod(place, 0o755)
        run = killed(run_at(Path(place) / "run"))
        for path in run.iterdir():
            path.chmod(0o444)
        run.chmod(0o555)
        names = sorted(path.name for path in run.iterdir())
        asked = [sys.executable, "-c", _READS, str(run), os.pathsep.join(sys.path)]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert found.stdout == "3 3 dead\n", found.stderr
        assert sorted(path.name for path in run.iterdir()) == names
        run.chmod(0o755)


def test_a_private_copy_has_what_a_log_has_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = killed(run_at(tmp_path / "run"))
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    before = (run / "ledger.sqlite").read_bytes()
    connection = open_copy(run / "ledger.sqlite")
    assert connection.execute("SELECT count(*) FROM events").fetchone() == (1,)
    assert connection.execute("SELECT count(*) FROM trajectories").fetchone() == (3,)
    connection.close()
    assert list(place.iterdir()) == []
    assert (run / "ledger.sqlite").read_bytes() == before


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(StoreError, match="it is no regular file"):
        list(iterate_metrics(run / "metrics.jsonl"))
    assert inspect_run(run).trajectories.issued == 3
    assert last_step(run / "ledger.sqlite") == 0


def test_an_address_that_is_no_text_is_none(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    (run / "gateway").write_bytes(b"\xff\xfe")
    held = lock.acquire(run)
    assert inspect_run(run).gateway is None
    (run / "gateway").write_text("http://127.0.0.1:1")
    assert inspect_run(run).gateway == "http://127.0.0.1:1"
    os.close(held)


def test_a_link_to_the_metrics_is_followed(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "lines")
    assert list(iterate_metrics(tmp_path / "metrics.jsonl")) == []


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("STRETTO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match=r"has no home folder.*set STRETTO_CACHE"):
        cache_folder()
    monkeypatch.setenv("STRETTO_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
