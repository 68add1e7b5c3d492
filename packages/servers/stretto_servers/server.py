"""Handles of inference servers: a process that is started here, or the address of a server that is managed
elsewhere."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import RoleDied
from stretto.core.tasks import cancel_and_wait
from stretto.processes.spawn import describe_exit
from stretto_servers.http import LOOK_SECONDS
from stretto_servers.make import Launch, Make

_LOOK_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_SILENT_SECONDS = 20.0
_STOP_SECONDS = 10.0
_GUARD = "stretto_servers.guard"


def reserve_port() -> socket.socket:
    """Bind an unused port of the loopback interface (`port_of`) and return the socket, which the caller closes. Until
    then the system gives the port to nobody else, and a server may listen on it if it sets SO_REUSEADDR, as vLLM,
    SGLang and most servers do."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def port_of(reserved: socket.socket) -> int:
    """The port of a bound socket."""
    port: int = reserved.getsockname()[1]
    return port


class ServerProcess:
    """A server that this process started by `start`, through a guard (`stretto_servers.guard`), so that it ends with
    this process."""

    def __init__(self, name: str, guard: asyncio.subprocess.Process) -> None:
        self.name, self._guard = name, guard

    @classmethod
    async def start(cls, name: str, launch: Launch) -> ServerProcess:
        """Start the server; its output goes to the output of this process. Returns at once: see `until_ready`. `name`:
        name of the engine, for errors."""
        words = ("sh", "-c", 'exec "$0" "$@"') if "=" in launch.command[0] else ()  # `env` takes it for a variable
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _GUARD, "env", *_changed(launch.environment), *words, *launch.command),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(name, guard)

    async def ended(self) -> RoleDied:
        """Wait for the end of the server; returns (does not raise) an error that says how it ended."""
        code = await self._guard.wait()
        killed = code - 128 in set(signal.Signals)
        return RoleDied(f"the server of {self.name}", describe_exit(128 - code if killed else code))

    async def stop(self) -> None:
        """End the server and its process group.

        Raises:
            DeadlineExceeded: it has not ended after ten seconds.
        """
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        async with deadline(self.name, "the end of its server", _STOP_SECONDS):
            await self._guard.wait()


class GivenServer:
    """A server at an address, which stretto neither starts nor stops."""

    def __init__(self, name: str, address: str, make: Make) -> None:
        self.name, self._address, self._make = name, address, make

    async def ended(self) -> RoleDied:
        """Wait until the server has not answered for 20 s; returns (does not raise) an error that says so."""
        return await _silence(f"the server {self._address}", self._make)

    async def stop(self) -> None:
        """Do nothing, because the server is managed elsewhere."""


Server = ServerProcess | GivenServer


async def until_ready(server: Server, make: Make, seconds: float) -> None:
    """Wait until the server accepts requests. `make`: client of the server.

    Raises:
        RoleDied: the server ended instead, or (at a given address) did not answer for 20 s.
        DeadlineExceeded: it did not accept requests within `seconds`.
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
    """Wait until a ready server has ended, or has not answered for 20 s (its workers may have died). Returns the error,
    and does not raise it. `make`: client of the server."""
    ends = [asyncio.create_task(server.ended()), asyncio.create_task(_silence(f"the server of {server.name}", make))]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_and_wait([*ends])


async def _silence(server: str, make: Make) -> RoleDied:
    silence, answers = StallTimer(_WATCH_SECONDS + LOOK_SECONDS), True
    while silence.poll(moved=answers) < _SILENT_SECONDS:
        await asyncio.sleep(_WATCH_SECONDS)
        answers = await make.ready()
    return RoleDied(server, f"does not answer for {_SILENT_SECONDS:g} s")


async def _answers(make: Make) -> None:
    while not await make.ready():
        await asyncio.sleep(_LOOK_SECONDS)


def _changed(environment: Mapping[str, str]) -> list[str]:
    """Arguments of the command ``env`` that set a server's environment. Variables are removed that would make the
    server's interpreter find packages of this one, or keep it from writing bytecode (each start would take minutes)."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return [word for name in ours for word in ("-u", name)] + [f"{name}={value}" for name, value in environment.items()]
