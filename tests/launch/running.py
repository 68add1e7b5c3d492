"""The real command line, and what is left of it: for the system tests.

Commands run in a process of their own where they are to be stopped or killed, else in this one, which is quicker;
their roles are processes either way. Every process inherits a mark in its environment, so that orphans are found
wherever they have gone.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stretto.launch.assemble.roles import mailbox_name
from stretto.store.inspection import Inspection
from stretto.store.run_folder import RunFolder
from stretto_app.cli.main import main
from stretto_app.forking import role as fork_server_role
from stretto_report.reading.inspection import inspect_run
from stretto_workflows.pool import WorkflowPool
from tests.launch.warm import MARK, WarmCommand, children_of, fork_workers, session_fork_server, session_server, spare

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).parent / "recipes" / "tiny.toml"
#: The module that runs in the process of a role.
MODULES = {
    "engine": "stretto.engine.role",
    "trainer": "stretto.trainer.roles.trainer",
    "supervised": "stretto.trainer.roles.supervised",
    "fork server": "stretto_app.forking.role",
    "rewards": "stretto.rewards.service.worker",
    "workflow": "stretto_workflows.worker",
    "outlet": "stretto_report.outlets.role",
    "weights server": "stretto_cluster.weights.server",
}
_PATIENCE = 100.0
_POLL = 0.05  # seconds; to look for the processes of a command takes a fifth of it


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def well(self) -> str:
        """Assert that it ended without a mistake, and return what it printed."""
        assert self.code == 0, self.out + self.err
        return self.out

    def refused(self, *texts: str) -> None:
        """It was the user's mistake: exit code 2, one message without a traceback that holds all `texts`."""
        assert self.code == 2, self.out + self.err
        self.says(*texts)

    def failed(self, *texts: str) -> None:
        """It failed: exit code 1, and one message without a traceback that holds all `texts`."""
        assert self.code == 1, self.out + self.err
        self.says(*texts)

    def says(self, *texts: str) -> None:
        """The message on stderr holds all `texts` and no traceback."""
        assert "Traceback" not in self.out + self.err, self.out + self.err
        assert self.err.startswith(("stretto: ", "Usage: ")), self.err
        assert not [text for text in texts if text not in self.err], self.err


class Printed(io.TextIOWrapper):
    """What a command prints, as text or as bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")

    def text(self) -> str:
        self.seek(0)
        return self.read()


class ColdCommand(subprocess.Popen[str]):
    """A command in a session of its own. What it prints goes to files: a pipe that nobody reads is full one day, and
    stops a run."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._told = tuple(folder / f"{environment[MARK]}.{name}" for name in ("out", "err"))
        with self._told[0].open("wb") as out, self._told[1].open("wb") as err:
            super().__init__(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """As that of `subprocess.Popen`: wait, and read what it printed."""
        self.wait(timeout)
        return self.said()

    def said(self) -> tuple[str, str]:
        """What it has written so far to its output and to its errors."""
        out, err = (path.read_text(errors="replace") for path in self._told)
        return out, err


@dataclass
class Command:
    """A command that is running."""

    process: ColdCommand | WarmCommand
    mark: str
    temporary: Path
    run_dir: Path | None = None

    def processes(self, module: str = "") -> list[int]:
        """The living processes of this command, those whose command line names `module`."""
        return [pid for pid in _marked(self.mark) if module in _command_line(pid)]

    def roles(self) -> dict[int, str]:
        """The role of each of its living processes: one of `MODULES`, or the conductor."""
        lines = {pid: _command_line(pid) for pid in _marked(self.mark)}
        found = {pid: [role for role, module in MODULES.items() if module in line] for pid, line in lines.items()}
        return {pid: roles[0] if roles else "conductor" for pid, roles in found.items()}

    def role(self, name: str) -> int:
        """The process that plays a role: one of `MODULES`."""
        (pid,) = self.processes(MODULES[name])
        return pid

    def end(self, seconds: float = _PATIENCE) -> Ended:
        """Wait until it has ended."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate(timeout=10)
            raise AssertionError(f"not ended after {seconds} s:\n{out}\n{err}") from None
        code = self.process.returncode
        assert code is not None
        return Ended(code, out, err)

    def stop(self, number: signal.Signals) -> tuple[Ended, float]:
        """Send a signal; how it ended, and after how many seconds."""
        start = time.monotonic()
        self.process.send_signal(number)
        return self.end(30), time.monotonic() - start

    def stopped(self, number: signal.Signals) -> Ended:
        """Stop it with a signal: it ends within ten seconds, with the code of the signal, and leaves nothing."""
        ended, seconds = self.stop(number)
        assert (ended.code, seconds < 10) == (128 + number, True), (seconds, ended.err)
        assert "Traceback" not in ended.out + ended.err, ended.out + ended.err
        self.assert_nothing_is_left()
        return ended

    def kill_all(self) -> None:
        for pid in self.processes():
            with_no_fuss(pid)

    def assert_nothing_is_left(self) -> None:
        """No process, no shared memory, no temporary file."""
        until = time.monotonic() + 5
        while left := self.processes():
            assert time.monotonic() < until, [_command_line(pid) for pid in left]
            time.sleep(_POLL)
        assert list(self.temporary.iterdir()) == []
        if self.run_dir is not None:
            assert list(shared_files(self.run_dir)) == []


@contextmanager
def default_dispositions() -> Iterator[None]:
    """Signals end this process, and what it starts, as at a terminal: `nohup` ignores SIGHUP and a shell SIGINT for its
    jobs in the background, and both are inherited."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def with_no_fuss(pid: int) -> None:
    """SIGKILL to a process of ours that may have ended meanwhile."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def shared_files(run_dir: Path) -> Iterator[Path]:
    """What a run has in shared memory."""
    if run_dir.exists():
        yield from Path("/dev/shm").glob(f"stretto-{mailbox_name(RunFolder(run_dir))}-*")


def children() -> list[int]:
    """The living child processes of this process, without the one that commands are forked from."""
    servers = [session_server().pid] if session_server.cache_info().currsize else []
    return [pid for pid in children_of(os.getpid()) if pid not in servers]


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found = wanted in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is not ours
                continue
            if found:
                yield int(folder.name)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@dataclass(frozen=True)
class Laboratory:
    """Where commands are run: a folder, and a cache that all tests of the session share. If it is `warm`, commands are
    forked from a process that has imported what they need, unless they are started ``cold`` (see `warm`)."""

    folder: Path
    cache: Path
    warm: bool = False

    @contextmanager
    def start(
        self,
        *arguments: str | Path,
        run_dir: Path | None = None,
        before: Sequence[str] = (),
        poor: Sequence[str] = (),
        cold: bool = False,
        draws: bool = False,
    ) -> Iterator[Command]:
        """``BEFORE python -m stretto_app.cli.main ARGUMENTS``; killed with all that it started when the block ends.
        `poor`, `draws`: see `WarmCommand`."""
        mark = uuid.uuid4().hex
        # Sockets lie there, and the path of a socket has 107 bytes at most.
        temporary = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        inherited = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "STRETTO_CACHE": str(self.cache),
            "TMPDIR": str(temporary),
            MARK: mark,
        }
        words = tuple(map(str, arguments))
        process: ColdCommand | WarmCommand
        with default_dispositions():
            if self.warm and not cold and not before:
                process = WarmCommand(words, self.folder, inherited, poor=poor, draws=draws)
            else:
                process = ColdCommand(
                    (*before, sys.executable, "-m", "stretto_app.cli.main", *words), self.folder, inherited
                )
        command = Command(process, mark, temporary, run_dir)
        try:
            yield command
        finally:
            command.kill_all()
            process.kill()
            process.communicate(timeout=30)
            shutil.rmtree(temporary, ignore_errors=True)
            for path in shared_files(run_dir) if run_dir is not None else ():
                path.unlink(missing_ok=True)

    def train(
        self,
        run_dir: Path,
        *arguments: str | Path,
        recipe: Path = TINY,
        before: Sequence[str] = (),
        poor: Sequence[str] = (),
        cold: bool = False,
        draws: bool = False,
    ) -> AbstractContextManager[Command]:
        """`start` with ``train RECIPE --run-dir RUN_DIR ARGUMENTS``."""
        words = ("train", recipe, *arguments, "--run-dir", run_dir)
        return self.start(*words, run_dir=run_dir, before=before, poor=poor, cold=cold, draws=draws)

    def run(self, *arguments: str | Path) -> Ended:
        """Run a command in this process; it leaves no other process behind."""
        if self.warm:
            with default_dispositions():
                session_server()
        out, err, code, before = Printed(), Printed(), None, children()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("STRETTO_CACHE", str(self.cache))
            patch.setattr(sys, "argv", ["stretto", *map(str, arguments)])
            if self.warm:
                patch.setattr(fork_server_role, "fork_server", session_fork_server)
                fork_workers(patch)
                patch.setitem(WorkflowPool.__init__.__kwdefaults__ or {}, "spawner", session_server())
                if arguments[0] == "train":
                    spare(patch)
            try:
                main()
            except SystemExit as end:
                code = end.code
        assert children() == before
        return Ended(code if isinstance(code, int) else 0, out.text(), err.text())

    def trained(self, run_dir: Path, *arguments: str | Path, recipe: Path = TINY) -> Ended:
        """Train to the end in this process, successfully."""
        ended = self.run("train", recipe, *arguments, "--run-dir", run_dir)
        assert ended.code == 0, ended.out + ended.err + logs(run_dir)
        assert list(shared_files(run_dir)) == []
        return ended


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """One cache of built models for the system tests of a folder whose conftest.py names it."""
    return Laboratory(tmp_path_factory.mktemp("laboratory"), tmp_path_factory.mktemp("cache"), warm=True)


@pytest.fixture
def door(laboratory: Laboratory) -> Callable[..., Ended]:
    """``door("inspect", run_dir)`` is ``stretto inspect RUN_DIR``, in this process: as quick as a function call."""
    return laboratory.run


@contextmanager
def service(
    *arguments: object, serving: str, poor: Sequence[str] = (), seconds: float = _PATIENCE
) -> Iterator[tuple[WarmCommand, list[str]]]:
    """A command that serves, forked as those of a warm laboratory, once a line of its output begins with `serving`; and
    its lines until then. `poor`: see `WarmCommand`. `seconds`: the longest wait for that line.

    Raises:
        AssertionError: it has ended before, with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        marked = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder, MARK: uuid.uuid4().hex}
        with default_dispositions():
            process = WarmCommand([str(word) for word in arguments], Path(folder), marked, poor=poor)
        try:
            begun = f"\n{serving}"
            wait_until(lambda: begun in f"\n{process.said()[0]}" or process.poll() is not None, serving, None, seconds)
            lines = process.said()[0].splitlines(keepends=True)
            assert any(line.startswith(serving) for line in lines), process.said()[1]
            yield process, lines
        finally:
            process.kill()
            process.wait(30)


def wait_until(
    condition: Callable[[], bool], awaited: str, command: Command | None = None, seconds: float = _PATIENCE
) -> None:
    """Poll; fails after a while, or as soon as the command has ended."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{awaited}: not in {seconds:g} s"
        if command is not None and command.process.poll() is not None and not condition():
            raise AssertionError(f"{awaited}: ended before\n{command.end()}")
        time.sleep(_POLL)


def wait_for_words(command: Command, run_dir: Path, words: str) -> None:
    """Poll until the run's log has them."""
    wait_until(lambda: words in said(run_dir), words, command)


def steps_done(run_dir: Path) -> int:
    """Training steps on record in a run that goes on."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum('"kind":"step"' in line for line in lines)


def wait_for_step(command: Command, step: int, seconds: float = _PATIENCE) -> None:
    assert command.run_dir is not None
    run_dir = command.run_dir
    wait_until(lambda: steps_done(run_dir) >= step, f"step {step}", command, seconds)


def logs(run_dir: Path) -> str:
    return "\n".join(f"--- {path}\n{path.read_text()}" for path in sorted((run_dir / "logs").glob("*.txt")))


def said(run_dir: Path) -> str:
    """What the run has said so far."""
    log = run_dir / "log.txt"
    return log.read_text() if log.exists() else ""


def exported(laboratory: Laboratory, run_dir: Path) -> list[dict[str, Any]]:
    """All trajectories of a run, by `stretto export`."""
    file = run_dir.with_name(f"{run_dir.name}.jsonl")
    laboratory.run("export", run_dir, file).well()
    return [json.loads(line) for line in file.read_text().splitlines()]


def trained_ages(trajectories: list[dict[str, Any]]) -> list[int]:
    """Versions between sampling and training, of every token of every trained trajectory."""
    return [
        trajectory["trained_step"] - 1 - version
        for trajectory in trajectories
        if trajectory["state"] == "trained"
        for version in trajectory["versions"]
    ]


def assert_the_law(run_dir: Path) -> Inspection:
    """Issued is the sum of all states, no trajectory is trained twice, every trained step is on record."""
    found = inspect_run(run_dir)
    counts = found.trajectories
    states = (counts.trained, counts.buffered, counts.in_flight, counts.filtered, counts.expired, counts.failed)
    assert counts.issued == sum(states)
    assert found.steps == found.version
    return found


def with_sections(recipe: Path, target: Path, sections: str, without: Sequence[str] = ()) -> Path:
    """A copy of a recipe with text at its end, and without the lines that begin with one of `without`."""
    kept = [line for line in recipe.read_text().splitlines() if not line.startswith(tuple(without) or ("\0",))]
    target.write_text("\n".join(kept) + "\n" + sections)
    return target
