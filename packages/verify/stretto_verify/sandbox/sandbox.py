"""Sandbox: run a program on an input, and return its output and how it ended. If root starts it, it has a user id that
no other sandbox on this machine uses, and that owns no file.

If a program ends by an exception, a signal or a limit, its `ProgramEnd` says so, and the program is wrong.
`SandboxFailed` means that the sandbox could not run it, which says nothing about the program.

Process limits are counted per user, so two sandboxes with the same user would share one limit.
"""

from __future__ import annotations

import json
import marshal
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from stretto_verify.clock import clock_limit
from stretto_verify.sandbox.cgroups import ProgramGroup
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.guest import ORDER, REPLY
from stretto_verify.sandbox.kernel import memory_file, place
from stretto_verify.sandbox.walls import Walls, command, find_interpreter, guest_program, guest_settings
from stretto_verify.verdicts import Record

_FIRST_UNUSED_UID = 60_000  # not used for people or services by any system
_UNUSED_UIDS = 4_000


class SandboxUser:
    """User id of one sandbox. `uid` is None if this process is not root; the guest then keeps this process's user.

    Raises:
        OSError: all users are taken.
    """

    def __init__(self) -> None:
        self.uid: int | None = None
        self._claim: socket.socket | None = None
        if os.getuid() == 0:
            self.uid, self._claim = _claimed()

    def close(self) -> None:
        """Release the user id for other sandboxes."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _claimed() -> tuple[int, socket.socket]:
    """First free user id (OSError if none is), and the socket that reserves it: an abstract name that the kernel frees
    when the process ends."""
    for number in range(_UNUSED_UIDS):
        uid = _FIRST_UNUSED_UID + (os.getpid() + number) % _UNUSED_UIDS
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0stretto-sandbox-user-{uid}")
        except OSError:
            claim.close()
        else:
            return uid, claim
    raise OSError("all users for sandboxes are taken")


_START_SECONDS = 20.0
_GRACE = 5.0  # seconds beyond a program's own limit after which the guest itself is given up
_END_SECONDS = 2.0
_KEPT_ERRORS = 4096  # last bytes of standard error that are kept
_READ = 1 << 16
_LARGEST_REPLY = 1 << 16
_STOP = b"k"  # any message that is no order
_GUEST_BYTES, _GUEST_PROCESSES = 32 << 20, 2  # the guest's own share of its group's limits


class SandboxFailed(Exception):
    """The sandbox could not run a program; nothing is known about the program."""


class ProgramEnd(Record, frozen=True):
    """End of a program. `status`: its exit status, or minus the signal that ended it. `flooded`: ended because it wrote
    too much. `errors`: end of its standard error. `memory`: peak bytes of a process. `silent`: seconds since its last
    output."""

    status: int
    timed_out: bool
    flooded: bool
    output: bytes
    errors: bytes
    seconds: float
    cpu_seconds: float
    memory: int
    silent: float

    @property
    def well(self) -> bool:
        return self.status == 0 and not self.timed_out and not self.flooded

    @property
    def how(self) -> str:
        """The end in words: ``time limit``, ``output limit``, ``signal 9``, ``exit status 1: ZeroDivisionError:
        division by zero``."""
        if self.timed_out:
            return "time limit"
        if self.flooded:
            return "output limit"
        if self.status < 0:
            return f"signal {-self.status}"
        last = self.errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit status {self.status}" + (f": {last[:200]}" if last else "")


class _Streams:
    """First `limit` bytes of a program's standard output, and end of its standard error. `flooded`: whether it wrote
    more than `limit` bytes to either."""

    def __init__(self, limit: int) -> None:
        self.output, self.errors = bytearray(), bytearray()
        self.flooded = False
        self.heard = time.monotonic()  # time of the last output
        self._limit, self._error_bytes = limit, 0

    def take_output(self, chunk: bytes) -> None:
        self.heard = time.monotonic()
        self.output += chunk
        self.flooded |= len(self.output) > self._limit
        del self.output[self._limit :]

    def take_errors(self, chunk: bytes) -> None:
        self._error_bytes += len(chunk)
        self.flooded |= self._error_bytes > self._limit
        self.errors += chunk
        del self.errors[:-_KEPT_ERRORS]


class Sandbox:
    """Runs one program at a time (context manager). If `walls` and `config` are warm, one guest process runs all
    programs; otherwise each program gets a new one.

    Start it in a thread that lives as long as the sandbox, because bubblewrap ends with the thread that started it. A
    fork of the process starts a guest of its own.

    Example::

        with Sandbox(walls, SandboxConfig()) as sandbox:
            assert sandbox.run({"source": "print(int(input()) + 1)"}, b"41", seconds=2).output == b"42\\n"
    """

    def __init__(self, walls: Walls, config: SandboxConfig) -> None:
        self.walls = walls
        self._config = config
        self._keep = walls.warm and config.warm
        self._group: ProgramGroup | None = None
        self._user: SandboxUser | None = None
        self._guest: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._words: int | None = None  # standard error of the guest and bubblewrap
        self._process = os.getpid()  # that has started the guest

    def start(self) -> None:
        """Start the guest, if it is not running.

        Raises:
            SandboxFailed: these walls cannot be set up here; the message says why.
        """
        self._let_go_after_a_fork()
        if self._guest is not None:
            return
        try:
            self._start()
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            raise self._failed(problem) from error
        except BaseException:  # a guest that has not got its settings takes no orders
            self._end()
            raise

    def run(self, task: Mapping[str, Any], given: bytes, seconds: float, patience: float | None = None) -> ProgramEnd:
        """Run the program of a task with `given` as its standard input; starts the guest if needed. `task`: the
        dictionary that `script.perform` takes.

        Args:
            seconds: limit on CPU time. A program that computes in parallel gets at least as much wall-clock time.
            patience: limit on wall-clock time; None: `clock_limit(seconds)`.

        Raises:
            SandboxFailed: the program could not be run.
        """
        self.start()
        assert self._control is not None
        patience = clock_limit(seconds) if patience is None else patience
        try:
            with (
                _file(given) as input_,
                _file(marshal.dumps(dict(task))) as task_,
                _Pipe() as output,
                _Pipe() as errors,
            ):
                descriptors = [input_, output.write, errors.write, task_]
                socket.send_fds(self._control, [ORDER.pack(seconds, patience)], descriptors)
                output.close_write()
                errors.close_write()
                reply, streams = self._follow(output.read, errors.read, time.monotonic() + patience + _GRACE)
        except OSError as error:
            raise self._failed(str(error)) from error
        except BaseException:  # such as KeyboardInterrupt: the guest's report would be taken for the next program's
            self._end()
            raise
        status, timed_out, *used = REPLY.unpack_from(reply)
        if problem := reply[REPLY.size :].decode(errors="replace"):
            raise self._failed(problem)
        if not self._keep:
            self._end()
        said = bytes(streams.output), bytes(streams.errors)
        silent = time.monotonic() - streams.heard
        return ProgramEnd(status, timed_out, streams.flooded, *said, *used, silent)  # type: ignore[call-arg]

    def close(self) -> None:
        """End the guest and everything that runs in the sandbox."""
        self._let_go_after_a_fork()
        self._end()
        for held in (self._group, self._user):
            if held is not None:
                held.close()
        self._group = self._user = None

    def _let_go_after_a_fork(self) -> None:
        """Close the descriptors of a guest that belongs to the process of which this one is a fork. Two processes that
        sent orders to one guest would get each other's replies."""
        if self._process == os.getpid():
            return
        if self._control is not None:
            self._control.close()
        if self._words is not None:
            os.close(self._words)
        if self._user is not None:
            self._user.close()
        if self._guest is not None:
            self._guest.poll()  # it is no child of this process, and so counts as ended
        self._control = self._guest = self._words = self._user = self._group = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        config, walls = self._config, self.walls
        if walls.group and self._group is None:
            memory, processes = (config.memory_mib << 20) + _GUEST_BYTES, config.processes + _GUEST_PROCESSES
            self._group = ProgramGroup.create(memory, processes)
        if self._user is None:
            self._user = SandboxUser()
        interpreter = find_interpreter(walls, self._user.uid)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words = memory_file("stretto-words")
        with theirs, _Pipe() as told:
            self._guest = subprocess.Popen(
                command(walls, interpreter, config, theirs.fileno(), told.write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                pass_fds=(theirs.fileno(), told.write),
                env={},  # bubblewrap's own environment can be read in the sandbox
                cwd="/",
                start_new_session=True,
            )
            told.close_write()
            self._control.send(guest_program(interpreter))  # the guest starts up while it is added to its group
            if self._group is not None:
                self._group.add(_told_process(told.read, time.monotonic() + _START_SECONDS))
        self._control.settimeout(_START_SECONDS)
        self._introduce(guest_settings(walls, interpreter, config, self._user.uid))

    def _introduce(self, settings: Mapping[str, Any]) -> None:
        """Send the guest its settings, and wait until it is ready; OSError if it does not become so."""
        assert self._control is not None
        proc = place("/proc")
        try:
            socket.send_fds(self._control, [marshal.dumps(dict(settings))], [proc])
        finally:
            os.close(proc)
        if self._heard() != b"ready":
            raise OSError("the guest does not become ready")

    def _follow(self, output: int, errors: int, until: float) -> tuple[bytes, _Streams]:
        """Read the program's output until the guest reports its end; returns the packed report and the output. A
        program that writes too much is ended. `output` and `errors`: descriptors; `until`: `time.monotonic`.

        Raises:
            OSError: the guest is gone, or silent.
        """
        assert self._control is not None
        control, streams = self._control.fileno(), _Streams(self._config.output_mib << 20)
        takers = {output: streams.take_output, errors: streams.take_errors}
        poll = select.poll()
        for descriptor in (control, *takers):
            poll.register(descriptor, select.POLLIN)
        reply, stopped = b"", False
        while not reply or takers:
            ready = poll.poll(0 if reply else max(0.0, until - time.monotonic()) * 1000)
            if not reply and not ready:
                raise OSError("the guest does not say how the program ended")
            if reply and (not ready or time.monotonic() > until):
                break  # without namespaces, a process that the program left may keep the pipe open
            for descriptor, _ in ready:
                if descriptor == control:
                    reply = self._heard()
                    poll.unregister(control)
                elif chunk := os.read(descriptor, _READ):
                    takers[descriptor](chunk)
                else:
                    poll.unregister(descriptor)
                    del takers[descriptor]
            if streams.flooded and not reply and not stopped:
                self._control.send(_STOP)
                stopped = True
        return reply, streams

    def _heard(self) -> bytes:
        assert self._control is not None
        message = self._control.recv(_LARGEST_REPLY)
        if not message:
            raise OSError("the guest is gone")
        return message

    def _failed(self, problem: str) -> SandboxFailed:
        """End the guest, and return the exception to raise, with the last line of the guest's standard error."""
        words = self._last_words()
        self._end()
        return SandboxFailed(f"{problem}: {words}" if words else problem)

    def _last_words(self) -> str:
        if self._words is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            if self._guest is not None:
                self._guest.wait(0.1)
        text = os.pread(self._words, _KEPT_ERRORS, 0).decode(errors="replace").strip()
        return text.rpartition("\n")[2][:300]

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._guest is not None:
            try:  # the guest ends when its socket is closed, and bubblewrap with it
                self._guest.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._guest.kill()
                self._guest.wait()
        if self._words is not None:
            os.close(self._words)
        self._control = self._guest = self._words = None


def _told_process(descriptor: int, until: float) -> int:
    """Pid of the guest, which bubblewrap writes to `descriptor` before the guest starts; OSError after `until`."""
    told, poll = b"", select.poll()
    poll.register(descriptor, select.POLLIN)
    while not told.rstrip().endswith(b"}"):  # it writes in pieces
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise OSError(f"bubblewrap has not begun within {_START_SECONDS:g} s")
        piece = os.read(descriptor, _READ)
        if not piece:
            raise OSError("bubblewrap ended before the guest began")
        told += piece
    return int(json.loads(told)["child-pid"])


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """In-memory file with this content, positioned at its beginning (context manager of its descriptor)."""
    with open(memory_file("stretto-input"), "w+b") as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


class _Pipe:
    """Descriptors of both ends of a pipe, each closed only once (context manager)."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._open = {self.read, self.write}

    def close_write(self) -> None:
        self._close(self.write)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(self.read)
        self._close(self.write)
