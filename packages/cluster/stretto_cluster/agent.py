"""Agent of a machine in a run: join, mirror model and weights, and start roles on orders of the conductor.

    gate ──NewVersion──► agent ──► mirror ──► the machine's shared memory ──► its engines
    gate ──StartRole───► agent ──► the role's process ──logs, its end──► gate

The lease limits silence on both sides. An agent that hears nothing from the gate for that long ends its roles, which
the conductor has given up by then, and joins again.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from stretto import __version__
from stretto.core.deadlines import deadline
from stretto.core.errors import (
    UNREADABLE,
    DeadlineExceeded,
    HandshakeBroken,
    HandshakeRefused,
    MachineLost,
    Problem,
    RecipeError,
    RoleDied,
    SourceLost,
    TornPublication,
    WireError,
)
from stretto.core.tasks import NamedTasks, cancel_and_wait, to_the_end
from stretto.processes.http.tls import client_context
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawner
from stretto.weights.folder import release
from stretto_cluster.address import speaks_tls
from stretto_cluster.handshake import call
from stretto_cluster.messages import (
    AGENTS_TLS,
    LARGEST_WORDS,
    LONGEST_REASON,
    TO_AGENT,
    Beat,
    Dismissed,
    Echo,
    Join,
    KillRole,
    Leaving,
    LogText,
    MachineReady,
    Mirrored,
    NewVersion,
    RoleEnded,
    RolePlace,
    RoleStarted,
    RunTerms,
    StartRole,
    StopRole,
    ToAgent,
)
from stretto_cluster.scratch import neighbours, own_folder, own_memory, sweeper
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.wire import Wire, connect

_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_BEAT_SECONDS = 1.0
_LOG_BYTES = 64 << 10  # most bytes of each role's log that go with a heartbeat
_LEAVE_SECONDS = 30.0
_REMEMBERED = 16  # newest round trips; the shortest one gives the clock offset
_UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Offer:
    """Offer of a machine to a run.

    Attributes:
        address: address of the gate; `token`: the token of the run.
        kind: kind of roles, "engine" or "rank"; `count`: how many at the same time.
        advertised: address at which others reach this machine; None: the local address of its connection to the gate.
        tls: folder of certificates, "" for none.
        patience: seconds to try to reach the gate, at first and after a loss.
        gpu: whether this machine has a GPU; `gpus`: how many it shows, 0 if unknown.
        environments: additional environment variables for each place, such as those that select its GPUs.
    """

    address: str
    token: str
    kind: str = "engine"
    count: int = 1
    advertised: str | None = None
    tls: str = ""
    patience: float = 600.0
    gpu: bool = False
    gpus: int = 0
    environments: tuple[Mapping[str, str], ...] = ()


@dataclass
class _Seat:
    """A place of the agent: a port reserved for its role, a folder, and the process of its newest role, ended or not;
    None before the first."""

    port: socket.socket
    scratch: Path
    process: RoleProcess | None = None


@dataclass
class _RoleLog:
    """The log of a role, in whatever place it runs. `told`: bytes of it that were sent to the conductor. `decoder`:
    keeps the beginning of a character."""

    told: int
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8("replace"))


async def run_agent(offer: Offer, say: Callable[[str], None], leave: asyncio.Event, spawner: Spawner = FRESH) -> str:
    """Join a run and serve it until it dismisses this machine; join again after a loss. Return why the work is over:
    the reason of the dismissal, or "left" if `leave` was set without one.

    `say` gets sentences for the user. `leave`, once set, asks the conductor to drain the roles and dismiss the machine.
    `spawner` starts the roles.

    Raises:
        HandshakeRefused: the run refuses this machine: another token, run or release.
        MachineLost: no run was joined, with its model, for `offer.patience` seconds.
        RecipeError: an address or a certificate is invalid.
    """
    here = socket.gethostname()
    join = Join(offer.kind, here, offer.count, release=__version__, gpu=offer.gpu, gpus=offer.gpus)
    since, told = time.monotonic(), ""
    while not leave.is_set():
        problem = ""
        try:
            session = await _Session.open(offer, join, say, spawner)
        except (MachineLost, DeadlineExceeded, HandshakeBroken, OSError) as error:
            problem = str(error)
        else:
            join = msgspec.structs.replace(join, run=session.terms.run, served=session.terms.tenure)
            end = await session.work(leave)
            if isinstance(end, Dismissed) and not end.again:
                return end.why
            lost = end.why if isinstance(end, Dismissed) else end
            if session.seats:
                since, told = time.monotonic(), ""
                say(f"the run was lost: {lost}; its roles were ended here")
            else:
                problem = f"{offer.address} was left before this machine was ready: {lost}"
        if problem and time.monotonic() - since > offer.patience:
            raise MachineLost(offer.address, f"was not joined in {offer.patience:g} s: {problem}")
        if problem not in ("", told):
            say(f"{problem}; asking again for {offer.patience:g} s")
        told = problem or told
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_SECONDS):
                await leave.wait()
    return "left"


@dataclass
class _Session:
    """One connection to the gate, from the handshake to its end. `held`: descriptors of the locks of `folder` and
    `memory` (of the weights). `mirror`: pulls the weights; None until it is made. `seats`: empty before the model is
    here. `logs`: by name, of all roles that ran here."""

    offer: Offer
    terms: RunTerms
    wire: Wire[ToAgent]
    say: Callable[[str], None]
    spawner: Spawner
    folder: Path
    memory: Path
    held: tuple[int, int]  # descriptors of locks that keep folder and memory from being removed
    sweeper: subprocess.Popen[bytes]
    seats: list[_Seat] = field(default_factory=list)
    logs: dict[str, _RoleLog] = field(default_factory=dict)
    clock_offset: float = 0.0
    _round_trips: list[tuple[float, float]] = field(default_factory=list)
    _wanted: int = -1
    mirror: Mirror | None = None
    _published: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: NamedTasks = field(default_factory=NamedTasks)

    @classmethod
    async def open(cls, offer: Offer, join: Join, say: Callable[[str], None], spawner: Spawner) -> _Session:
        """Connect to the gate and join its run. Raises MachineLost, DeadlineExceeded, HandshakeBroken or OSError if
        another attempt may succeed, else HandshakeRefused or RecipeError."""
        reader, writer = await connect(offer.address, client_context(offer.tls))
        gate = f"the run at {offer.address}"
        with contextlib.ExitStack() as undo:
            undo.callback(writer.transport.abort)
            ours = msgspec.msgpack.encode(join)
            try:
                await call(reader, writer, offer.token, ours, peer=gate, seconds=_HANDSHAKE_SECONDS)
            except HandshakeBroken:
                if not offer.tls and await speaks_tls(offer.address):
                    raise HandshakeRefused(gate, "speaks TLS, and this machine shows no certificate") from None
                raise
            wire = Wire(reader, writer, TO_AGENT, LARGEST_WORDS)
            async with deadline("the agent", f"the terms of {gate}", _HANDSHAKE_SECONDS):
                terms = await wire.receive()
            if not isinstance(terms, RunTerms):
                raise MachineLost(gate, terms.why if isinstance(terms, Dismissed) else "closed the connection")
            folder, lock = own_folder()
            undo.callback(os.close, lock)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            memory, held = own_memory(folder, terms)
            undo.callback(os.close, held)
            undo.callback(shutil.rmtree, memory, ignore_errors=True)
            session = cls(offer, terms, wire, say, spawner, folder, memory, (lock, held), sweeper(folder, memory))
            session._wish(terms.published)  # before any order, so that no newer version is overwritten
            undo.pop_all()
        return session

    async def work(self, leave: asyncio.Event) -> Dismissed | str:
        """Carry out the conductor's orders until it dismisses the machine (returns the dismissal), or the connection is
        lost (returns the reason as text). All roles have ended by then, and the temporary folders are removed. `leave`,
        once set, asks the conductor for a dismissal, and ends this after 30 s without one."""
        tasks: list[asyncio.Future[object]] = [
            asyncio.ensure_future(work)
            for work in (
                self._orders(),
                self.wire.watch(self.terms.lease),
                self._mirror(),
                self._beats(),
                self._tasks.watch(),
                self._leave(leave),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            end = done.pop().result()
            return end if isinstance(end, Dismissed) else str(end)
        except (WireError, SourceLost, OSError, DeadlineExceeded, *UNREADABLE) as error:
            return str(error)
        finally:
            await cancel_and_wait([*tasks])
            await to_the_end(self._end())

    async def _end(self) -> None:
        for seat in self.seats:
            if seat.process is not None:
                seat.process.kill()
        try:
            await self._tasks.close()
            for seat in self.seats:
                if seat.process is not None:
                    await seat.process.stop(0.0)
                seat.port.close()
            await self.wire.close()
        finally:
            self.sweeper.communicate()  # blocking is harmless: nothing else runs
            for descriptor in self.held:
                os.close(descriptor)

    # ── mirror ────────────────────────────────────────────────────────────────────────────────────

    async def _mirror(self) -> str:
        """Fetch the model, report the places where roles can start, then pull and report the newest version after each
        publication. Versions overtaken meanwhile are skipped; a failed pull is tried again. A rank pulls no versions,
        but fetches the reference model if the run has one. Never returns: runs until cancelled or until an error."""
        gate_host = self.offer.address.rpartition(":")[0]
        source = f"{gate_host}:{self.terms.weights_port}"
        terms = self.terms
        beside = partial(neighbours, self.memory)
        self.mirror = mirror = Mirror(
            source,
            terms.weights_key,
            terms.mailbox,
            self.memory,
            self.offer.tls,
            delta=terms.delta,
            seconds=terms.pull,
            beside=beside,
        )
        model, reference = await self._fetch(mirror, "model"), None
        if terms.reference and self.offer.kind == "rank":
            reference = await self._fetch(mirror, "reference")
        self._take_seats()
        memory = str(self.memory)
        places = tuple(RolePlace(address=self._address(seat), scratch=str(seat.scratch)) for seat in self.seats)
        self.wire.send(MachineReady(places=places, model=model, mailbox_folder=memory, reference=reference))
        joined = f"joined {terms.run} with {len(places)} {self.offer.kind}(s)"
        self.say(joined if self.offer.kind == "rank" else f"{joined}, which work as soon as they have its weights")
        if self.offer.kind == "rank":  # the trainer's own weights: a rank loads no version
            await asyncio.get_running_loop().create_future()  # until the session ends
        here, problem = -1, ""
        while True:
            await self._published.wait()
            self._published.clear()
            if (wanted := self._wanted) == here:
                continue
            try:
                pulled = await mirror.pull(wanted)
            except (TornPublication, SourceLost, DeadlineExceeded) as error:  # try again; its engines lag meanwhile
                if str(error) != problem:
                    problem = str(error)
                    self.say(f"version {wanted} is not here yet: {problem}")
                await self._look_again()
                continue
            except WireError:  # no longer published: the order for a newer version is on its way
                await self._look_again()
                continue
            here = wanted
            self.wire.send(Mirrored(version=wanted, size=pulled.bytes, seconds=pulled.seconds))

    async def _fetch(self, mirror: Mirror, kind: str) -> str:
        await mirror.fetch_model(self.folder / kind, lambda: [one / kind for one in neighbours(self.folder)], kind)
        return str(self.folder / kind)

    async def _look_again(self) -> None:
        """Wait a short time, or until another version is published. Afterwards `_published` is set, so that `_mirror`
        tries again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._published.wait()
        self._published.set()

    def _wish(self, version: int) -> None:
        if version > self._wanted:
            self._wanted = version
            self._published.set()

    def _take_seats(self) -> None:
        host = self.offer.advertised or self.wire.local_host
        for number in range(self.offer.count):
            port = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                port.bind((host, 0))
            except OSError as error:
                port.close()
                remedy = "give an address of this machine"
                raise RecipeError([Problem(f"--host {host}", error.strerror or str(error), remedy)]) from None
            scratch = self.folder / f"place-{number}"
            scratch.mkdir()
            self.seats.append(_Seat(port, scratch))

    @staticmethod
    def _address(seat: _Seat) -> str:
        host, port = seat.port.getsockname()[:2]
        return f"{host}:{port}"

    # ── orders ───────────────────────────────────────────────────────────────────────────────────

    async def _orders(self) -> Dismissed | str:
        while (order := await self.wire.receive()) is not None:
            match order:
                case Echo(sent, now):
                    self._tell_the_clock(sent, now)
                case NewVersion(version):
                    self._wish(version)
                case StartRole():
                    self._tasks.add(f"place {order.place}", self._play(order))
                case StopRole(place, grace):
                    self._tasks.add(f"stop {place}", self._stop(place, grace))
                case KillRole(place):
                    if (process := self._seat(place).process) is not None:
                        process.kill()
                case Dismissed():
                    return order
        return "closed its connection"

    def _seat(self, place: int) -> _Seat:
        if not 0 <= place < len(self.seats):
            raise WireError(f"an order for place {place}, of {len(self.seats)}")
        return self.seats[place]

    async def _play(self, order: StartRole) -> None:
        """Run one role, and report its start and its end to the gate. A role that still runs in its place is stopped
        first; at the end, the files by which it kept versions of the weights alive are removed."""
        seat = self._seat(order.place)
        if seat.process is not None:
            await seat.process.stop(0.0)
        log = self.folder / f"{order.name}.txt"
        if order.name not in self.logs:  # what is not sent yet of earlier logs follows with later heartbeats
            self.logs[order.name] = _RoleLog(log.stat().st_size if log.exists() else 0)
        seat.process = process = RoleProcess(order.name, order.module, log, self.terms.hung, self.spawner)
        own = self.offer.environments[order.place] if self.offer.environments else {}
        try:
            await process.start(self._spec(order), order.threads, environment=order.environment | dict(own))
            self.wire.send(RoleStarted(place=order.place, turn=order.turn))
            how = await process.ended()
        except RoleDied as death:
            how = death.how
        release(self.terms.mailbox, self.memory, seat.scratch.name)
        self._send_log(order.name)
        self.wire.send(RoleEnded(place=order.place, turn=order.turn, how=how[:LONGEST_REASON], killed=process.killed))

    def _spec(self, order: StartRole) -> msgspec.Raw:
        fields: dict[str, object] = msgspec.json.decode(order.spec)
        told = {name: self.offer.tls for name, value in fields.items() if value == AGENTS_TLS}
        return msgspec.Raw(msgspec.json.encode(fields | told))

    async def _stop(self, place: int, grace: float) -> None:
        if (process := self._seat(place).process) is not None:
            await process.stop(grace)

    async def _leave(self, leave: asyncio.Event) -> str:
        await leave.wait()
        self.wire.send(Leaving(why="its agent was asked to end"))
        await asyncio.sleep(_LEAVE_SECONDS)
        return "the conductor has not let it go"

    # ── heartbeats ───────────────────────────────────────────────────────────────────────────────

    async def _beats(self) -> str:
        while True:
            moved = self.mirror.moved if self.mirror is not None else 0
            self.wire.send(Beat(sent=time.monotonic(), clock_offset=self.clock_offset, moved=moved))
            for name in self.logs:
                self._send_log(name)
            await asyncio.sleep(min(_BEAT_SECONDS, self.terms.lease / 5))

    def _tell_the_clock(self, sent: float, theirs: float) -> None:
        """Estimate the offset of the gate's clock from `sent` and `theirs`, the times `sent` and `now` of an `Echo`.
        The shortest recent round trip counts; the error is at most half of it."""
        now = time.monotonic()
        self._round_trips = [*self._round_trips, (now - sent, theirs - (sent + now) / 2)][-_REMEMBERED:]
        self.clock_offset = min(self._round_trips)[1]

    def _send_log(self, name: str) -> None:
        """Send the next part of a role's log, if there is more of it."""
        known = self.logs[name]
        with contextlib.suppress(FileNotFoundError), (self.folder / f"{name}.txt").open("rb") as log:
            log.seek(known.told)
            if data := log.read(_LOG_BYTES):
                known.told += len(data)
                self.wire.send(LogText(name=name, text=known.decoder.decode(data)))
