"""One operating system process that plays a role: started, watched, stopped. It never outlives the conductor."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded
from stretto.core.lifeline import PULSE

_END_SECONDS = 10.0
_REAP_SECONDS = 5.0
_LISTEN_SECONDS = 0.5
_READ_BYTES = 4096
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

    def __init__(self, name: str, module: str, log: Path, hung: float = math.inf) -> None:
        """`hung`: seconds without a sign of life after which it is killed; counted from its first one."""
        self.name = name
        self.log = log
        self._module = module
        self._hung = hung
        self._pulse: Pulse | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: msgspec.Struct, threads: int, inherited: Sequence[int] = ()) -> None:
        """Start it; `spec` goes as JSON on the command line, `inherited` descriptors keep their numbers."""
        self._let_go()
        self._pulse = pulse = Pulse()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                msgspec.json.encode(spec).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(threads) | {PULSE: str(pulse.far)},
                pass_fds=(*inherited, pulse.far),
                start_new_session=True,
            )
        pulse.listen()

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> str:
        """Wait until it ends, and say how. The owner of this wait is whoever supervises the role: it has no end
        of its own, because a healthy role runs as long as the run. One that gives no sign of life is killed."""
        assert self._process is not None, "start() comes first"
        assert self._pulse is not None, "start() comes first"
        end = asyncio.ensure_future(self._process.wait())
        try:
            while not end.done():
                if (silence := self._pulse.silence()) > self._hung:
                    self.kill()
                    await end
                    return f"gave no sign of life for {silence:.0f} s and was killed"
                await asyncio.wait([end], timeout=_LISTEN_SECONDS)
            return describe_exit(end.result())
        finally:
            end.cancel()

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
        self._let_go()

    def _let_go(self) -> None:
        if self._pulse is not None:
            self._pulse.close()

    def kill(self) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been waited for yet
                os.killpg(self.pid, signal.SIGKILL)


class Pulse:
    """The conductor's end of the pipe on which a role tells that it lives (`core.lifeline`)."""

    def __init__(self) -> None:
        self._near, self.far = os.pipe()
        self._heard: float | None = None  # by `time.monotonic`

    def listen(self) -> None:
        """To be called once the far end has been handed to the role."""
        os.close(self.far)
        os.set_blocking(self._near, False)
        asyncio.get_running_loop().add_reader(self._near, self._hear)

    def silence(self) -> float:
        """Seconds since the last sign of life; 0 before the first."""
        return time.monotonic() - self._heard if self._heard is not None else 0.0

    def close(self) -> None:
        """Listen no more; closing twice is no error."""
        if self._near >= 0:
            asyncio.get_running_loop().remove_reader(self._near)
            os.close(self._near)
            self._near = -1

    def _hear(self) -> None:
        if os.read(self._near, _READ_BYTES):
            self._heard = time.monotonic()
        else:  # the role has ended; its end is waited for elsewhere
            asyncio.get_running_loop().remove_reader(self._near)


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
