"""The nursery's process: ``python -m stretto.processes.fork_server_role WIRE``; see `processes.fork_server`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.core.errors import described
from stretto.processes.fork_server import LONGEST_MESSAGE, Exited, NotSpawned, Spawned
from stretto.processes.heartbeat import begin_role, die_with_parent
from stretto.processes.spawn import Spawn, settings

_BIRTH = msgspec.msgpack.Decoder(Spawn)
_MOST_DESCRIPTORS = 16
_ARGUMENTS = slice(45, 47)  # where a command line begins and ends, behind the name in /proc/PID/stat


@dataclass(frozen=True)
class SpawnRequest:
    """A child that has just been forked off; `told` is closed once it has become what it is to be."""

    birth: Spawn
    descriptors: Sequence[int]
    told: int
    parent: int

    def play(self) -> int:
        """The exit code of the role."""
        try:
            self._settle()
        except OSError as error:
            os.write(self.told, msgspec.msgpack.encode(NotSpawned(error.errno or 0, described(error))))
            os._exit(1)
        os.close(self.told)
        played: int = importlib.import_module(self.birth.module).main([self.birth.spec])
        return played

    def _settle(self) -> None:
        birth = self.birth
        os.setsid()
        die_with_parent(self.parent)
        os.environ.update(settings(birth.threads) | birth.environment)
        log = os.open(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above(birth)) for descriptor in self.descriptors]
        for descriptor in self.descriptors:
            os.close(descriptor)
        for descriptor, number in zip(apart, birth.inherited, strict=True):
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it has another name then, and is as well
            show_as([sys.executable, "-m", birth.module, birth.spec])


class Server:
    """Bears what it is asked for, and tells how it ended."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._alive: dict[int, int] = {}  # process: the descriptor that tells of its end

    def serve(self) -> SpawnRequest | None:
        """Returns in every child, with what it is to play; in the nursery itself None, once the command has ended.

        Its wait has no deadline: its owner is the command, whose end closes the wire.
        """
        with selectors.DefaultSelector() as events:
            events.register(self._wire, selectors.EVENT_READ)
            while True:
                for key, _ in events.select():
                    if key.fileobj is not self._wire:
                        events.unregister(key.fileobj)
                        self._bury(key.data)
                        continue
                    message, descriptors, _, _ = socket.recv_fds(self._wire, LONGEST_MESSAGE, _MOST_DESCRIPTORS)
                    if not message:
                        return None
                    born = self._bear(_BIRTH.decode(message), descriptors)
                    if isinstance(born, SpawnRequest):
                        return born
                    if born is not None:
                        events.register(self._alive[born], selectors.EVENT_READ, born)

    def _bear(self, birth: Spawn, descriptors: list[int]) -> SpawnRequest | int | None:
        """The new process, or its id; None if there is none."""
        told, telling = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(telling)
            self._tell(NotSpawned(error.errno or 0, described(error)))
            pid = -1
        if pid == 0:
            os.close(told)
            self._let_go()
            far = fcntl.fcntl(telling, fcntl.F_DUPFD_CLOEXEC, above(birth))
            os.close(telling)
            return SpawnRequest(birth, descriptors, far, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            os.close(told)
            return None
        os.close(telling)
        with open(told, "rb") as words:
            problem = words.read()
        if problem:
            os.waitpid(pid, 0)
            self._wire.send(problem)
            return None
        self._alive[pid] = os.pidfd_open(pid)
        socket.send_fds(self._wire, [msgspec.msgpack.encode(Spawned(pid))], [self._alive[pid]])
        return pid

    def _bury(self, pid: int) -> None:
        os.close(self._alive.pop(pid))
        _, status = os.waitpid(pid, 0)
        self._tell(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _let_go(self) -> None:
        """What is the nursery's is not its child's."""
        self._wire.close()
        for descriptor in self._alive.values():
            os.close(descriptor)

    def _tell(self, message: NotSpawned | Exited) -> None:
        self._wire.send(msgspec.msgpack.encode(message))


def above(birth: Spawn) -> int:
    """A number above those that inherited descriptors are to have: what must not be in their way is put there."""
    return max((2, *birth.inherited)) + 1


def show_as(words: Sequence[str]) -> None:
    """Write a command line over that of this process, as far as it has room, for `ps`."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS])
    text = "\0".join(words).encode()[: end - start - 1]
    if start:  # 0 where a process may not know it
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main(arguments: list[str]) -> int:
    """Bear until the command has ended; in a child, play its role."""
    wire = socket.socket(fileno=int(arguments[0]))
    begin_role()
    os.close(os.pidfd_open(os.getpid()))  # a system without these has no nursery
    for module in msgspec.msgpack.decode(wire.recv(LONGEST_MESSAGE), type=tuple[str, ...]):
        importlib.import_module(module)
    gc.freeze()  # what is here now is shared by all children, as long as nobody touches it
    newborn = Server(wire).serve()
    return newborn.play() if newborn is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
