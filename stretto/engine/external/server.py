"""The process of an inference server, or the address of one that somebody else runs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable

from stretto.core.errors import DeadlineExceeded, RoleDied
from stretto.engine.external.make import Launch, Make
from stretto.processes.spawn import describe_exit

_LOOK_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_SILENT_SECONDS = 20.0
_STOP_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server that this process has started. It ends with this process, whatever ends that."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process

    @classmethod
    async def start(cls, name: str, launch: Launch) -> ServerProcess:
        """Start it, with its output in this process' own.

        Raises:
            OSError: the interpreter is not there.
        """
        process = await asyncio.create_subprocess_exec(
            *launch.command,
            stdin=asyncio.subprocess.DEVNULL,
            env=_without_ours(os.environ) | launch.environment,
            preexec_fn=_ending_with(os.getpid()),
        )
        return cls(name, process)

    async def ended(self) -> RoleDied:
        """How it ended."""
        return RoleDied(f"the server of {self.name}", describe_exit(await self._process.wait()))

    async def stop(self) -> None:
        """End it."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


class GivenServer:
    """A server that somebody else started."""

    def __init__(self, name: str, address: str, make: Make) -> None:
        self.name, self._address, self._make = name, address, make

    async def ended(self) -> RoleDied:
        """That it has not answered for a while."""
        silent_since = time.monotonic()
        while time.monotonic() - silent_since < _SILENT_SECONDS:
            await asyncio.sleep(_WATCH_SECONDS)
            if await self._make.ready():
                silent_since = time.monotonic()
        return RoleDied(f"the server {self._address}", f"does not answer for {_SILENT_SECONDS:g} s")

    async def stop(self) -> None:
        """It goes on; its owner ends it."""


Server = ServerProcess | GivenServer


async def until_ready(server: Server, make: Make, seconds: float) -> None:
    """Return when it can be asked.

    Raises:
        RoleDied: it ended instead.
        DeadlineExceeded: that takes longer than `seconds`.
    """
    ended = asyncio.create_task(server.ended())
    end = time.monotonic() + seconds
    try:
        while not await make.ready():
            if ended.done():
                raise ended.result()
            if time.monotonic() > end:
                raise DeadlineExceeded(server.name, "its server to be ready", seconds)
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        ended.cancel()


def _ending_with(parent: int) -> Callable[[], None]:
    """To be called in the child: the kernel ends it when the parent ends."""
    libc = ctypes.CDLL(None)  # loaded here: the child of a process with threads may not

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)

    return ask


def _without_ours(environment: os._Environ[str]) -> dict[str, str]:
    """Another interpreter finds its own packages."""
    return {
        name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
