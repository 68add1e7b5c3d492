"""The fork server's process: ``python -m stretto.processes.fork_server_role WIRE``; see `fork_server`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from stretto.core.errors import described
from stretto.processes.fork_server import LONGEST_MESSAGE, Exited, ForkServer, NotSpawned, Spawned, accelerated
from stretto.processes.heartbeat import HEARTBEAT, PARENT, begin_role, die_with_parent
from stretto.processes.spawn import FRESH, Spawn, Spawner, settings

_SPAWN = msgspec.msgpack.Decoder(Spawn)
_MOST_DESCRIPTORS = 16
_ARGUMENTS = slice(45, 47)  # where a command line begins and ends, behind the name in /proc/PID/stat


@dataclass(frozen=True, eq=False)
class Child:
    """A process that was forked off; `ended` becomes readable at its end (`pidfd_open`)."""

    pid: int
    ended: int
    wire: int


class Server:
    """Forks on request, and reports how its children ended."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._children: set[Child] = set()
        self._events = selectors.DefaultSelector()

    def serve(self) -> int:
        """The exit code, once the command has ended; a child does not return.

        The wait has no deadline: its owner is the command, whose end closes the wire.
        """
        self._events.register(self._wire, selectors.EVENT_READ)
        server = os.getpid()
        while True:
            for key, _ in self._events.select():
                child: Child | None = key.data
                if child is None:
                    message, descriptors, _, _ = socket.recv_fds(self._wire, LONGEST_MESSAGE, _MOST_DESCRIPTORS)
                    if not message:
                        return 0
                    if self._fork(wire=descriptors[0]) == 0:
                        run_child(_SPAWN.decode(message), descriptors, server)
                    for descriptor in descriptors[1:]:
                        os.close(descriptor)
                elif key.fd == child.ended:
                    self._reap(child)
                elif child in self._children:  # the command has closed the wire
                    self._events.unregister(child.wire)
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, wire: int) -> int:
        """As `os.fork`; -1 if there is no room for another process."""
        try:
            pid = os.fork()
        except OSError as error:
            send(wire, NotSpawned(error.errno or 0, described(error)))
            os.close(wire)
            return -1
        if pid == 0:  # what is the server's is not its child's
            self._wire.close()
            self._events.close()
            for other in self._children:
                os.close(other.ended)
                os.close(other.wire)
            return 0
        child = Child(pid, os.pidfd_open(pid), wire)
        self._children.add(child)
        for descriptor in (child.ended, child.wire):
            self._events.register(descriptor, selectors.EVENT_READ, child)
        return pid

    def _reap(self, child: Child) -> None:
        self._children.discard(child)
        _, status = os.waitpid(child.pid, 0)
        send(child.wire, Exited(os.waitstatus_to_exitcode(status)))
        for descriptor in (child.ended, child.wire):
            with contextlib.suppress(KeyError):
                self._events.unregister(descriptor)
            os.close(descriptor)


def send(wire: int, message: Spawned | NotSpawned | Exited) -> bool:
    """One message; False if nobody waits for it any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(wire, msgspec.msgpack.encode(message))
        return True
    return False


def run_child(spawn: Spawn, descriptors: Sequence[int], server: int) -> NoReturn:
    """Become the process that `spawn` describes. The first descriptor is the wire to the command."""
    # Above the numbers that inherited descriptors are to have: nothing is in their way then.
    least = max((2, *spawn.inherited)) + 1
    wire, *inherited = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least) for descriptor in descriptors)
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        os.setsid()
        die_with_parent(server)
        os.chdir(spawn.folder)  # the server may have been started somewhere else
        os.environ.update(settings(spawn.threads) | spawn.environment)
        log = os.open(spawn.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        for descriptor, number in zip(inherited, spawn.inherited, strict=True):
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
    except OSError as error:
        send(wire, NotSpawned(error.errno or 0, described(error)))
        os._exit(1)
    with contextlib.suppress(OSError):  # it keeps the server's command line then
        show_as([sys.executable, "-m", spawn.module, spawn.spec])
    if not send(wire, Spawned(os.getpid())):
        os._exit(0)  # the start was cancelled, and what the role was to read may be gone
    os.close(wire)
    leave(importlib.import_module(spawn.module).main([spawn.spec]))


def leave(code: int) -> NoReturn:
    """End this copy of a process as an interpreter ends, but for its objects, whose memory is the kernel's to free: to
    take down each that was there before the fork would copy most of it first, for a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed: the code says how the role ended
            stream.flush()
    os._exit(code)


@dataclass(frozen=True)
class ForkedHere:
    """A fork server that is a child of this process."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """As `ForkingProcess.wait`; after SIGKILL it is a moment."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def fork_here(held: Sequence[int]) -> Spawner:
    """A fork server that is a copy of this process as it is now, so that it need not import anything.

    To be called by a role that starts others, before it has threads or begins as a role. In the copy, and in its
    children, this does not return. Descriptors in `held` are this process's alone.
    """
    if accelerated():
        return FRESH
    wire, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    gc.freeze()
    try:
        pid = os.fork()
    except OSError:  # no room for another process: an interpreter for each role says so, if there is still none
        wire.close()
        far.close()
        return FRESH
    if pid > 0:
        far.close()
        wire.setblocking(False)
        return ForkServer(running=(wire, ForkedHere(pid)))
    wire.close()
    heartbeat, _ = os.environ.pop(HEARTBEAT, None), os.environ.pop(PARENT, None)
    for descriptor in (*held, *([int(heartbeat)] if heartbeat is not None else [])):
        os.close(descriptor)
    die_with_parent(parent)
    with contextlib.suppress(OSError):
        show_as([sys.executable, "-m", __name__])
    leave(Server(far).serve())


def show_as(words: Sequence[str]) -> None:
    """Write a command line over that of this process, as far as it has room, for `ps`."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS])
    text = "\0".join(words).encode()[: end - start - 1]
    if start:  # 0 where a process may not know it
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main(arguments: list[str]) -> int:
    """Import the modules, then serve."""
    wire = socket.socket(fileno=int(arguments[0]))
    begin_role()
    os.close(os.pidfd_open(os.getpid()))  # a system without these has no fork server
    gc.disable()  # modules are no garbage: to look for it among them is a fifth of what imports take
    for module in msgspec.msgpack.decode(wire.recv(LONGEST_MESSAGE), type=tuple[str, ...]):
        importlib.import_module(module)
    gc.freeze()  # what is here now is shared by all children, as long as nobody touches it
    gc.enable()
    return Server(wire).serve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
