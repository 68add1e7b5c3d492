"""Process inside a sandbox: a warm interpreter that forks once for every program.

    host ── settings, then one order per program ──► guest ── forks ──► walls ──► the program
                                                       ▲                              │
                                                       └──────── how it ended ◄───────┘

The host sends this file, `script` and `values` to a bare interpreter (``python -I -S -B``), so they import little and
nothing else of this package. Programs, inputs and outputs travel in file descriptors that the guest passes on unread,
so a later program cannot find an earlier one in its memory. Expected outputs never enter the sandbox.

If a step between fork and program fails, the child ends with a message and the verdict is undecided: no wall is
silently missing.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]
import _socket
import gc
import marshal
import os
import resource
import select
import struct
import sys
import time

from stretto_verify.sandbox.script import perform

TYPE_CHECKING = False
if TYPE_CHECKING:  # for types alone: these imports would take a third of a guest's start
    from collections.abc import Callable, Iterable
    from typing import Any

ORDER = struct.Struct("<dd")  # limits of CPU and wall-clock seconds; with descriptors of input, output, errors, task
REPLY = struct.Struct("<i?ddq")  # status, timed out, seconds, processor seconds, bytes of memory; then a problem
SETTINGS_BYTES = 1 << 16
STARTED = b"+"
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 0.25  # seconds between two checks of a program's CPU time
_TICKS = os.sysconf("SC_CLK_TCK")

_MACHINE = os.uname().machine
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL, _SIGCHLD = 9, 17
_NOSUID_NODEV, _MOUNT_READ_ONLY, _MOUNT_SETATTR = 2 | 4, 1, 442
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_READ, _LANDLOCK_EXECUTE, _LANDLOCK_LIST = 4, 1, 8
_LANDLOCK_OF_A_FILE = 1 | 2 | 4 | 1 << 14  # execute, write, read, truncate
_FIRST_FREE = 5  # after a child's descriptors: input, output, errors, task, and the pipe for its start report

_USE_ERRNO = 1 | 8  # the C calling convention, and a copy of errno
_INTEGERS = struct.Struct("i")

assert sys.platform == "linux", "its walls are the Linux kernel's"


# The modules ctypes and array would take a third of a guest's start; only this part of ctypes is needed.


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class _Character(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "c"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _USE_ERRNO
    _restype_ = _Int


def _function(name: str) -> Callable[..., int]:
    """Function of the C library; integers are passed as `int`, bytes as pointers."""
    return _Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name))  # type: ignore[arg-type]


_syscall, _prctl_call, _mount = _function("syscall"), _function("prctl"), _function("mount")


class Guest:
    """The interpreter inside one sandbox. It receives its settings (from `walls.guest_settings`) over `control`."""

    def __init__(self, control: _socket.socket) -> None:
        body, (self._proc,) = _receive(control, SETTINGS_BYTES)
        self._settings: dict[str, Any] = marshal.loads(body)
        self._control = control
        _become(self._settings["uid"])
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # a program may send it to the first process of its namespace
        for name in self._settings["loaded"]:  # modules that many programs import, loaded once
            __import__(name)
        gc.freeze()  # exclude the guest's objects from garbage collections of programs
        self._ids = os.getuid(), os.getgid()

    def serve(self) -> None:
        """Carry out orders, one at a time, until the host closes its end; then end the process. Never returns."""
        self._control.send(b"ready")
        while True:
            order, given = _receive(self._control, ORDER.size)
            if not order:
                os._exit(0)
            if len(order) != ORDER.size:
                continue  # a stop order for a program that had just ended by itself
            seconds, patience = ORDER.unpack(order)
            self._control.send(self._run(seconds, patience, given))

    def _run(self, seconds: float, patience: float, given: list[int]) -> bytes:
        """Run one program, within CPU `seconds` and wall-clock `patience`; return the packed `REPLY`: how it ended,
        with the problem if it could not be started. `given`: descriptors of its input, output, errors and task; they
        are closed here."""
        start = time.monotonic()
        told, tell = os.pipe()
        child = _fork(self._settings["namespaces"])
        if child == 0:
            self._live([*given, tell])
        for descriptor in (*given, tell):
            os.close(descriptor)
        timed_out, computed = self._wait(child, seconds, start + patience)
        _, wait_status, usage = os.wait4(child, 0)
        with open(told, "rb") as pipe:
            words = pipe.read()
        problem = b"" if words == STARTED else words or b"it died before its program"
        status, processor = os.waitstatus_to_exitcode(wait_status), max(computed, usage.ru_utime + usage.ru_stime)
        return REPLY.pack(status, timed_out, time.monotonic() - start, processor, usage.ru_maxrss * 1024) + problem

    def _wait(self, child: int, seconds: float, until: float) -> tuple[bool, float]:
        """Wait for the child. Return whether it was killed for a limit (not by the host), and its CPU seconds at the
        last look, 0 without one.

        It is killed after `seconds` of CPU time (and not before as much wall-clock time), at the time `until`, or when
        the host orders it or is gone.
        """
        descriptor = os.pidfd_open(child)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._control.fileno(), select.POLLIN)
        try:
            pause, computed = min(seconds, until - time.monotonic()), 0.0
            while not (ready := dict(poll.poll(max(0.0, pause) * 1000))):
                computed = self._computed(child)
                left = min(seconds - computed, until - time.monotonic())
                if left <= 0:
                    break
                pause = max(_SHORTEST_LOOK, min(left, _LONGEST_LOOK))
        finally:
            os.close(descriptor)
        if descriptor in ready:
            return False, computed
        os.kill(child, _SIGKILL)
        return not ready, computed

    def _computed(self, child: int) -> float:
        """CPU seconds of the child and of its descendants, as far as the kernel reports them."""
        ticks, guest = 0, os.readlink("self", dir_fd=self._proc)  # its pid in that /proc
        waiting = [guest]
        while waiting:
            process = waiting.pop()
            try:
                waiting += self._children(process)
                if process != guest:
                    words = self._read_proc(f"{process}/stat").rpartition(")")[2].split()
                    ticks += sum(map(int, words[11:15]))  # its own time, and that of children that it has waited for
            except OSError:  # it has ended, or this kernel does not report it
                continue
        return max(ticks / _TICKS, time.clock_gettime(~child << 3 | 2))

    def _children(self, process: str) -> list[str]:
        folder = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            threads = os.listdir(folder)
        finally:
            os.close(folder)
        found = []
        for thread in threads:
            found += self._read_proc(f"{process}/task/{thread}/children").split()
        return found

    def _read_proc(self, name: str) -> str:
        with open(os.open(name, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()  # a process may have any name

    def _live(self, given: list[int]) -> None:
        """Body of a child process: set up the walls and run the program. Never returns. `given`: as in `_run`, and a
        pipe for `STARTED` or the problem."""
        try:
            self._raise_walls(given)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        except BaseException as error:  # any error goes to the host, and the program must not run
            os.write(given[-1], f"{type(error).__name__}: {error}"[:500].encode())
            os._exit(70)
        os._exit(perform())

    def _raise_walls(self, given: list[int]) -> None:
        settings = self._settings
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        self._tell_proc("oom_score_adj", "1000")  # if memory runs short, the kernel kills the program, not the guest
        limits = dict(settings["limits"])
        if settings["threads"]:  # the limit counts the user's other processes too
            limits["RLIMIT_NPROC"] = self._tasks_of(self._ids[0]) + settings["threads"]
        if settings["namespaces"]:
            self._map_user()
            _hide(settings["hidden"])
            _checked("mount", _mount(b"tmpfs", b"/tmp", b"tmpfs", _NOSUID_NODEV, settings["tmp"].encode()))
        if settings["landlock"]:
            _landlock(**settings["landlock"])
        _keep_only(given)
        for name, value in limits.items():
            _limit(getattr(resource, name), value)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _drop_capabilities()
        os.chdir(settings["folder"])
        if settings["seccomp"]:
            _filter_calls(bytes.fromhex(settings["seccomp"]))
        os.write(_FIRST_FREE - 1, STARTED)
        os.close(_FIRST_FREE - 1)

    def _map_user(self) -> None:
        """Map the guest's user and group to themselves in its new user namespace, where other groups cannot be set."""
        user, group = self._ids
        self._tell_proc("setgroups", "deny")
        self._tell_proc("uid_map", f"{user} {user} 1")
        self._tell_proc("gid_map", f"{group} {group} 1")

    def _tasks_of(self, user: int) -> int:
        """Number of threads that the user has now, in all its processes."""
        found = 0
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        processes = os.listdir(folder)
        os.close(folder)
        for process in filter(str.isdecimal, processes):
            try:
                if os.stat(process, dir_fd=self._proc).st_uid == user:
                    found += os.stat(f"{process}/task", dir_fd=self._proc).st_nlink - 2
            except OSError:  # it has ended
                continue
        return found

    def _tell_proc(self, name: str, text: str) -> None:
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=self._proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _receive(control: _socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive one message of at most `size` bytes, with its descriptors, at most 8; b"" if the host has closed its
    end."""
    descriptors: list[int] = []
    body, ancillary, _, _ = control.recvmsg(size, _socket.CMSG_LEN(8 * _INTEGERS.size))
    for level, kind, data in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            whole = data[: len(data) - len(data) % _INTEGERS.size]
            descriptors += [number for (number,) in _INTEGERS.iter_unpack(whole)]
    return body, descriptors


def _become(uid: int | None) -> None:
    """Switch from root to the user `uid`; None: do not switch."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _prctl(_PR_SET_DUMPABLE, 1)  # otherwise its uid_map would belong to root


def _fork(namespaces: int) -> int:
    """Same as `os.fork`. With `namespaces` (clone flags), the child is the first process of a new PID namespace; when
    it ends, the kernel ends all others in it."""
    if not namespaces:
        return os.fork()
    return _checked("clone", _syscall(_SYS_CLONE[_MACHINE], namespaces | _SIGCHLD, None, None, None, None))


# Walls. Each function sets up a wall or raises.


def _hide(folders: list[str]) -> None:
    """Mount empty folders over these folders and make everything below the root read-only; does nothing for an empty
    list. Needed if the host's files are visible."""
    if folders:
        for folder in folders:
            _checked(f"mount {folder}", _mount(b"tmpfs", folder.encode(), b"tmpfs", _NOSUID_NODEV, b"size=4096"))
        read_only = struct.pack("<QQQQ", _MOUNT_READ_ONLY, 0, 0, 0)
        here, recursive, size = _Int(-100), _Int(0x8000), _Int(len(read_only))
        _checked("mount_setattr", _syscall(_MOUNT_SETATTR, here, b"/", recursive, read_only, size))


def _keep_only(given: list[int]) -> None:
    """Renumber the given descriptors from 0 and close all others."""
    parked = 64
    for number, descriptor in enumerate(given):
        os.dup2(descriptor, parked + number)
    for number in range(len(given)):
        os.dup2(parked + number, number)
    os.closerange(len(given), 1 << 20)


def _limit(resource_number: int, value: int) -> None:
    _, highest = resource.getrlimit(resource_number)
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    kept = resource_number == resource.RLIMIT_STACK  # programs may raise it: the address space limits it
    resource.setrlimit(resource_number, (value, highest if kept else value))


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    _checked("capset", _syscall(_SYS_CAPSET[_MACHINE], header, bytes(24)))


def _landlock(files: int, scopes: int, read: Iterable[str], write: Iterable[str]) -> None:
    """Allow this process, from now on, only reads below `read` and reads and writes below `write`; OSError if the
    kernel refuses. `files` and `scopes`: bit masks of the access rights that are restricted."""
    attributes = struct.pack("<QQQ", files, 0, scopes)
    size = 24 if scopes else 8
    ruleset = _checked("landlock_create_ruleset", _syscall(_LANDLOCK_CREATE, attributes, size, 0))
    readable = _LANDLOCK_READ | _LANDLOCK_EXECUTE | _LANDLOCK_LIST
    for paths, allowed in ((read, readable), (write, files)):
        for path in paths:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("<Qi", allowed if os.path.isdir(path) else allowed & _LANDLOCK_OF_A_FILE, place)
            _checked(f"landlock {path}", _syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
            os.close(place)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _checked("landlock_restrict_self", _syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _filter_calls(instructions: bytes) -> None:
    buffer = (_Character * len(instructions)).from_buffer_copy(instructions)
    program = struct.pack("@HP", len(instructions) // 8, _ctypes.addressof(buffer))
    _checked("seccomp", _prctl_call(_PR_SET_SECCOMP, 2, program, 0, 0))


def _prctl(option: int, value: int) -> None:
    _checked(f"prctl {option}", _prctl_call(option, value, 0, 0, 0))


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = _ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
