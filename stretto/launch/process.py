"""One operating system process that plays a role: started, watched, stopped. It never outlives the conductor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded

_END_SECONDS = 10.0
_REAP_SECONDS = 5.0
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


class RoleProcess:
    """``python -m MODULE SPEC`` with its own log file, threads and process group.

    Ctrl-C reaches the conductor alone, which then stops its roles in order; should it be killed itself, the kernel
    kills them (`core.lifeline`).
    """

    def __init__(self, name: str, module: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: msgspec.Struct, threads: int, inherited: Sequence[int] = ()) -> None:
        """Start it; `spec` goes as JSON on the command line, `inherited` descriptors keep their numbers."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                msgspec.json.encode(spec).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(threads),
                pass_fds=tuple(inherited),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> str:
        """Wait until it ends, and say how. The owner of this wait is whoever supervises the role: it has no end
        of its own, because a healthy role runs as long as the run."""
        assert self._process is not None, "start() comes first"
        return describe_exit(await self._process.wait())

    async def last_words(self) -> str:
        """How it ended, for a role that has closed its connection; it is killed if it has not ended."""
        try:
            async with deadline("conductor", f"{self.name} to end", _END_SECONDS):
                return await self.ended()
        except DeadlineExceeded:
            self.kill()
            return "closed its connection and went on running"

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to its whole process group after `grace` seconds; returns when it is gone.

        Raises:
            DeadlineExceeded: the kernel does not let go of it (a disk or a device that does not answer).
        """
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
            try:
                async with deadline("conductor", f"{self.name} to stop", grace):
                    await self._process.wait()
            except DeadlineExceeded:
                self.kill()
        async with deadline("conductor", f"{self.name} to end after SIGKILL", _REAP_SECONDS):
            await self._process.wait()

    def kill(self) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been waited for yet
                os.killpg(self.pid, signal.SIGKILL)


def environment(threads: int) -> dict[str, str]:
    """The environment of a role: its thread count must be set before torch is imported. Threads that have nothing
    to do must sleep, not spin: the cores belong to the other roles then."""
    count = str(threads)
    return (
        {"GLIBC_TUNABLES": _MEMORY}
        | os.environ
        | {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )


def describe_exit(code: int) -> str:
    """``"was killed by SIGKILL (out of memory?)"``, ``"ended with exit code 3"``."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
