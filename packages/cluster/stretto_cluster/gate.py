"""Gate: the port of the conductor at which machines join a run and commands arrive.

    agent ──handshake: token, release, run─► gate ─RunTerms─► agent ─MachineReady─► JoinedMachine ─► its roles start
    stretto scale ──────handshake──────────► gate ──Answer──►
    another conductor ──handshake──────────► gate ──Tenure──►

A caller with a wrong token learns only that the token is wrong. A caller of another run or release is told the run's
own. The number of callers that have not shown the token is bounded: a new one replaces the one silent for longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from stretto import __version__
from stretto.core.errors import UNREADABLE, DeadlineExceeded, HandshakeBroken, HandshakeRefused, StrettoError, several
from stretto.core.tasks import cancel_and_wait, first_of
from stretto.loop.records.totals import Tenure
from stretto.processes.http.tls import server_context
from stretto_cluster.address import bound
from stretto_cluster.machine import JoinedMachine
from stretto_cluster.messages import (
    FROM_AGENT,
    FROM_CALLER,
    LARGEST_WORDS,
    Answer,
    Dismissed,
    FromAgent,
    Join,
    Look,
    RunTerms,
    Scale,
)
from stretto_cluster.wire import Reception, Wire

_LEAVE_SECONDS = 5.0
_BACKLOG = 4096
_MOST_PLACES = 1024  # most places of one machine
_QUIET_SECONDS = 10.0  # least seconds between two log lines about refused callers


@dataclass(frozen=True)
class Doors:
    """Callbacks of a `Gate`, the port at which machines join a run.

    Attributes:
        terms: returns the current terms of the run.
        joined: called with each machine that has joined and has the model; may raise StrettoError, ValueError or
            OSError for one that cannot be used, which is then dismissed.
        scale: carries out `stretto scale` for this number of engines; returns a sentence, or raises StrettoError.
        say: takes a sentence for the log.
        logs: folder for the logs of roles on other machines.
        refuses: returns why a machine may not join; "" if it may.
        superseded: called with epoch and address ("" if unknown) of a newer conductor of the run.
    """

    terms: Callable[[], RunTerms]
    joined: Callable[[JoinedMachine], None]
    scale: Callable[[int], Awaitable[str]]
    say: Callable[[str], None]
    logs: Path
    superseded: Callable[[int, str], None]
    refuses: Callable[[Join], str] = lambda join: ""


class Gate:
    """Listener for machines, commands, and other conductors of the `run`, which prove its `token`. `machines`:
    connected machines by name."""

    def __init__(self, run: str, token: str, doors: Doors) -> None:
        self._run, self._token, self._doors = run, token, doors
        self._servers: list[asyncio.Server] = []
        self._callers: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._unsaid, self._quiet_until = 0, 0.0
        self.machines: dict[str, JoinedMachine] = {}

    async def open(self, listen: str, tls: str = "") -> str:
        """Listen at ``host:port`` or ``unix:/path``, beside the addresses of earlier calls; return the address with the
        actual port. `tls`: folder of certificates; "": no TLS.

        Raises:
            RecipeError: the address is malformed or cannot be bound, or a TLS file is missing or invalid.
            OSError: the Unix path cannot be bound.
        """
        if listen.startswith("unix:"):
            greet = self._greeting(None)
            self._servers.append(await asyncio.start_unix_server(greet, listen.removeprefix("unix:")))
            return listen
        greet, reserved = self._greeting(server_context(tls)), bound(listen)
        self._servers.append(await asyncio.start_server(greet, sock=reserved, backlog=_BACKLOG))
        return f"{listen.rpartition(':')[0] or '0.0.0.0'}:{reserved.getsockname()[1]}"

    def publish(self, version: int) -> None:
        """Tell every connected machine that `version` can be pulled."""
        for machine in self.machines.values():
            machine.publish(version)

    async def close(self, why: str, again: bool = False) -> None:
        """Stop listening, dismiss every machine, wait until all have left, 5 s at most, and close the connections of
        all other callers. `why`: the reason that machines get; `again`: they may try to join later, because the run may
        be resumed."""
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

    # ── callers ──────────────────────────────────────────────────────────────────────────────────

    def _greeting(self, context: ssl.SSLContext | None) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        reception = Reception(self._token, context)

        def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reception.comes(writer)
            task = asyncio.create_task(self._serve(reader, writer, reception))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

        return greet

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reception: Reception) -> None:
        name = writer.get_extra_info("peername")
        peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a command"
        wire: Wire[FromAgent] = Wire(reader, writer, FROM_AGENT, LARGEST_WORDS)
        try:
            said = await reception.admit(reader, writer, self._run.encode(), self._why_not, peer)
            match FROM_CALLER.decode(said):
                case Join() as join:
                    await self._host(join, wire)
                case Scale(engines):
                    wire.send(await self._scaled(engines))
                case Look(_, tenure, address):
                    self._gives_way(tenure, address)
                    wire.send(self._doors.terms().tenure)
            await wire.close()
        except (HandshakeBroken, DeadlineExceeded, OSError):
            return  # a port scanner, say, which sent nothing
        except HandshakeRefused as refused:
            self._turned_away(refused)
            await wire.close()
        finally:
            wire.cut()

    def _turned_away(self, refused: HandshakeRefused) -> None:
        """Log a refusal, and the number of earlier ones that were not logged, at a limited rate."""
        self._unsaid += 1
        if (now := time.monotonic()) >= self._quiet_until:
            more = f", and {several(self._unsaid - 1, 'caller')} before it" if self._unsaid > 1 else ""
            self._unsaid, self._quiet_until = 0, now + _QUIET_SECONDS
            self._doors.say(f"turned away at the gate: {refused}{more}")

    def _why_not(self, introduction: bytes) -> str:
        try:
            caller = FROM_CALLER.decode(introduction)
        except UNREADABLE as error:
            return f"the introduction cannot be read: {error}"
        if isinstance(caller, Look):
            return "" if caller.run == self._run else f"this is run {self._run}"
        if caller.release != __version__:
            return (
                f"you have stretto {caller.release}, and the run has {__version__}: install the same on every machine"
            )
        if isinstance(caller, Join):
            if caller.run not in ("", self._run):
                return f"you have joined run {caller.run} before, and this is run {self._run}: start a new agent for it"
            if not 0 < caller.count <= _MOST_PLACES:
                return f"a machine has 1 to {_MOST_PLACES} places, not {caller.count}"
            return self._doors.refuses(caller)
        return ""

    # ── admitted callers ─────────────────────────────────────────────────────────────────────────

    def _gives_way(self, other: Tenure | None, address: str = "") -> bool:
        """Whether `other` is newer than this conductor's tenure. If so, `superseded` was called with its `address`, and
        this conductor ends. False for None."""
        if other is None or other <= self._doors.terms().tenure:
            return False
        self._doors.superseded(other.epoch, address)
        return True

    async def _host(self, join: Join, wire: Wire[FromAgent]) -> None:
        if self._gives_way(join.served):
            wire.send(Dismissed(why="is an older conductor than the one that this machine has served", again=True))
            return
        name = f"{join.host}-{next(self._numbers)}"
        machine = JoinedMachine(name, join, wire, self._doors.logs)
        terms = self._doors.terms()
        wire.send(terms)
        self.machines[name] = machine
        prepared = asyncio.create_task(self._introduce(machine))
        try:
            await machine.serve(terms.lease)
        finally:
            await cancel_and_wait([prepared])
            del self.machines[name]
            machine.mark_lost("was cut off")

    async def _introduce(self, machine: JoinedMachine) -> None:
        """Pass a machine to `joined` once it has the model. A machine that asks to leave before, or that `joined` finds
        unusable, is dismissed instead. The machine's lease bounds the wait."""
        await first_of(machine.prepared, machine.leaving)
        if not machine.prepared.done():
            machine.dismiss(machine.leaving.result())
            return
        try:
            self._doors.joined(machine)
        except (StrettoError, ValueError, OSError) as error:  # its messages describe no usable engine
            self._doors.say(f"{machine.name} cannot be used: {error}")
            machine.dismiss(str(error))

    async def _scaled(self, engines: int) -> Answer:
        try:
            return Answer(text=await self._doors.scale(engines))
        except StrettoError as refused:
            return Answer(text=str(refused), done=False)
