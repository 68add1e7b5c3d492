"""A process that has imported what roles import, and forks when one is to be started: milliseconds instead of seconds.

    command ──Birth──► nursery ──fork──► engine, trainer, warm start
       ▲                  │
       └── Born, Ended ───┘        the nursery is the parent of what it bears, and ends with the command

It is opened before the command itself imports anything, so that both import at the same time. Should it die, the kernel
ends what it has borne, as if those roles had died themselves; whoever starts one from then on has a fresh interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import DeadlineExceeded
from stretto.core.records import Record
from stretto.processes.heartbeat import PARENT, cpu_ticks
from stretto.processes.spawn import FRESH, RunningProcess, Spawn, Spawner, environment

#: What is imported ahead: what these modules import.
PLAYERS = ("stretto.engine.role", "stretto.trainer.roles.trainer", "stretto.trainer.roles.supervised")
#: The nursery's command line is at least so long, in bytes: its children write theirs over it, for `ps`.
ROOM = 8192
LONGEST_MESSAGE = 1 << 18
_READY_SECONDS = 60.0
_ANSWER_SECONDS = 10.0  # once it has imported everything
_STILL_SECONDS = 5.0  # without any computing, while it should
_LOOK_SECONDS = 0.5
_WORD_SECONDS = 2.0
_END_SECONDS = 5.0
_ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class Spawned(Record, frozen=True, tag=True):
    """The process is there; the descriptor that comes with this tells of its end (`pidfd_open`)."""

    pid: int


class NotSpawned(Record, frozen=True, tag=True):
    """It could not be started; `number` is the system's, see `errno`."""

    number: int
    problem: str


class Exited(Record, frozen=True, tag=True):
    """It has ended, with an exit code that is negative for a signal."""

    pid: int
    code: int


FROM_NURSERY: msgspec.msgpack.Decoder[Spawned | NotSpawned | Exited] = msgspec.msgpack.Decoder(
    Spawned | NotSpawned | Exited
)


@contextlib.contextmanager
def nursery() -> Iterator[Spawner]:
    """A starter for the roles of one command; none of them is left afterwards.

    Where there is an accelerator, roles are started afresh: a process is of no use for CUDA if its parent has looked
    for a device. So they are where there is no room for a nursery.
    """
    if any(path.exists() for path in _ACCELERATORS):
        yield FRESH
        return
    try:
        opened = ForkServer()
    except OSError:
        yield FRESH
        return
    try:
        yield opened
    finally:
        opened.close()


class ForkServer:
    """See the module. One event loop at a time may use it."""

    def __init__(self, players: Sequence[str] = PLAYERS) -> None:
        """`players` are the modules that it imports."""
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._near.setblocking(False)
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._children: dict[int, ForkedProcess] = {}
        self._patience = _READY_SECONDS
        with contextlib.ExitStack() as undo, far:
            undo.callback(self._near.close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto.processes.fork_server_role", str(far.fileno()), " " * ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what it cannot do a fresh interpreter does, or says in its role's log
                env=environment(1) | {PARENT: str(os.getpid())},
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._near.send(msgspec.msgpack.encode(tuple(players)))
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, birth: Spawn) -> RunningProcess:
        """As `Spawner.start`; a nursery that is gone, or that does not answer, has its work done by fresh
        interpreters. (One that hangs is left alone: what it has borne may be well.)"""
        if self._patience and self._process.returncode is None:
            try:
                return await self._bear(birth)
            except ConnectionError:
                self.close()
            except DeadlineExceeded:
                self._patience = 0.0
        return await FRESH.start(birth)

    def describe_end(self, process: RunningProcess) -> str:
        if isinstance(process, ForkedProcess) and process.orphaned:
            return "ended with the process that it was forked from (stretto.processes.fork_server_role)"
        return FRESH.describe_end(process)

    async def _bear(self, birth: Spawn) -> ForkedProcess:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._near, self._hear)
        socket.send_fds(self._near, [msgspec.msgpack.encode(birth)], birth.inherited)
        asked: asyncio.Future[ForkedProcess] = loop.create_future()
        self._asked.append(asked)
        try:
            async with deadline("conductor", "the nursery to start a process", self._patience):
                child = await self._unless_it_hangs(asked)
        except (asyncio.CancelledError, DeadlineExceeded):
            if not asked.cancel() and not asked.cancelled() and asked.exception() is None:
                asked.result().kill()
            raise
        self._patience = _ANSWER_SECONDS
        return child

    async def _unless_it_hangs(self, asked: asyncio.Future[ForkedProcess]) -> ForkedProcess:
        """The child; a nursery that does not even compute is not waited for any longer."""
        stillness, ticks = StallTimer(_LOOK_SECONDS), 0
        while not asked.done():
            await asyncio.wait([asked], timeout=_LOOK_SECONDS)
            before, ticks = ticks, cpu_ticks(self.pid)
            if stillness.look(moved=ticks != before) > _STILL_SECONDS:
                raise DeadlineExceeded("conductor", "the nursery to start a process", _STILL_SECONDS)
        return await asked

    def _hear(self) -> None:
        """All that it has said: two ends may lie there at once."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._near, LONGEST_MESSAGE, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, descriptors = b"", []
            if not message:
                self.close()
                return
            self._take(FROM_NURSERY.decode(message), descriptors)

    def _take(self, message: Spawned | NotSpawned | Exited, descriptors: list[int]) -> None:
        match message:
            case Spawned(pid) if descriptors:
                os.set_inheritable(descriptors[0], False)
                self._children[pid] = child = ForkedProcess(pid, descriptors[0])
                if not _tell(self._asked.popleft(), child):  # whoever asked for it has given up
                    child.kill()
            case Spawned(pid):  # this process has no descriptor left for it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _fail(self._asked.popleft(), OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case NotSpawned(number, problem):
                _fail(self._asked.popleft(), OSError(number, problem))
            case Exited(pid, code):
                if (ended := self._children.pop(pid, None)) is not None:
                    ended.end(code)

    def close(self) -> None:
        """End it, and with it what it has borne."""
        if self._process.returncode is None:
            with contextlib.suppress(RuntimeError):  # outside of an event loop nothing listens
                asyncio.get_running_loop().remove_reader(self._near)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not let go of it
                self._process.wait(_END_SECONDS)
            self._near.close()
        for child in self._children.values():
            child.orphaned = True
            child.end(-signal.SIGKILL)
        self._children.clear()
        for asked in self._asked:
            _fail(asked, ConnectionResetError("the nursery is gone"))
        self._asked.clear()


def _tell(asked: asyncio.Future[ForkedProcess], child: ForkedProcess) -> bool:
    if asked.done():
        return False
    asked.set_result(child)
    return True


def _fail(asked: asyncio.Future[ForkedProcess], error: OSError) -> None:
    if not asked.done():
        asked.set_exception(error)


class ForkedProcess:
    """A process that the nursery has borne. The kernel tells of its end, and the nursery how it ended. If the nursery
    does not, for seconds, it counts as killed."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.orphaned = False  # the nursery ended, and the kernel ended this process with it
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None
        self._loop.add_reader(descriptor, self._gone)

    def _gone(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._late = self._loop.call_later(_WORD_SECONDS, self.end, -signal.SIGKILL)

    def end(self, code: int) -> None:
        """It has ended, so."""
        if self.returncode is not None:
            return
        self.returncode = code
        if self._late is not None:
            self._late.cancel()
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
