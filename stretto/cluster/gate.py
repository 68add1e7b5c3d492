"""The conductor's gate: where other machines join a run, and commands reach it.

    agent ──handshake: token, release, run─► gate ─RunTerms─► agent ─MachineReady─► JoinedMachine ─► its roles start
    stretto scale ──────handshake──────────► gate ──Answer──►

A caller without the token is told that it is wrong, and nothing else; one of another run or release is told which.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto import __version__
from stretto.cluster.machine import JoinedMachine
from stretto.cluster.messages import FROM_AGENT, FROM_CALLER, Answer, FromAgent, Join, RunTerms, Scale
from stretto.cluster.wire import Wire
from stretto.core.errors import DeadlineExceeded, HandshakeRefused, Problem, RecipeError
from stretto.core.frames import frame
from stretto.core.tasks import cancel_and_wait
from stretto.processes.handshake import admit
from stretto.processes.tls import server_context

_HANDSHAKE_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_MOST_CALLERS = 4096  # at the gate at one time


@dataclass(frozen=True)
class Doors:
    """What the run does with callers.

    Attributes:
        kinds: of roles that may join; and why others may not.
        terms: those of the run, now.
        joined: takes a machine whose model is there.
        scale: carries out `stretto scale`; its sentence, or a StrettoError.
    """

    terms: Callable[[], RunTerms]
    joined: Callable[[JoinedMachine], None]
    scale: Callable[[int], Awaitable[str]]
    say: Callable[[str], None]
    logs: Path
    refuses: Callable[[str], str] = lambda kind: ""


class Gate:
    """See the module."""

    def __init__(self, run: str, token: str, doors: Doors) -> None:
        self._run, self._token, self._doors = run, token, doors
        self._servers: list[asyncio.Server] = []
        self._callers: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self.machines: dict[str, JoinedMachine] = {}

    async def open(self, listen: str, tls: str = "") -> str:
        """Listen at ``host:port`` or ``unix:/path``, as often as wanted; returns the address, with its port.

        Raises:
            RecipeError: the address cannot be had.
        """
        host, _, port = listen.rpartition(":")
        try:
            if listen.startswith("unix:"):
                self._servers.append(await asyncio.start_unix_server(self._greet, listen.removeprefix("unix:")))
                return listen
            server = await asyncio.start_server(
                self._greet, host or "0.0.0.0", int(port), ssl=server_context(tls), backlog=_MOST_CALLERS
            )
        except (OSError, ValueError) as error:
            found = (error.strerror if isinstance(error, OSError) else None) or str(error)
            remedy = "give host:port of this machine, with a free port"
            raise RecipeError([Problem(f"cluster.listen: {listen!r}", found, remedy)]) from None
        self._servers.append(server)
        return f"{host or '0.0.0.0'}:{server.sockets[0].getsockname()[1]}"

    def publish(self, version: int) -> None:
        """Tell every machine that a version can be pulled."""
        for machine in self.machines.values():
            machine.publish(version)

    async def close(self, why: str, again: bool = False) -> None:
        """Dismiss every machine, and take no more callers; `again`: the run may go on later."""
        for server in self._servers:
            server.close()
        for machine in self.machines.values():
            machine.dismiss(why, again)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while self.machines:
                    await asyncio.wait([machine.lost for machine in self.machines.values()])
                    await asyncio.sleep(0)
        await cancel_and_wait([*self._callers])

    def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._callers) >= _MOST_CALLERS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._callers.add(task)
        task.add_done_callback(self._callers.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername") or "a command")
        ours = self._run.encode()
        try:
            said = await admit(reader, writer, self._token, ours, self._why_not, peer=peer, seconds=_HANDSHAKE_SECONDS)
        except HandshakeRefused as refused:
            if not str(refused).endswith("during the handshake"):  # a port scanner says nothing
                self._doors.say(f"turned away at the gate: {refused}")
            writer.transport.abort()
            return
        except DeadlineExceeded:
            writer.transport.abort()
            return
        match FROM_CALLER.decode(said):
            case Join() as join:
                wire: Wire[FromAgent] = Wire(f"{join.host} ({peer})", reader, writer, FROM_AGENT)
                await self._host(join, wire)
            case Scale(engines):
                await self._scale(engines, writer)

    def _why_not(self, introduction: bytes) -> str:
        try:
            caller = FROM_CALLER.decode(introduction)
        except msgspec.MsgspecError as error:
            return f"the introduction cannot be read: {error}"
        if caller.release != __version__:
            return (
                f"you have stretto {caller.release}, and the run has {__version__}: install the same on every machine"
            )
        if isinstance(caller, Join):
            if caller.run not in ("", self._run):
                return f"you have joined run {caller.run} before, and this is run {self._run}: start a new agent for it"
            return self._doors.refuses(caller.kind)
        return ""

    async def _host(self, join: Join, wire: Wire[FromAgent]) -> None:
        name = f"{join.host}-{next(self._numbers)}"
        machine = JoinedMachine(name, join, wire, self._doors.logs)
        terms = self._doors.terms()
        wire.send(terms)
        self.machines[name] = machine
        prepared = asyncio.create_task(self._introduce(machine))
        try:
            await machine.serve(terms.lease)
        finally:
            prepared.cancel()
            del self.machines[name]
            if not machine.lost.done():
                machine.lost.set_result("was cut off")

    async def _introduce(self, machine: JoinedMachine) -> None:
        """Hand a machine over once its model is there; the lease bounds the wait for one that has gone."""
        await machine.prepared.wait()
        self._doors.joined(machine)

    async def _scale(self, engines: int, writer: asyncio.StreamWriter) -> None:
        try:
            answer = Answer(text=await self._doors.scale(engines))
        except RecipeError as refused:
            answer = Answer(text=str(refused), done=False)
        with contextlib.suppress(OSError):
            writer.write(frame(answer))
            await writer.drain()
            writer.close()
