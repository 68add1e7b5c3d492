"""How the process of a role comes to be: as a fresh interpreter here, as a fork of one in `processes.fork_server`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

from msgspec import field

from stretto.core.records import Record
from stretto.processes.heartbeat import PARENT

#: Tensors come and go in every step. Large pages, kept instead of given back to the kernel each time, make a step of
#: training 10 % faster on the processor. Other C libraries than glibc do not look at this.
_MEMORY = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 32 << 20,
        "trim_threshold": 256 << 20,
        "top_pad": 64 << 20,
    }.items()
)


class Spawn(Record, frozen=True):
    """A process to be: ``python -m MODULE SPEC``, which writes into `log`.

    `spec` is JSON text; `environment` is further to that of every role with `threads`; `inherited` descriptors keep
    their numbers in it.
    """

    module: str
    spec: str
    log: str
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    inherited: tuple[int, ...] = ()


class RunningProcess(Protocol):
    """A process that was started; its exit code is negative where a signal has ended it, None as long as it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...

    def terminate(self) -> None:
        """SIGTERM.

        Raises:
            ProcessLookupError: it has ended.
        """
        ...


class Spawner(Protocol):
    """Whoever can start the process of a role."""

    async def start(self, birth: Spawn) -> RunningProcess:
        """Start it, in a session of its own.

        Raises:
            OSError: the system has no room for it, or its log cannot be written.
        """
        ...

    def describe_end(self, process: RunningProcess) -> str:
        """How a process that it has started ended. Example: ``"was killed by SIGTERM"``"""
        ...


class FreshSpawner:
    """Every process begins with an interpreter of its own, which imports what it needs: seconds, with torch."""

    async def start(self, birth: Spawn) -> RunningProcess:
        with Path(birth.log).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                birth.module,
                birth.spec,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(birth.threads) | birth.environment | {PARENT: str(os.getpid())},
                pass_fds=birth.inherited,
                start_new_session=True,
            )

    def describe_end(self, process: RunningProcess) -> str:
        assert process.returncode is not None, "it has ended"
        return describe_exit(process.returncode)


FRESH = FreshSpawner()


def describe_exit(code: int) -> str:
    """``"was killed by SIGKILL (out of memory?)"``, ``"ended with exit code 3"``."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def environment(threads: int) -> dict[str, str]:
    """The environment of a role: its thread count must be set before torch is imported. Threads that have nothing
    to do must sleep, not spin: the cores belong to the other roles then."""
    return {"GLIBC_TUNABLES": _MEMORY} | os.environ | settings(threads)


def settings(threads: int) -> dict[str, str]:
    """What a role's environment must hold, whatever the user's does."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
