"""Process of the fork server: a forked copy of the process that starts roles (`fork_here`), or a fresh interpreter,
``python -m stretto_app.forking.role WIRE``. See `fork_server`."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from stretto.core.errors import described
from stretto.processes import event_loop
from stretto.processes.heartbeat import HEARTBEAT, PARENT, begin_role, die_with_parent, keep_exit_codes
from stretto.processes.kernel import end_of
from stretto.processes.spawn import FRESH, Spawn, Spawner, keep_memory, settings
from stretto.processes.tree import open_descriptors, threads
from stretto_app.forking.command_line import make_room, show_as
from stretto_app.forking.imports import imports_of_roles, quick_imports
from stretto_app.forking.server import (
    COMMAND_LINE_BYTES,
    LONGEST_MESSAGE,
    ROLES,
    Exited,
    ForkedHere,
    ForkServer,
    NotSpawned,
    Spawned,
    accelerated,
)

_SPAWN = msgspec.msgpack.Decoder(Spawn)
_MOST_DESCRIPTORS = 16
_ENDED_BY_AN_ERROR = 1  # the exit code of an interpreter


@dataclass(frozen=True, eq=False)
class _Child:
    """A forked process. `ended`: a descriptor that becomes readable when it ends (`processes.kernel.end_of`). `wire`:
    descriptor of the connection on which the fork server tells the command how the process ended."""

    pid: int
    ended: int
    wire: int


class _Server:
    """Main loop of a fork server: forks on request of the command, and reports to it how its children end."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._children: set[_Child] = set()
        self._events = selectors.DefaultSelector()

    def serve(self) -> int:
        """Fork a child for each order, report its end, and kill it if the command closes its wire. Returns 0 when the
        command has ended. In a forked child this call does not return.

        The wait has no deadline: when the command ends, the wire closes.
        """
        keep_exit_codes()
        self._events.register(self._wire, selectors.EVENT_READ)
        server = os.getpid()
        while True:
            for key, _ in self._events.select():
                child: _Child | None = key.data
                if child is None:
                    message, descriptors, _, _ = socket.recv_fds(self._wire, LONGEST_MESSAGE, _MOST_DESCRIPTORS)
                    if not message:
                        return 0
                    spawn = _SPAWN.decode(message)
                    if len(descriptors) <= len(spawn.inherited):  # the kernel had no room for all of them
                        self._refuse(descriptors[:1], OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                    elif self._fork(wire=descriptors[0]) == 0:
                        run_child(spawn, descriptors, server)
                    for descriptor in descriptors[1:]:
                        os.close(descriptor)
                elif key.fd == child.ended:
                    self._reap(child)
                elif child in self._children:  # the command has closed the wire
                    self._events.unregister(child.wire)
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, wire: int) -> int:
        """Fork, and watch the child; returns the child's id, and 0 in the child. If the system has no room for another
        process, it sends `NotSpawned` on `wire` and returns -1."""
        room = list[int]()
        try:
            room.append(os.dup(wire))  # room for the descriptor of the child's end
            pid = os.fork()
        except OSError as error:
            self._refuse([wire, *room], error)
            return -1
        os.close(room[0])
        if pid == 0:  # a child keeps nothing of the server's
            self._wire.close()
            self._events.close()
            for other in self._children:
                os.close(other.ended)
                os.close(other.wire)
            return 0
        child = _Child(pid, end_of(pid), wire)
        self._children.add(child)
        for descriptor in (child.ended, child.wire):
            self._events.register(descriptor, selectors.EVENT_READ, child)
        return pid

    @staticmethod
    def _refuse(wires: Sequence[int], error: OSError) -> None:
        """Tell the command on the first of `wires` that no process was started, and close all of them."""
        for wire in wires[:1]:
            send(wire, NotSpawned(error.errno or 0, described(error)))
        for wire in wires:
            os.close(wire)

    def _reap(self, child: _Child) -> None:
        self._children.discard(child)
        _, status = os.waitpid(child.pid, 0)
        send(child.wire, Exited(os.waitstatus_to_exitcode(status)))
        for descriptor in (child.ended, child.wire):
            with contextlib.suppress(KeyError):
                self._events.unregister(descriptor)
            os.close(descriptor)


def send(wire: int, message: Spawned | NotSpawned | Exited) -> bool:
    """Send one message on the descriptor `wire`; True, or False if the receiver is gone."""
    with contextlib.suppress(ConnectionError):  # reset: the receiver has closed it before it read the message before
        os.write(wire, msgspec.msgpack.encode(message))
        return True
    return False


def run_child(spawn: Spawn, descriptors: Sequence[int], server: int) -> NoReturn:
    """Become the process that `spawn` describes, in a forked child; sends `Spawned` or `NotSpawned` to the command.

    Args:
        descriptors: the wire to the command, then the descriptors to inherit.
        server: process id of the fork server, with which this process ends.
    """
    # Duplicates lie above all target numbers, so that no `dup2` below overwrites a descriptor that is still needed.
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
    if (hub := sys.modules.get("huggingface_hub.constants")) is not None:  # it reads the environment only once
        hub.__dict__["HF_HUB_OFFLINE"] = True
    with contextlib.suppress(OSError):  # it keeps the server's command line then
        show_as([sys.executable, "-m", spawn.module, spawn.spec])
    if not send(wire, Spawned(os.getpid())):
        os._exit(0)  # the start was cancelled, and files for the role may be deleted
    os.close(wire)
    leave_after(lambda: importlib.import_module(spawn.module).main([spawn.spec]))


def leave_after(part: Callable[[], int]) -> NoReturn:
    """Run `part` in a forked process, then end the process with the returned exit code, or that of a SystemExit. Any
    other exception is printed and gives 1. None reaches the caller, whose frames are copies of the parent's."""
    try:
        code = part()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as an interpreter: whatever it is, it ends here
        sys.excepthook(*sys.exc_info())
        code = _ENDED_BY_AN_ERROR
    leave(code)


def leave(code: int) -> NoReturn:
    """End this copied process like an interpreter, but without freeing its objects: touching all that existed before
    the fork would copy most of it, for a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed: the code says how the role ended
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str] = (), *, roles: Sequence[str] | None = None, beside: bool = False
) -> Iterator[Spawner]:
    """Context manager: a spawner for the `roles` of one command (modules; None: `ROLES`). On leaving, all processes
    that it has forked are ended.

    It imports the modules of the roles, and `modules`, into this process, and forks the fork server from it; with
    `beside` the fork server imports them itself, while the command goes on. Enter it before the command starts threads
    or opens files of its own. A process with threads, or one that has made an event loop (`event_loop.made`), cannot be
    forked safely: it starts a fresh interpreter as fork server. Without a fork server, each role starts in a fresh
    interpreter. This is so where the system has no room for one, and on a machine with an accelerator, because a
    process cannot use CUDA if its parent has looked for a device.
    """
    spawner: Spawner = FRESH
    wanted = (*(ROLES if roles is None else roles), *modules)
    if not accelerated():
        with contextlib.suppress(OSError):
            if threads() == 1 and not event_loop.made:
                if not beside:
                    _import(wanted)
                spawner = fork_here(apart=True, modules=wanted)
            else:
                spawner = ForkServer(wanted)
    try:
        yield spawner
    finally:
        if isinstance(spawner, ForkServer):
            spawner.close()


def _import(modules: Sequence[str]) -> None:
    with imports_of_roles():
        for module in modules:
            with contextlib.suppress(ImportError):  # the role that needs it reports the error
                importlib.import_module(module)


def fork_here(*, apart: bool = False, modules: Sequence[str] = ()) -> Spawner:
    """Fork this process: the copy, which has the imports of this process and imports `modules`, becomes a fork server.
    Returns its spawner, or that of fresh interpreters (`FRESH`) if there is an accelerator or the system cannot fork.

    Call it before this process has threads or begins as a role. It does not return in the copy and its children. Of all
    descriptors the copy keeps the standard streams and its connection to this process only. With `apart` the streams
    lead to /dev/null, and the copy has a session of its own, so that Ctrl-C does not reach it.
    """
    if accelerated():
        return FRESH
    parent, signals = os.getpid(), {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    gc.freeze()
    with contextlib.ExitStack() as undo:
        wire, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(wire.close)
        undo.callback(far.close)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the copy is apart
        undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            os.close(end_of(parent))  # a system without these has no fork server
            pid = os.fork()
        except OSError:  # no room for another process: an interpreter for each role says so, if there is still none
            return FRESH
        if pid == 0:
            leave_after(lambda: _serve_as_copy(far.detach(), parent, before, apart, modules))
        undo.pop_all()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    far.close()
    wire.setblocking(False)
    return ForkServer(running=(wire, ForkedHere(pid)))


def _serve_as_copy(wire: int, parent: int, mask: set[int | signal.Signals], apart: bool, modules: Sequence[str]) -> int:
    die_with_parent(parent)
    for name in (HEARTBEAT, PARENT):
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in open_descriptors():
        if descriptor > 2 and descriptor != wire:
            with contextlib.suppress(OSError):  # the descriptor used for listing
                os.close(descriptor)
    if apart:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(silent, standard)
        os.close(silent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    gc.enable()  # the original may be in `quick_imports`; roles without a collector would grow in every step
    keep_memory()
    with contextlib.suppress(OSError):
        make_room(COMMAND_LINE_BYTES)
        show_as([sys.executable, "-m", __name__])
    if modules:
        _import(modules)
        gc.freeze()
    atexit._clear()  # exit functions of the original and of libraries are not for the copy and its children
    return _Server(socket.socket(fileno=wire)).serve()


def main(arguments: list[str]) -> int:
    """Run a fork server in a fresh interpreter: receive the names of modules, import them, and serve. `arguments[0]`:
    descriptor of the wire. Returns the exit code."""
    wire = socket.socket(fileno=int(arguments[0]))
    begin_role()
    os.close(end_of(os.getpid()))  # a system without these has no fork server
    with quick_imports():
        for module in msgspec.msgpack.decode(wire.recv(LONGEST_MESSAGE), type=tuple[str, ...]):
            importlib.import_module(module)
        gc.freeze()  # keeps the collector off existing objects, so that their memory stays shared with children
    return _Server(wire).serve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
