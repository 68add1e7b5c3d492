"""The end of all roles: each is waited for, and what goes wrong at it is said. What a killed run has left goes with the
next; what no role has made stays, whatever the run folder says of it, and so do the sockets of a living run. What a
reward says about itself is recorded with the run: the level of the sandbox it judges programs in.
"""

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from stretto.core.errors import DeadlineExceeded, RoleDied, RunFolderError
from stretto.core.events import Span
from stretto.launch.assemble.roles import _endpoints as endpoints
from stretto.launch.assemble.roles import _in_turn as in_turn
from stretto.launch.assemble.roles import _sweep as sweep
from stretto.launch.assemble.roles import _up as up
from stretto.launch.assemble.roles import end_all, mailbox_name, record_facts
from stretto.launch.preflight.plan import Plan
from stretto.loop.engines.pool import EnginePool
from stretto.loop.records.reporter import RunLog, SilentReporter
from stretto.store import lock
from stretto.store.lock import let_go, temporary_folder
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import SpanLog
from stretto_app.extensions.machines import Cluster


def test_who_does_not_end_is_told_and_the_others_end() -> None:
    said: list[str] = []
    ended: list[str] = []

    async def stuck() -> None:
        raise DeadlineExceeded("conductor", "engine-0 to end after SIGKILL", 5)

    async def well() -> None:
        await asyncio.sleep(0.01)
        ended.append("trainer")

    asyncio.run(end_all(said.append, stuck(), well()))
    assert ended == ["trainer"]
    assert said == ["while the roles were ended: conductor waited 5 s for engine-0 to end after SIGKILL and gave up"]


def test_of_endpoints_that_cannot_be_made_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, RunFolder.create(tmp_path / "run") as run:
        monkeypatch.setattr(tempfile, "tempdir", place)
        (run.path / ".sockets").mkdir()  # where a file is to be written
        before = os.listdir("/proc/self/fd")
        with pytest.raises(IsADirectoryError), endpoints(cast(Plan, None), run, version=0):
            raise AssertionError("they cannot be made")
        assert os.listdir("/proc/self/fd") == before
        assert os.listdir(place) == []


def test_of_a_folder_that_a_run_names_only_what_roles_make_is_removed(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="stretto-", dir="/tmp") as place,
        RunFolder.create(tmp_path / "run") as run,
        closing(socket.socket(socket.AF_UNIX)) as engine,
    ):
        run.write(".sockets", f"{place}\n")
        engine.bind(f"{place}/engine-0.sock")
        (Path(place) / "engine-1.sock").write_text("no socket")
        (Path(place) / "thesis.tex").write_text("years of work")
        sweep(run, "mailbox")
        assert sorted(path.name for path in Path(place).iterdir()) == ["engine-1.sock", "thesis.tex"]


def test_the_sockets_of_a_running_run_are_left_to_it_by_a_copy_of_its_folder(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="stretto-", dir="/tmp", ignore_cleanup_errors=True) as place,
        RunFolder.create(tmp_path / "run") as run,
        closing(socket.socket(socket.AF_UNIX)) as engine,
    ):
        run.write(".sockets", f"{place}\n")
        engine.bind(f"{place}/engine-0.sock")
        (run.path / "ledger.sqlite").touch()
        owner = lock.acquire(Path(place), lock.TEMPORARY)
        shutil.copytree(run.path, tmp_path / "copy")
        with RunFolder.resume(tmp_path / "copy") as copy:
            assert mailbox_name(copy) != mailbox_name(run)
            sweep(copy, mailbox_name(copy))
            assert sorted(path.name for path in Path(place).iterdir()) == ["engine-0.sock", lock.TEMPORARY]
            os.close(owner)
            sweep(copy, mailbox_name(copy))
            assert not Path(place).exists(), "nobody is left whose they are"


def test_a_run_that_was_moved_away_and_its_successor_share_no_name_and_no_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as moved:
        book, lines, name = RunLog(moved.log, SilentReporter()), SpanLog(moved.spans), mailbox_name(moved)
        book.note("before")
        moved.path.rename(tmp_path / "elsewhere")
        assert mailbox_name(RunFolder(tmp_path / "elsewhere")) == name
        with RunFolder.create(tmp_path / "run") as successor:
            assert mailbox_name(successor) != name
            assert (successor.is_ours(), moved.is_ours()) == (True, False)
            book.note("after")
            lines.append([Span(role="trainer", name="update", start=0.0, end=1.0)])
            with pytest.raises(FileNotFoundError, match="the run folder was moved or removed"):
                moved.write(".sockets", "")
            assert sorted(path.name for path in successor.path.iterdir() if path.is_file()) == ["lock"]
    assert (tmp_path / "elsewhere" / "log.txt").read_text().endswith("before\n")


def test_who_comes_second_is_not_begun_when_the_first_fails() -> None:
    """Nor is it made: a coroutine that nobody awaits is a warning on the screen."""
    started = list[str]()

    async def fails() -> None:
        raise DeadlineExceeded("conductor", "trainer to be ready", 5)

    async def second() -> None:
        raise AssertionError("not begun")

    def make_second() -> Coroutine[Any, Any, None]:
        started.append("second")
        return second()

    with pytest.raises(DeadlineExceeded):
        asyncio.run(in_turn(fails, make_second))
    assert started == []


class WithoutWeights:
    """A cluster whose server of weights dies too often while the roles start."""

    def __init__(self) -> None:
        self.opened = False

    async def open(self) -> None:
        self.opened = True

    async def supervise(self) -> NoReturn:
        while not self.opened:
            await asyncio.sleep(0)
        raise RoleDied("weights", "exit code 1, 4 times", "logs/weights.txt")


def test_a_part_of_the_cluster_that_fails_while_roles_start_ends_the_start_with_its_name() -> None:
    ended: list[str] = []

    async def trainer() -> None:
        try:
            await asyncio.get_running_loop().create_future()  # it loads a large model, say
        finally:
            ended.append("trainer")

    start = up(cast(Cluster, WithoutWeights()), cast(EnginePool, None), 600.0, trainer)
    with pytest.raises(RoleDied, match="weights"):
        asyncio.run(asyncio.wait_for(start, 10))
    assert ended == ["trainer"]


def test_a_socket_folder_that_cannot_be_locked_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since no further descriptor is allowed, say."""
    short = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))  # sockets lie there, and pytest's own folder is too long
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        with pytest.raises(RunFolderError, match="Too many open files"):
            temporary_folder()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert list(short.iterdir()) == []
    shutil.rmtree(short)


def test_a_temporary_folder_that_a_killed_process_left_is_removed_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And neither one that is in use, nor one that was left to the user, nor a run folder of such a name."""
    code = "from stretto.store.lock import *; kept = temporary_folder(); let_go(*kept, kept=True); "
    code += "print(kept[0], temporary_folder()[0], flush=True); input()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        (run := Path(short, "stretto-run")).mkdir()
        os.close(lock.acquire(run))
        environment = os.environ | {"TMPDIR": short}
        with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
            assert process.stdout is not None
            kept, left = map(Path, process.stdout.readline().split())
            let_go(*temporary_folder())
            assert left.exists(), "in use"
            process.kill()
        own, held = temporary_folder()
        assert set(Path(short).iterdir()) == {run, kept, own}
        let_go(own, held)


def test_a_temporary_folder_of_another_machine_or_user_stays_and_holds_up_no_other() -> None:
    """A file system may lock for one machine alone; another user's folder cannot be looked into."""
    user = os.getuid() or 65534  # root can look into everything
    code = f"import os; from stretto.store.lock import temporary_folder; os.seteuid({user}); temporary_folder()"
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as short:
        folders = far, left, private = [Path(short, f"stretto-{name}") for name in ("far", "left", "private")]
        for folder in folders:
            folder.mkdir()
            os.close(lock.acquire(folder, lock.TEMPORARY))
        (far / lock.TEMPORARY).write_text("process 1 on another-machine\n")
        private.chmod(0)
        for path in (Path(short), far, left, far / lock.TEMPORARY, left / lock.TEMPORARY):
            os.chown(path, user, -1)
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": short}, check=True)
        private.chmod(0o700)
        assert (far.exists(), left.exists(), private.exists()) == (True, False, True)


def test_a_socket_has_room_though_letters_of_the_temporary_folder_take_two_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (there := Path(short, "ж" * 45)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(there))
        sockets, held = temporary_folder()
        os.close(held)
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(str(sockets / "engine-1000.sock"))
        shutil.rmtree(sockets)


def test_the_level_of_the_sandbox_is_recorded_with_the_run_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    facts, written = {"sandbox": "sandbox level A (warm): 33 attacks stopped"}, tmp_path / "run" / "rewards.json"
    with RunFolder.create(tmp_path / "run") as folder:
        record_facts(folder, {})
        assert not written.exists()
        record_facts(folder, facts)
    assert json.loads(written.read_text()) == facts
