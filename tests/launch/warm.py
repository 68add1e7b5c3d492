"""Commands that need not import anything: one process per session imports what a run needs, which takes four seconds of
a processor, and each of them is forked from it.

A command is the real one from `stretto_app.cli.main.main` on, in a process, a session and surroundings of its own.
Roles of an agent are forked too, and so are the workers of rewards (`ForkedWorker`). What comes before, and the
imports, are left to commands that are started without this (``cold``); the trial of a known reward, and the plots at
its end, to one that ``draws``.
"""

import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from stretto.core.records import Record
from stretto.processes.spawn import Spawn, Spawner
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service import process as rewards_process
from stretto.rewards.service import worker as rewards_worker
from stretto.rewards.service.wire import WorkerSettings
from stretto.rollout.questions import Question
from stretto_app.extensions.preflight import notes
from stretto_app.extensions.preflight.trial import try_reward
from stretto_app.forking import command_line
from stretto_app.forking.server import LONGEST_MESSAGE, ROLES, Exited, ForkServer, NotSpawned, Spawned
from stretto_report.dashboard import plots
from tests.launch import poverty

ROOT = Path(__file__).parents[2]
MARK = "STRETTO_TEST_MARK"
_COMMANDS: tuple[str, ...] = ("stretto.launch.train", "stretto_report.dashboard.terminal.summary")
_COMMANDS += ("stretto_report.dashboard.terminal.progress", "stretto_app.extensions.commands.evaluate")
_COMMANDS += ("tests.launch.warm", "stretto_app.cli.main", "tests.launch.heat", "stretto_cluster.ranks.rank")
_COMMANDS += ("stretto_app.extensions.commands.join", "stretto_cluster.agent", "stretto_app.extensions.commands.replay")
_COMMANDS += (
    "stretto.run_process",
    "stretto_app.extensions.commands.serve",
    "stretto_app.extensions.commands.gateway",
    "stretto_workflows.worker",
)
KNOWN = "tests.launch.rewards_for_tests:length"  # of tiny.toml
_MOST_DESCRIPTORS = 1 << 20
_ENVIRONMENT = slice(47, 49)  # where it begins and ends, behind the name in /proc/PID/stat
_REPLY: msgspec.msgpack.Decoder[Spawned | NotSpawned | Exited] = msgspec.msgpack.Decoder(Spawned | NotSpawned | Exited)


class Surroundings(Record, frozen=True):
    """What a command finds: everything that a new process is given."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    out: str
    err: str
    inherited: tuple[int, ...]
    poor: tuple[str, ...]
    draws: bool


@cache
def session_server() -> ForkServer:
    """The process that all others are forked from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv(MARK, "0" * 32)
        server = ForkServer([*ROLES, *_COMMANDS])
    atexit.register(server.close)
    return server


@contextmanager
def session_fork_server(modules: Sequence[str] = (), **_: object) -> Iterator[Spawner]:
    """In place of `fork_server_role.fork_server`: that of the session, without what it forks meanwhile."""
    server = session_server()
    before = children_of(server.pid)
    try:
        yield server
    finally:
        for pid in set(children_of(server.pid)) - set(before):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The living child processes of a process."""
    found = list[int]()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended meanwhile
            found += map(int, children.read_text().split())
    return found


class WarmCommand:
    """As `subprocess.Popen`, as far as the tests need it."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        module: str = "stretto_app.cli.main",
        inherited: Sequence[int] = (),
        poor: Sequence[str] = (),
        draws: bool = False,
    ) -> None:
        """``python -m MODULE ARGUMENTS`` in `folder`; `inherited` descriptors keep their numbers. What the process
        has to do without is the work of a function of `tests.launch.poverty`: `poor` is its name and its argument.
        `draws`: a run ends with its plots."""
        self.returncode: int | None = None
        self._out, self._err = (folder / f"{environment[MARK]}.{name}" for name in ("out", "err"))
        output, kept = (str(self._out), str(self._err)), tuple(inherited)
        told = Surroundings(module, tuple(arguments), dict(environment), str(folder), *output, kept, tuple(poor), draws)
        spec = msgspec.json.encode(told).decode()
        self._wire, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            message = msgspec.msgpack.encode(Spawn("tests.launch.warm", spec, os.devnull, inherited=kept))
            socket.send_fds(session_server()._wire, [message], [far.fileno(), *kept])
        self._wire.settimeout(100)
        spawned = _REPLY.decode(self._wire.recv(LONGEST_MESSAGE))
        assert isinstance(spawned, Spawned), spawned
        self.pid = spawned.pid

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._wire], [], [], 0)[0]:
            said = self._wire.recv(LONGEST_MESSAGE)
            ended = _REPLY.decode(said) if said else None
            self.returncode = ended.code if isinstance(ended, Exited) else -signal.SIGKILL
            self._wire.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._wire], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("stretto", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        return self.said()

    def said(self) -> tuple[str, str]:
        """What it has written so far to its output and to its errors."""
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its server has waited for it, and is about to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """In the process of a command; its fork server is a copy of it, as that of every command."""
    told = msgspec.json.decode(arguments[0], type=Surroundings)
    _put_into(told)
    sys.argv = ["stretto", *told.arguments]
    fork_workers()
    if not told.draws:
        spare()
    code = _code_of(told.module)
    gc.collect()  # what would complain at the end of an interpreter does so here
    return code


def _code_of(module: str) -> int:
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def spare(patch: pytest.MonkeyPatch | None = None) -> None:
    """Runs of this process end without plots, which take half of the time of a tiny one, and do not try the reward of
    tiny.toml: another process, of which nothing new is learnt."""
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(plots, "plot_run", lambda path: ())
    patch.setattr(notes, "try_reward", _tried)


def _tried(config: RewardsConfig, questions: Sequence[Question], completions: int) -> list[str]:
    known = not config.functions and config.function == KNOWN
    return [] if known else try_reward(config, questions, completions=completions)


class ForkedWorker:
    """A worker of rewards that is a copy of this process: as the `subprocess.Popen` of a pool, as far as it is asked.
    `tests/rewards/service` has those that import what they need."""

    def __init__(self, settings: WorkerSettings, log: Path | None, mark: str) -> None:
        self.returncode: int | None = None
        output = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _judge(settings, output, mark)
        finally:
            os.close(output)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_workers(patch: pytest.MonkeyPatch | None = None) -> None:
    """Let the workers of rewards that this process starts be copies of it."""
    (patch or pytest.MonkeyPatch()).setattr(rewards_process, "_spawn", ForkedWorker)


def _judge(settings: WorkerSettings, output: int, mark: str) -> NoReturn:
    """In the process of a worker: what a new interpreter would find, and the work."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, stream)
        low, high = sorted((settings.socket, settings.progress))
        for first, end in ((3, low), (low + 1, high), (high + 1, _MOST_DESCRIPTORS)):
            os.closerange(first, end)
        name, _, value = mark.partition("=")
        os.environ |= {"OMP_NUM_THREADS": "1", name: value}
        sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        command_line.show_as([sys.executable, "-m", rewards_worker.__name__])
        rewards_worker.main([msgspec.json.encode(settings).decode()])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # it is this process's end, as that of an interpreter
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _put_into(told: Surroundings) -> None:
    for number, path in ((1, told.out), (2, told.err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a session in the background ignores some
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(told.environment)
    _mark(told.environment[MARK].encode())
    os.chdir(told.folder)
    sys.path[0] = told.folder
    tempfile.tempdir = None
    command_line.show_as([sys.executable, "-m", told.module, *told.arguments])
    if told.poor:
        name, argument = told.poor
        getattr(poverty, name)(argument)


def _mark(mark: bytes) -> None:
    """Write it over that of the session in this process's environment, as /proc shows it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ENVIRONMENT])
    at = ctypes.string_at(start, end - start).index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(start + at, mark, len(mark))
