"""The run folder.

Promises: one writer at a time, named when it is in the way; the lock of a killed writer holds nobody up; a folder with
something else in it is never written to; what a kill left half-written holds nobody up and does not stay; the message
gives the way out. A run says what its libraries and its machine are.
"""

import contextlib
import errno
import fcntl
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.core.errors import RunFolderError
from stretto.store import lock
from stretto.store.checkpoints import Checkpoints
from stretto.store.run_folder import RunFolder, library_versions, machine
from tests.store.make import run_at

_HOLDER = """
import sys
from stretto.store.run_folder import RunFolder
folder = RunFolder.create(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def make_run(path: Path) -> None:
    with run_at(path):
        pass


@pytest.mark.parametrize("begin", [RunFolder.create, RunFolder.resume])
def test_too_few_descriptors_are_named_and_none_is_kept(tmp_path: Path, begin: Callable[[Path], RunFolder]) -> None:
    make_run(old := tmp_path / "old")
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd")
    for free in range(8):
        path = old if begin == RunFolder.resume else tmp_path / f"new-{free}"
        with contextlib.ExitStack() as taken:
            taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 32, limits[1]))
            spare = [taken.enter_context(open(os.devnull)) for _ in range(free)]
            with contextlib.suppress(OSError):
                while True:
                    taken.enter_context(open(os.devnull))
            for file in spare:
                file.close()
            told = ""
            try:
                begin(path).release()
            except RunFolderError as error:
                told = str(error)
            refused = f"{path}: cannot be written: Too many open files; start with a higher ulimit -n"
            assert told == refused or (told == "" and free > 2)
        assert os.listdir("/proc/self/fd") == before


def test_a_new_folder_has_a_place_for_everything(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs" / "first") as folder:
        assert folder.policy(12) == folder.path / "policy" / "v000012"
        assert folder.role_log("engine-0") == folder.path / "logs" / "engine-0.txt"
        assert all(place.is_dir() for place in (folder.logs, folder.policies, folder.checkpoints, folder.plots))
        folder.write("recipe.toml", "seed = 1\n")
        assert folder.recipe.read_text() == "seed = 1\n"
        found = sorted(path.name for path in folder.path.iterdir())
        assert found == ["checkpoints", "lock", "logs", "plots", "policy", "recipe.toml"]


def test_its_checkpoints_may_be_in_another_place_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "bucket")
    with RunFolder.create(tmp_path / "run") as folder:
        Checkpoints(folder.checkpoints).save(5, lambda part: (part / "trainer.json").touch())
        folder.ledger.touch()
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == ["step-000005"]
    (tmp_path / "bucket" / ".step-000010.part").mkdir()
    with RunFolder.resume(tmp_path / "run") as folder:
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000005"]


WHAT = ["new", "empty", "file", "below a file", "a run", "another's", "in use", "too long"]
WHAT += ["link to nothing", "below a link to nothing", "where the kernel makes all"]


@pytest.mark.parametrize("what", WHAT)
def test_what_is_checked_before_a_run_is_what_its_start_refuses_and_nothing_is_made(tmp_path: Path, what: str) -> None:
    place = tmp_path / {"too long": "a" * 300}.get(what, "run/below" if what.startswith("below") else "run")
    place, begun = Path("/proc/run/below") if "kernel" in what else place, None
    if "link" in what:
        (tmp_path / "run").symlink_to(tmp_path / "gone")
    elif what in ("file", "below a file"):
        (tmp_path / "run").touch()
    elif what in ("empty", "another's"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").touch() if what == "another's" else None
    elif what in ("a run", "in use"):
        begun = RunFolder.create(place)
        begun.ledger.touch() if what == "a run" else None
        begun.release() if what == "a run" else None
    before = sorted(tmp_path.rglob("*"))
    told = [refused_by(check, place) for check in (RunFolder.check_new, RunFolder.check_new)]
    assert sorted(tmp_path.rglob("*")) == before
    assert told == [refused_by(RunFolder.create, place)] * 2
    assert (told[0] == "") == (what in ("new", "empty"))


def refused_by(act: Callable[[Path], object], place: Path) -> str:
    try:
        act(place)
    except RunFolderError as error:
        return str(error)
    return ""


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_text("process 1 on a machine with a longer name\n" * 3)
    with RunFolder.create(tmp_path), pytest.raises(RunFolderError) as refused:
        RunFolder.create(tmp_path)
    assert f"is in use by process {os.getpid()} on {platform.node()}; wait" in str(refused.value)


def test_the_lock_of_a_killed_writer_is_taken_over(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RunFolderError, match=f"process {holder.pid} on"):
            RunFolder.create(tmp_path)
        holder.kill()
    RunFolder.create(tmp_path).release()


def test_another_run_is_never_written_over(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(RunFolderError, match="holds another run; resume it with --resume"):
        RunFolder.create(tmp_path / "run")
    with RunFolder.resume(tmp_path / "run"), pytest.raises(RunFolderError, match="in use"):
        RunFolder.resume(tmp_path / "run")
    RunFolder.open(tmp_path / "run")


def test_a_resumed_run_has_its_mark_again_and_no_other_run_has_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with RunFolder.resume(tmp_path / "run") as folder, RunFolder.create(tmp_path / "other") as other:
        mark = folder.mark
        assert mark not in ("", other.mark)
    with RunFolder.resume(tmp_path / "run") as folder:
        assert folder.mark == mark
    assert folder.mark == ""


def test_what_a_kill_left_half_written_is_gone_when_the_run_goes_on(tmp_path: Path) -> None:
    make_run(tmp_path)
    for name in (".step-000040.part", ".step-000020.old", "step-000020", "broken-step-000030"):
        (tmp_path / "checkpoints" / name / "shard").mkdir(parents=True)
    for name in (".v000012.4711.partial", ".v000000.part", ".v000010.4711.replaced", "v000010", "v000011"):
        (tmp_path / "policy" / name / "model").mkdir(parents=True)
    for name in (".recipe.toml.4711.part", ".metrics.jsonl.4711.part", "metrics.jsonl", "plots/.reward.png.part"):
        (tmp_path / name).touch()
    RunFolder.open(tmp_path)
    assert (tmp_path / "checkpoints" / ".step-000040.part").exists(), "a reader removes nothing"
    with RunFolder.resume(tmp_path):
        found = sorted(path.name for path in tmp_path.glob("*/*"))
        assert found == ["broken-step-000030", "step-000020", "v000010", "v000011"]
        assert list(tmp_path.glob(".*")) == []
        assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("aside", ["checkpoints/.step-000020.old", "policy/.v000010.4711.replaced"])
def test_what_had_stepped_aside_for_what_never_came_is_there_again(tmp_path: Path, aside: str) -> None:
    make_run(tmp_path)
    (tmp_path / aside).mkdir()
    (tmp_path / aside / "whole").touch()
    with RunFolder.resume(tmp_path):
        (kept,) = tmp_path.glob("*/*/whole")
    assert kept.parent.name in ("step-000020", "v000010")


@pytest.mark.parametrize("left", ["recipe.toml", ".recipe.toml.4711.part"])
def test_a_run_that_was_killed_before_it_had_a_ledger_leaves_the_folder_free(tmp_path: Path, left: str) -> None:
    RunFolder.create(tmp_path).release()
    (tmp_path / left).write_text("seed = 1\n")
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder.resume(tmp_path)
    with RunFolder.create(tmp_path) as folder:
        assert list(tmp_path.glob(".*")) == []
        folder.write("recipe.toml", "seed = 2\n")
    assert (tmp_path / "recipe.toml").read_text() == "seed = 2\n"


@pytest.mark.parametrize("name", ["recipe.toml", "thesis.tex"])
def test_a_folder_with_files_of_somebody_elses_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# mine")
    for _ in range(2):
        with pytest.raises(RunFolderError, match=rf"not empty and holds no run \({name}"):
            RunFolder.create(tmp_path)


@pytest.mark.parametrize(
    ("place", "words"), [("nowhere", "does not exist"), ("file", "is no folder"), ("empty", "holds no run")]
)
def test_a_folder_without_a_run_cannot_be_opened(tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for way in (RunFolder.open, RunFolder.resume):
        with pytest.raises(RunFolderError, match=words):
            way(tmp_path / place)


def test_a_folder_of_runs_names_the_newest_of_them(tmp_path: Path) -> None:
    for second, name in enumerate("abcdefghi"):
        RunFolder.create(tmp_path / "runs" / name).release()
        (tmp_path / "runs" / name / "ledger.sqlite").touch()
        os.utime(tmp_path / "runs" / name / "ledger.sqlite", (second, second))
    named = ", ".join(str(tmp_path / "runs" / name) for name in "ihgfedcb")
    for folder in (tmp_path / "runs", tmp_path):
        with pytest.raises(RunFolderError, match=f"holds no run .*; give one of those in it: {named} and 1 more$"):
            RunFolder.open(folder)


def test_a_folder_that_cannot_be_filled_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(RunFolderError, match="cannot be written: File exists"):
        RunFolder.create(tmp_path)
    assert not lock.is_held(tmp_path)
    os.close(lock.acquire(tmp_path))  # the question holds nothing


def test_a_file_system_without_locks_is_named_and_nobody_holds_a_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)

    def refuse(*words: object) -> None:  # as Lustre without its option
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunFolderError, match="cannot be locked: Function not implemented; give a folder on"):
        RunFolder.resume(tmp_path)
    assert not lock.is_held(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="file/run: cannot be created: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run")


def test_a_run_says_what_its_libraries_and_its_machine_are() -> None:
    versions, found = library_versions(), machine()
    assert versions["python"] == platform.python_version()
    assert {"torch", "transformers", "msgspec"} <= versions.keys()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_gib > 0
    assert found.processor
