"""Starting a role's process: as a fresh interpreter (here), or forked
(`stretto_app.forking`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Protocol

from msgspec import field

from stretto.core.errors import naming
from stretto.core.records import Record
from stretto.processes.heartbeat import PARENT
from stretto.processes.kernel import set_memory

TOKEN = "STRETTO_TOKEN"  #: environment variable with the token of a run
#: Memory settings of glibc's allocator (other C libraries ignore them). Tensors are allocated and freed in every step:
#: large pages that are kept, not returned to the kernel each time, make a training step on the CPU 10 % faster.
_MEMORY = {"mmap_threshold": 32 << 20, "trim_threshold": 256 << 20, "top_pad": 64 << 20}
_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_OPTIONS = {"trim_threshold": -1, "top_pad": -2, "mmap_threshold": -3}  # of mallopt
OFFLINE = "HF_HUB_OFFLINE"
_MOST_LOG_BYTES = 8 << 20  # a longer log is cut to the first half of this
_TRACEBACK = "Traceback (most recent call last):\n"
#: What Python says of an error that it ignores, such as that of a `__del__` at the end.
_IGNORED = re.compile(rf"^Exception ignored.*\n(?:{re.escape(_TRACEBACK)})?(?: .*\n)*.*\n?", re.MULTILINE)
#: Signals that a process gets for what its code has done, and the line with which Python or C++ says what that was.
_FAULTS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
_FATAL = re.compile(r"^(?:Fatal Python error: | +what\(\): ).*", re.MULTILINE)
_LAST_BYTES, _LONGEST_ERROR = 1 << 16, 300  # of a log, read for the error that ended a role; characters of that error


class Spawn(Record, frozen=True):
    """A process to start: ``python -m MODULE SPEC``, with its output appended to the file `log` (relative to `folder`).

    `spec` is JSON text. `threads`: of its numeric libraries. `environment`: variables beside those of every role
    (`environment(threads)`). `inherited` descriptors keep their numbers. `folder`: its working directory, by default
    that of the requesting process.
    """

    module: str
    spec: str
    log: str
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    inherited: tuple[int, ...] = ()
    folder: str = field(default_factory=os.getcwd)


class RunningProcess(Protocol):
    """A started process; its exit code is negative if a signal ended it, None while it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """Wait for its end, without a deadline; returns the exit code."""

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if it has ended."""


class Spawner(Protocol):
    """Starts the processes of roles."""

    async def start(self, spawn: Spawn) -> RunningProcess:
        """Start a process in its own session, and return without waiting for its work. Raises OSError if the system has
        no room for it, or its log cannot be written."""

    def describe_end(self, process: RunningProcess) -> str:
        """Say how a process, which has ended, did so. Example: ``"was killed by SIGTERM"``"""


class FreshSpawner:
    """Starts a fresh interpreter for every process, which takes seconds with torch."""

    async def start(self, spawn: Spawn) -> RunningProcess:
        with (Path(spawn.folder) / spawn.log).open("ab") as log, naming(Path(sys.executable)):
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                spawn.module,
                spawn.spec,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(spawn.threads) | spawn.environment | {PARENT: str(os.getpid())},
                pass_fds=spawn.inherited,
                cwd=spawn.folder,
                start_new_session=True,
            )

    def describe_end(self, process: RunningProcess) -> str:
        assert process.returncode is not None, "it has ended"
        return describe_exit(process.returncode)


FRESH = FreshSpawner()


#: What an unexplained SIGKILL may mean, at the end of `describe_exit`.
GUESS = " (out of memory?)"


def describe_exit(code: int) -> str:
    """Exit code of a process in words: ``"ended with exit code 3"``; for -9, the end by signal 9, ``"was killed by
    SIGKILL (out of memory?)"``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal, which has no name
        name = f"signal {-code}"
    return f"was killed by {name}" + (GUESS if name == "SIGKILL" else "")


def cause_in(log: Path, code: int, start: int) -> str:
    """Return in one line why a Python process ended with the exit code `code`, as its log says behind the byte `start`
    (if the log still has it).

    Exit code 1: type and text of the exception that nobody caught, those of the last traceback with nothing but ignored
    errors after it, or the line behind it that begins with the log's name (the role's). A signal that faulty code
    raises, as SIGABRT: "its log ends: " and the fatal error of Python or C++, or else the last line. "" for another
    code, if the log says nothing, or cannot be read.
    """
    said = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(start if start <= size else 0, size - _LAST_BYTES))
        said = file.read().decode(errors="replace")
    if code == 1:
        return _uncaught(_IGNORED.sub("", said), f"{log.stem}: ")[:_LONGEST_ERROR]
    lines = _FATAL.findall(said) or re.findall(r"\S.*", said) if -code in _FAULTS else []
    return f"its log ends: {lines[-1].strip()[:_LONGEST_ERROR]}" if lines else ""


def _uncaught(said: str, role: str) -> str:
    before, found, last = said.rpartition(_TRACEBACK)
    margin = before.rpartition("\n")[2].replace("+ Exception Group ", "| ")  # of an exception group, or a rank's name
    lines = [line.removeprefix(margin) for line in last.splitlines()] if found else []
    errors = [line for line in lines if line and not line[0].isspace()]
    if len(errors) == 2:  # a single line behind it is of the role, or of `sys.exit`, after an error that was caught
        return errors[1].removeprefix(role) if errors[1].startswith(role) else ""
    return errors[0] if errors else ""


def environment(threads: int) -> dict[str, str]:
    """All environment variables of a role: those of this process without the run's token, options of glibc's allocator
    (the user's own options win), and `settings(threads)`. The thread count must be set before torch is imported."""
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
    memory = ":".join((_LARGE_PAGES, *(f"glibc.malloc.{name}={value}" for name, value in _MEMORY.items())))
    return {_TUNABLES: memory} | inherited | settings(threads)


def keep_memory() -> None:
    """Apply the memory settings of `environment` by `mallopt`, for a process that was started without them. The user's
    own tunables win. Large pages are left to torch (`stretto_app.forking.imports`)."""
    if _TUNABLES not in os.environ:
        set_memory({_OPTIONS[name]: value for name, value in _MEMORY.items()})


def settings(threads: int) -> dict[str, str]:
    """Environment variables of a role that override the user's: numeric libraries use `threads` threads, which sleep
    when idle, since other roles need the cores; the Hugging Face hub is not asked; Python's output is not buffered."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        OFFLINE: "1",
        "PYTHONUNBUFFERED": "1",
    }


def cut_log(log: Path) -> None:
    """Truncate a log of more than 8 MiB to its first 4 MiB and a note; a log that is missing or unwritable is left as
    it is. For roles with user code, whose endless prints could fill the disk."""
    with contextlib.suppress(OSError):  # an unwritable log is reported at the start of a role
        if log.stat().st_size > _MOST_LOG_BYTES:
            os.truncate(log, _MOST_LOG_BYTES // 2)
            with log.open("a", encoding="utf-8") as end:
                end.write(f"\n[output cut after {_MOST_LOG_BYTES >> 21} MiB]\n")
