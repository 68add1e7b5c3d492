"""Process of an inference server, or the address of one that is managed elsewhere."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Mapping

from stretto.core.deadlines import deadline
from stretto.core.errors import RoleDied
from stretto.core.tasks import cancel_and_wait
from stretto.processes.spawn import describe_exit
from stretto_servers.make import Launch, Make

_LOOK_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_SILENT_SECONDS = 20.0
_STOP_SECONDS = 10.0
_GUARD = "stretto_servers.guard"


def free_port() -> int:
    """An unused port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server started by this process through a guard (`stretto_servers.guard`), so that it never outlives this
    process."""

    def __init__(self, name: str, guard: asyncio.subprocess.Process) -> None:
        self.name, self._guard = name, guard

    @classmethod
    async def start(cls, name: str, launch: Launch) -> ServerProcess:
        """Start the server; its output goes to this process' output."""
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _GUARD, "env", *_changed(launch.environment), *launch.command),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(name, guard)

    async def ended(self) -> RoleDied:
        """Error that says how the server ended."""
        code = await self._guard.wait()
        killed = code - 128 in set(signal.Signals)
        return RoleDied(f"the server of {self.name}", describe_exit(128 - code if killed else code))

    async def stop(self) -> None:
        """End the server and all its processes."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        async with deadline(self.name, "the end of its server", _STOP_SECONDS):
            await self._guard.wait()


class GivenServer:
    """A server that somebody else has started."""

    def __init__(self, name: str, address: str, make: Make) -> None:
        self.name, self._address, self._make = name, address, make

    async def ended(self) -> RoleDied:
        """Error that says that the server has not answered for a while."""
        return await _silence(f"the server {self._address}", self._make)

    async def stop(self) -> None:
        """Do nothing: the server belongs to somebody else."""


Server = ServerProcess | GivenServer


async def until_ready(server: Server, make: Make, seconds: float) -> None:
    """Wait until the server accepts requests.

    Raises:
        RoleDied: it ended instead.
        DeadlineExceeded: that takes longer than `seconds`.
    """
    ended, answering = asyncio.create_task(server.ended()), asyncio.create_task(_answers(make))
    try:
        async with deadline(server.name, "its server to be ready", seconds):
            await asyncio.wait((ended, answering), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ended.result()
        answering.result()
    finally:
        await cancel_and_wait([ended, answering])


async def lost(server: Server, make: Make) -> RoleDied:
    """Wait until a ready server is lost: it ended, or does not answer (a server whose workers have died may hang
    forever). Returns the error."""
    ends = [asyncio.create_task(server.ended()), asyncio.create_task(_silence(f"the server of {server.name}", make))]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_and_wait([*ends])


async def _silence(server: str, make: Make) -> RoleDied:
    since = time.monotonic()
    while time.monotonic() - since < _SILENT_SECONDS:
        await asyncio.sleep(_WATCH_SECONDS)
        if await make.ready():
            since = time.monotonic()
    return RoleDied(server, f"does not answer for {_SILENT_SECONDS:g} s")


async def _answers(make: Make) -> None:
    while not await make.ready():
        await asyncio.sleep(_LOOK_SECONDS)


def _changed(environment: Mapping[str, str]) -> list[str]:
    """Arguments of ``env`` for a server's environment. Removed are variables that would make another interpreter find
    our packages, or keep it from writing bytecode, without which each start takes minutes."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return [word for name in ours for word in ("-u", name)] + [f"{name}={value}" for name, value in environment.items()]
