"""The conductor's view of a machine that has joined: its agent, its places, and the roles in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stretto.core.deadlines import deadline, standstill
from stretto.core.errors import UNREADABLE, DeadlineExceeded, MachineLost, RoleDied, WireError
from stretto.core.events import Span
from stretto.core.tasks import first_of
from stretto_cluster.messages import (
    Beat,
    Dismissed,
    Echo,
    FromAgent,
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
    StartRole,
    StopRole,
)
from stretto_cluster.wire import Wire

SILENT_SECONDS = 4.0  #: seconds without a message (several heartbeats) after which a machine counts as silent
_START_SECONDS = 90.0  # a fork server, which imports first, is given up after 60, and an interpreter starts the role
_END_SECONDS = 10.0
_MOST_PULLS = 64  # spans that wait to be taken, once a second: a machine says what it likes, as often as it likes
_MOST_LOG = 64 << 20  # bytes of a role's log, so that a machine cannot fill the conductor's disk


class JoinedMachine:
    """A machine that has joined, with its places and roles.

    Futures: `prepared` is done when the machine has the model, `leaving` (why) when it asks to leave, `lost` (how, or
    why it left) when it is gone. `mirrored`: version that it pulled last, -1 for none. `clock_offset`: this
    machine's clock minus its own, in seconds.
    """

    def __init__(self, name: str, join: Join, wire: Wire[FromAgent], folder: Path) -> None:
        """Prepare for a machine that has introduced itself with `join` on the connection `wire`; `serve` must be called
        for it. `folder`: where the logs of its roles are written."""
        self.name, self.kind, self.host = name, join.kind, join.host
        self.clock_offset = 0.0
        self.mirrored = -1
        self.moved = 0  # bytes that its mirror has received or checked
        self.dismissed = False
        self.spans: list[Span] = []  # spans of its pulls that nobody has taken yet
        self.places: tuple[RolePlace, ...] = ()
        self.model = self.mailbox_folder = ""
        self.reference: str | None = None
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.prepared: asyncio.Future[None] = loop.create_future()
        self.leaving: asyncio.Future[str] = loop.create_future()
        self._count, self._heard = join.count, time.monotonic()
        self._wire, self._folder = wire, folder
        self._arrived = asyncio.Event()
        self._roles: dict[int, RemoteProcess] = {}
        self._logs: dict[str, Path] = {}  # by role; that of a role that was replaced in its place may still arrive

    async def serve(self, lease: float) -> str:
        """Handle messages of the agent until its connection ends or it is silent for `lease` seconds. Then mark the
        machine as lost, and return how it was lost."""
        try:
            how = await self._wire.take_all(self._take, lease)
        except (WireError, *UNREADABLE) as error:
            how = f"sent what no agent sends ({error})"
        self.mark_lost(how)
        return how

    def mark_lost(self, how: str) -> None:
        """Mark the machine as lost, unless it is already; `how` says why."""
        if not self.lost.done():
            self.lost.set_result(how)

    @property
    def silence(self) -> float:
        """Seconds since the last message of the machine."""
        return time.monotonic() - self._heard

    def _take(self, message: FromAgent) -> None:
        self._heard = time.monotonic()
        match message:
            case Beat(sent, clock_offset, moved):
                self.clock_offset, self.moved = clock_offset, moved
                self._wire.send(Echo(sent=sent, now=time.monotonic()))
            case MachineReady(places, model, mailbox_folder, reference):
                if self.prepared.done() or len(places) != self._count:
                    raise WireError(f"{len(places)} places; it has offered {self._count}, once")
                self.places, self.model, self.mailbox_folder = places, model, mailbox_folder
                self.reference = reference
                self.prepared.set_result(None)
            case Mirrored(version):
                now = time.monotonic()
                start = now - message.seconds
                if version > self.mirrored and len(self.spans) < _MOST_PULLS:
                    pull = Span(self.name, "pull", start=start, end=now, version=version, bytes=message.size)
                    self.spans.append(pull)
                self.mirrored = version
                self._arrived.set()
            case RoleStarted(place, turn):
                self._role(place).note_started(turn)
            case RoleEnded(place):
                self._role(place).note_ended(message)
            case LogText(name, text):
                self._append(name, text)
            case Leaving(why):
                if not self.leaving.done():
                    self.leaving.set_result(why)

    def _role(self, place: int) -> RemoteProcess:
        if place not in self._roles:
            raise WireError(f"place {place}, in which nothing was started")
        return self._roles[place]

    def _append(self, name: str, text: str) -> None:
        if name not in self._logs:
            raise WireError(f"the log of {name!r}, which it does not run")
        with contextlib.suppress(OSError), self._logs[name].open("a", encoding="utf-8", errors="replace") as log:
            if log.tell() < _MOST_LOG:
                log.write(text)  # a full disk is reported elsewhere, and must not cost the machine
                if log.tell() >= _MOST_LOG:
                    log.write(f"\n(its machine has more of this log: {_MOST_LOG:,} bytes are kept here)\n")

    def publish(self, version: int) -> None:
        """Tell the machine that `version` can be pulled."""
        self._wire.send(NewVersion(version=version))

    async def until_mirrored(self, version: int, seconds: float) -> int:
        """Wait until the machine has pulled `version` or a newer one; return the version that it has pulled last.

        Raises:
            MachineLost: the machine was lost.
            DeadlineExceeded: no byte arrived there for `seconds`.
        """
        async with standstill("conductor", f"{self.name} to pull version {version}", seconds, self._so_far):
            while self.mirrored < version:
                self._arrived.clear()
                arrived = asyncio.ensure_future(self._arrived.wait())
                try:
                    await first_of(arrived, self.lost)
                finally:
                    arrived.cancel()
                if self.lost.done():
                    raise MachineLost(self.name, self.lost.result())
        return self.mirrored

    async def _so_far(self) -> int:
        return self.moved

    @property
    def stays(self) -> bool:
        """Whether roles can still be started on the machine."""
        return not (self.lost.done() or self.leaving.done() or self.dismissed)

    def role(self, place: int, name: str, module: str, environment: Mapping[str, str]) -> RemoteProcess:
        """Create the handle of a role's process (the Python `module`, with further variables in its `environment`) in a
        place of the machine, and the local file of its log, if there is none. Nothing is started."""
        turn = self._roles[place].turn if place in self._roles else 0  # late words of an earlier role are known by it
        process = RemoteProcess(self, place, name, module, self._folder / f"{name}.txt", environment, turn)
        self._roles[place] = process
        self._logs[name] = process.log
        process.log.touch()
        return process

    def send(self, order: StartRole | StopRole | KillRole) -> None:
        self._wire.send(order)

    def dismiss(self, why: str, again: bool = False) -> None:
        """Dismiss the machine with the reason `why`: its agent ends or, with `again`, tries to join later. Does not
        wait for that."""
        self.dismissed = True
        self._wire.send(Dismissed(why=why, again=again))


class RemoteProcess:
    """A role's process on another machine, with the interface of `processes.role.RoleProcess`. `log`: the local copy of
    its log. `turn`: number of starts in its place so far, those of earlier roles included."""

    def __init__(
        self,
        machine: JoinedMachine,
        place: int,
        name: str,
        module: str,
        log: Path,
        environment: Mapping[str, str],
        turn: int,
    ) -> None:
        self.name, self.log, self.turn = name, log, turn
        self._machine, self._place, self._module, self._environment = machine, place, module, dict(environment)
        self._started: asyncio.Future[None] | None = None
        self._end: asyncio.Future[RoleEnded] | None = None

    @property
    def clock_offset(self) -> float:
        """Clock of this machine minus clock of its machine, in seconds."""
        return self._machine.clock_offset

    @property
    def pids(self) -> tuple[int, ...]:
        """Always empty: the process is on another machine, so its id means nothing here."""
        return ()

    @property
    def running(self) -> bool:
        """Whether the process was ordered to start, and neither its end nor the loss of its machine is known."""
        return self._end is not None and not self._end.done() and not self._machine.lost.done()

    @property
    def killed(self) -> bool:
        """Whether the process has ended, by a signal."""
        return self._end is not None and self._end.done() and self._end.result().killed

    def loaded(self) -> int:
        """Return 0: the agent does not tell its memory."""
        return 0

    async def start(self, spec: msgspec.Struct, threads: int) -> None:
        """Order the start of the process with this spec and number of threads; returns when the agent has reported it.

        Raises:
            RoleDied: its machine cannot start it.
            MachineLost: the machine is lost.
            DeadlineExceeded: its agent did not start it in time.
        """
        if self._machine.lost.done():
            raise MachineLost(self._machine.name, self._machine.lost.result())
        loop = asyncio.get_running_loop()
        started, self._end = loop.create_future(), loop.create_future()
        self._started = started
        self.turn += 1
        order = StartRole(
            place=self._place,
            turn=self.turn,
            name=self.name,
            module=self._module,
            spec=msgspec.json.encode(spec),
            threads=threads,
            environment=self._environment,
        )
        self._machine.send(order)
        async with deadline("conductor", f"{self._machine.name} to start {self.name}", _START_SECONDS):
            await first_of(started, self._end, self._machine.lost)
        if not started.done():
            raise RoleDied(self.name, f"cannot be started: {await self.ended()}", str(self.log))

    def note_started(self, turn: int) -> None:
        """Note that the agent has reported the start with number `turn`; ignored if a later start was ordered."""
        if turn == self.turn and self._started is not None and not self._started.done():
            self._started.set_result(None)

    def note_ended(self, end: RoleEnded) -> None:
        """Note that the agent has reported the `end` of the process; ignored for that of an earlier start."""
        if end.turn == self.turn and self._end is not None and not self._end.done():
            self._end.set_result(end)

    async def ended(self) -> str:
        """Wait for the end of the process, after `start`; return how it ended. There is no deadline.

        Raises:
            MachineLost: the machine is lost.
        """
        assert self._end is not None, "start() comes first"
        await first_of(self._end, self._machine.lost)
        if not self._end.done():
            raise MachineLost(self._machine.name, self._machine.lost.result())
        return self._end.result().how

    async def stop(self, grace: float) -> None:
        """Order SIGTERM for the process, then SIGKILL after `grace` seconds. Returns when the process is gone or its
        machine is lost, ten seconds after the SIGKILL without a reply of the agent, or at once if none is running."""
        if self.running:
            self._machine.send(StopRole(place=self._place, grace=grace))
            try:
                async with deadline("conductor", f"{self.name} to end", grace + _END_SECONDS):
                    await self.ended()
            except (MachineLost, DeadlineExceeded):
                return  # if the agent does not reply, it ends the process when its lease is over

    def kill(self) -> None:
        """Order SIGKILL for the process, if it is running, and do not wait. Does nothing if the machine is silent:
        after a network partition, a late order would kill a healthy role. If the machine stays silent, its lease ends
        the role."""
        if self.running and self._machine.silence < SILENT_SECONDS:
            self._machine.send(KillRole(place=self._place))
