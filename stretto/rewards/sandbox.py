"""A sandbox as the grader sees it: hand over a program and an input, get back what it wrote and how it ended.

What a program does to itself (an exception, a signal, a limit) is in the record of how it `Ended`; that the sandbox
could not run it at all is a `SandboxFailed`. The one is a wrong answer, the other is none.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from stretto.core.records import Record
from stretto.rewards.cgroups import ProgramGroup
from stretto.rewards.code_config import CodeConfig
from stretto.rewards.functions import Undecided
from stretto.rewards.sandbox_guest import ORDER, REPLY
from stretto.rewards.sandbox_walls import Walls, command, find_interpreter, guest_program, guest_settings

_START_SECONDS = 20.0
_GRACE = 5.0  # seconds beyond a program's own limit after which the guest itself is given up
_END_SECONDS = 2.0
_KEPT_ERRORS = 4096  # bytes of the last errors, to be shown
_READ = 1 << 16
_LARGEST_REPLY = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_GUEST_BYTES, _GUEST_PROCESSES = 32 << 20, 2  # what the guest itself takes of its group


class SandboxFailed(Undecided):
    """The sandbox could not run a program; nothing is known about the program."""


class Ended(Record, frozen=True):
    """How a program ended. `status` is its exit status, or minus the signal that ended it."""

    status: int
    timed_out: bool
    flooded: bool  #: ended because it wrote too much
    output: bytes
    errors: bytes  #: the end of what it wrote there
    seconds: float
    cpu_seconds: float
    memory: int  #: bytes, the most that one of its processes had

    @property
    def well(self) -> bool:
        return self.status == 0 and not self.timed_out and not self.flooded

    @property
    def how(self) -> str:
        """``time limit``, ``signal 9``, ``exit status 1: ZeroDivisionError: division by zero``."""
        if self.timed_out:
            return "time limit"
        if self.flooded:
            return "output limit"
        if self.status < 0:
            return f"signal {-self.status}"
        last = self.errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit status {self.status}" + (f": {last[:200]}" if last else "")


class _Reply(NamedTuple):
    status: int
    timed_out: bool
    seconds: float
    cpu_seconds: float
    memory: int
    problem: str

    @classmethod
    def parsed(cls, message: bytes) -> Self:
        status, timed_out, seconds, cpu_seconds, memory = REPLY.unpack_from(message)
        problem = message[REPLY.size :].decode(errors="replace")
        return cls(status, timed_out, seconds, cpu_seconds, memory, problem)


class Sandbox:
    """One slot: runs one program at a time. Warm walls keep their guest, others get a new one for each program.

    Start it from a thread that lives as long as it does: the kernel ends bubblewrap with the thread that started it.

    Example::

        with Sandbox(walls, CodeConfig()) as sandbox:
            assert sandbox.run(b'{"source": "print(int(input()) + 1)"}', b"41", seconds=2).output == b"42\\n"
    """

    def __init__(self, walls: Walls, config: CodeConfig) -> None:
        self.walls = walls
        self._config = config
        self._keep = walls.warm and config.warm
        self._group: ProgramGroup | None = None
        self._guest: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._words: int | None = None  # what the guest and bubblewrap say on their standard error

    def start(self) -> None:
        """Start the guest, if there is none.

        Raises:
            SandboxFailed: these walls cannot be raised here; the message says why.
        """
        if self._guest is not None:
            return
        try:
            self._start()
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            raise self._failed(problem) from error

    def run(self, task: Mapping[str, Any], given: bytes, seconds: float) -> Ended:
        """Run the program of a task (see `sandbox_guest.perform`) with `given` as its standard input.

        Raises:
            SandboxFailed: it could not be run.
        """
        self.start()
        assert self._control is not None
        try:
            with (
                _file(given) as input_,
                _file(marshal.dumps(dict(task))) as task_,
                _Pipe() as output,
                _Pipe() as errors,
            ):
                descriptors = [input_, output.write, errors.write, task_]
                socket.send_fds(self._control, [ORDER.pack(seconds)], descriptors)
                output.close_write()
                errors.close_write()
                reply, flooded, written = self._follow(output.read, errors.read, time.monotonic() + seconds + _GRACE)
        except OSError as error:
            raise self._failed(str(error)) from error
        if reply.problem:
            raise self._failed(reply.problem)
        if not self._keep:
            self._end()
        return Ended(
            status=reply.status,
            timed_out=reply.timed_out,
            flooded=flooded,
            output=bytes(written[0]),
            errors=bytes(written[1][-_KEPT_ERRORS:]),
            seconds=reply.seconds,
            cpu_seconds=reply.cpu_seconds,
            memory=reply.memory,
        )

    def close(self) -> None:
        """End the guest, and with it all that runs in the sandbox."""
        self._end()
        if self._group is not None:
            self._group.close()
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        config, walls = self._config, self.walls
        if walls.group and self._group is None:
            self._group = ProgramGroup.create(
                (config.memory_mib << 20) + _GUEST_BYTES, config.processes + _GUEST_PROCESSES
            )
        interpreter = find_interpreter(walls)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words = os.memfd_create("stretto-words")
        with theirs:
            self._guest = subprocess.Popen(
                command(walls, interpreter, config, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                pass_fds=(theirs.fileno(),),
                env={},  # bubblewrap's own environment can be read in the sandbox
                cwd="/",
                start_new_session=True,
            )
        self._control.settimeout(_START_SECONDS)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._introduce(guest_program(interpreter), guest_settings(walls, interpreter, config))

    def _introduce(self, program: bytes, settings: Mapping[str, Any]) -> None:
        """Put the guest into its group, and tell it who it is."""
        assert self._control is not None
        hello, ancillary, _, _ = self._control.recvmsg(_LARGEST_REPLY, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not hello:
            raise OSError("the guest ended before it said hello")
        self._control.send(program)
        if self._group is not None:
            self._group.add(_CREDENTIALS.unpack(ancillary[0][2])[0])
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            socket.send_fds(self._control, [marshal.dumps(dict(settings))], [proc])
        finally:
            os.close(proc)
        if self._heard() != b"ready":
            raise OSError("the guest does not know what it should")

    def _follow(self, output: int, errors: int, until: float) -> tuple[_Reply, bool, tuple[bytearray, bytearray]]:
        """Read what the program writes until the guest says how it ended.

        Raises:
            OSError: the guest is gone, or silent.
        """
        assert self._control is not None
        control, limit = self._control.fileno(), self._config.output_mib << 20
        written, dropped, flooded = (bytearray(), bytearray()), 0, False
        reply: _Reply | None = None
        poll = select.poll()
        for descriptor in (control, output, errors):
            poll.register(descriptor, select.POLLIN)
        open_ends = {output: written[0], errors: written[1]}
        while reply is None or open_ends:
            ready = poll.poll(0 if reply else max(0.0, until - time.monotonic()) * 1000)
            if not ready and reply:
                break  # without namespaces a process that the program left behind may keep the other end open
            if not ready:
                raise OSError("the guest does not say how the program ended")
            for descriptor, _ in ready:
                if descriptor == control:
                    reply = _Reply.parsed(self._heard())
                    poll.unregister(control)
                elif chunk := os.read(descriptor, _READ):
                    open_ends[descriptor] += chunk
                else:
                    poll.unregister(descriptor)
                    del open_ends[descriptor]
            if len(written[1]) > _READ:
                dropped += len(written[1]) - _KEPT_ERRORS
                del written[1][:-_KEPT_ERRORS]
            if not flooded and max(len(written[0]), dropped) > limit:
                flooded = True
                if reply is None:
                    self._control.send(b"k")
            if flooded:
                del written[0][limit:]
        return reply, flooded, written

    def _heard(self) -> bytes:
        assert self._control is not None
        message = self._control.recv(_LARGEST_REPLY)
        if not message:
            raise OSError("the guest is gone")
        return message

    def _failed(self, problem: str) -> SandboxFailed:
        """The exception to raise; the guest, whatever its state, is not used again."""
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
            try:  # it ends by itself, and bubblewrap with it: so every process is waited for by its parent
                self._guest.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._guest.kill()
                self._guest.wait()
        if self._words is not None:
            os.close(self._words)
        self._control = self._guest = self._words = None


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A file in memory, to be read from its beginning."""
    descriptor = os.memfd_create("stretto-input")
    try:
        with memoryview(content) as rest:
            at = 0
            while at < len(rest):
                at += os.write(descriptor, rest[at:])
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


class _Pipe:
    """Both ends of a pipe, each closed once."""

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
