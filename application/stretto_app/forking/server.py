"""Fork server: a process that has imported the roles' modules and forks to start a role in milliseconds, not seconds.

    command ── Spawn, a wire ──► fork server ── fork ──► engine, trainer, warm start
       ▲                              │                              │
       └────── Exited, on the wire ───┴──── Spawned, on the wire ────┘

Each child has a wire of its own. The server kills a child when the command closes the wire. If the other side closes
it, the fork server has ended; the kernel kills its children with it, and further roles start in fresh interpreters.
The server is a forked copy of the command, which has imported the modules of its roles before (see
`forking.role`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import DeadlineExceeded
from stretto.core.machine import gpus_hidden
from stretto.core.records import Record
from stretto.core.tasks import cancel_and_wait
from stretto.processes.heartbeat import PARENT
from stretto.processes.kernel import end_of, send_signal
from stretto.processes.spawn import FRESH, RunningProcess, Spawn, environment
from stretto.processes.tree import cpu_ticks

ROLES = ("stretto.engine.role", "stretto.trainer.roles.trainer", "stretto.trainer.roles.supervised")
LONGEST_MESSAGE = 1 << 18
COMMAND_LINE_BYTES = 8192  # children write their command line over the server's, for `ps`
_START_SECONDS = 60.0
_STALL_SECONDS = 5.0  # without CPU use, after which the server counts as hanging
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.01
_EXIT_CODE_SECONDS = 2.0
_END_SECONDS = 5.0
_ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class Spawned(Record, frozen=True, tag=True):
    """Reply: the child has started, with this process id."""

    pid: int


class NotSpawned(Record, frozen=True, tag=True):
    """Reply: the child could not be started; `number` is the system's `errno`."""

    number: int
    problem: str


class Exited(Record, frozen=True, tag=True):
    """Reply: the child has ended; `code` is its exit code, or minus the number of the signal."""

    code: int


_REPLY: msgspec.msgpack.Decoder[Spawned | NotSpawned | Exited] = msgspec.msgpack.Decoder(Spawned | NotSpawned | Exited)


def accelerated() -> bool:
    """Whether this machine has a GPU of NVIDIA or AMD, by its device file, that `CUDA_VISIBLE_DEVICES` does not
    hide."""
    return not gpus_hidden() and any(path.exists() for path in _ACCELERATORS)


class ForkedHere:
    """Handle of a fork server that is a forked copy of this process (made by `forking.role.fork_here`): `pid`, `kill`
    and `wait`, as `ForkServer` uses them of a `subprocess.Popen`. `wait` returns no exit code."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def kill(self) -> None:
        if not self._ended:  # its number may be another process's by now
            with contextlib.suppress(ProcessLookupError):  # as in `wait`
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        if self._ended:
            return
        try:
            descriptor = end_of(self.pid)
        except ProcessLookupError:  # as below
            self._ended = True
            return
        try:
            if not select.select([descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        finally:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored the kernel has reaped it
            os.waitpid(self.pid, 0)
        self._ended = True


#: The process of a fork server.
Forking = subprocess.Popen[bytes] | ForkedHere


class ForkServer:
    """Client of a fork server: starts processes by forking (satisfies `spawn.Spawner`)."""

    def __init__(self, modules: Sequence[str] = ROLES, running: tuple[socket.socket, Forking] | None = None) -> None:
        """Use a running fork server, or start one.

        Args:
            modules: modules for a new server to import.
            running: the wire to an existing server, and its process; None: a server is started.

        Raises:
            OSError: the system has no room for a new one.
        """
        self._usable = True
        self._children: set[ForkedProcess] = set()
        self._wire, self._process = running or self._started(modules)

    @staticmethod
    def _started(modules: Sequence[str]) -> tuple[socket.socket, Forking]:
        wire, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.setblocking(False)
        with contextlib.ExitStack() as undo, far:
            undo.callback(wire.close)
            process = subprocess.Popen(
                [sys.executable, "-m", "stretto_app.forking.role", str(far.fileno()), " " * COMMAND_LINE_BYTES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # if it fails, a fresh interpreter starts the role, or logs why not
                env=environment(1) | {PARENT: str(os.getpid())},
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            wire.send(msgspec.msgpack.encode(tuple(modules)))
            undo.pop_all()
        return wire, process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, spawn: Spawn) -> RunningProcess:
        """Start a process in its own session, by a fork of the server; in a fresh interpreter if the server has ended
        or hangs. A server that hangs is used no more. It is killed once it has no children, because they would end with
        it.

        Raises:
            OSError: the system has no room for the process, or its log cannot be written.
        """
        if self._usable:
            try:
                return await self._fork(spawn)
            except ConnectionError:
                self.close()
            except DeadlineExceeded:
                self._usable = False
                self._close_if_empty()
        return await FRESH.start(spawn)

    def describe_end(self, process: RunningProcess) -> str:
        if isinstance(process, ForkedProcess) and process.orphaned:
            return "ended with the process that it was forked from (stretto_app.forking.role)"
        return FRESH.describe_end(process)

    async def _fork(self, spawn: Spawn) -> ForkedProcess:
        with contextlib.ExitStack() as undo:
            wire, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(wire.close)
            wire.setblocking(False)
            with far:
                await self._send(msgspec.msgpack.encode(spawn), [far.fileno(), *spawn.inherited])
            match await self._reply(wire):
                case NotSpawned(number, problem):
                    raise OSError(number, problem)
                case Exited(code):
                    raise OSError(f"the forked process ended with exit code {code}")
                case Spawned(pid):
                    process = ForkedProcess(pid, wire)
                    undo.pop_all()
                    self._children.add(process)
                    process.on_end(lambda: self._left(process))
                    return process

    async def _send(self, order: bytes, descriptors: Sequence[int]) -> None:
        """Send an order; waits while the wire is full, as when many roles start at once. Raises ConnectionError if the
        server has ended, DeadlineExceeded if it hangs."""
        async with deadline("conductor", "the fork server to take an order", _START_SECONDS):
            while self._usable:
                with contextlib.suppress(BlockingIOError):
                    socket.send_fds(self._wire, [order], descriptors)
                    return
                await asyncio.sleep(_PAUSE_SECONDS)
        raise DeadlineExceeded("conductor", "the fork server to take an order", _STALL_SECONDS)  # others found it hang

    async def _reply(self, wire: socket.socket) -> Spawned | NotSpawned | Exited:
        """Wait for the first message about a child, on its `wire`, and return it.

        Raises:
            ConnectionError: the server has ended.
            DeadlineExceeded: the server hangs (no CPU use for five seconds), or takes more than a minute.
        """
        awaited = "the fork server to start a process"
        message = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(wire, LONGEST_MESSAGE))
        stall, ticks = StallTimer(_POLL_SECONDS), 0
        try:
            async with deadline("conductor", awaited, _START_SECONDS):
                while not message.done():
                    await asyncio.wait([message], timeout=_POLL_SECONDS)
                    before, ticks = ticks, cpu_ticks(self.pid)
                    if not message.done() and stall.poll(moved=ticks != before) > _STALL_SECONDS:
                        raise DeadlineExceeded("conductor", awaited, _STALL_SECONDS)
        finally:
            await cancel_and_wait([message])
        if not message.result():
            raise ConnectionResetError("the fork server has ended")
        return _REPLY.decode(message.result())

    def _left(self, child: ForkedProcess) -> None:
        self._children.discard(child)
        self._close_if_empty()

    def _close_if_empty(self) -> None:
        if not (self._usable or self._children):
            self.close()

    def close(self) -> None:
        """Kill the server, and wait up to 5 seconds for its end; the kernel kills its children with it."""
        self._usable = False
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self._process.wait(_END_SECONDS)
        self._wire.close()


class ForkedProcess:
    """A child of the fork server, as a `spawn.RunningProcess`; made in an event loop. A pidfd reports its end, the
    server its exit code. If the server does not send the code within 2 seconds, the child counts as killed by
    SIGKILL."""

    def __init__(self, pid: int, wire: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.orphaned = False  # it ended with the server
        self._descriptor = -1
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._descriptor = end_of(pid)
        self._ended = asyncio.create_task(self._wait(wire), name=f"wait for process {pid}")

    async def _wait(self, wire: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def note() -> None:
            loop.remove_reader(self._descriptor)
            gone.set()

        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, note)
        else:
            gone.set()
        message = asyncio.ensure_future(loop.sock_recv(wire, LONGEST_MESSAGE))
        end = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([message], timeout=_EXIT_CODE_SECONDS)
            said = message.result() if message.done() else None
        except ConnectionError:
            said = b""
        finally:
            await cancel_and_wait([message, end])
            if self._descriptor >= 0:
                loop.remove_reader(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1
            wire.close()
        self.orphaned = said == b""
        ended = _REPLY.decode(said) if said else None
        self.returncode = ended.code if isinstance(ended, Exited) else -signal.SIGKILL
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def on_end(self, act: Callable[[], None]) -> None:
        """Have `act` called by the event loop once the process has ended, also if it has already."""
        self._ended.add_done_callback(lambda ended: act())

    def terminate(self) -> None:
        if self._descriptor >= 0:
            send_signal(self._descriptor, signal.SIGTERM)
