"""Message channel over a socket pair between the conductor (asyncio) and a role that does one thing at a time
(blocking), and the main function of a role's process: it ends normally, when the conductor is gone, or with a reported
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import OutOfMemory, RoleDied, RoleFailed, StrettoError, UserError, WireError, described
from stretto.core.frames import LARGEST_BATCH, LARGEST_FRAME, LENGTH, Unframer, frame
from stretto.core.records import Record
from stretto.processes.event_loop import send
from stretto.processes.spawn import describe_exit

_READ_BYTES = 1 << 20

Received = TypeVar("Received")


class ConductorGone(Exception):
    """Raised in a role when the conductor has closed its end of the channel, so that the role should end."""


class RoleEnd(Generic[Received]):
    """The role's end of a channel to the conductor; its methods block the calling thread. `receive` has no deadline:
    when the conductor ends, the socket closes and `receive` returns None."""

    def __init__(
        self, descriptor: int, decoder: msgspec.msgpack.Decoder[Received], largest: int = LARGEST_FRAME
    ) -> None:
        """Take over the role's end of a socket, the `descriptor` inherited from the conductor. `decoder`: of received
        messages. `largest`: most bytes of a message that the conductor accepts; a larger one is not sent."""
        self._socket = socket.socket(fileno=descriptor)
        self._decoder, self._largest = decoder, largest
        self._unframer = Unframer(LARGEST_BATCH)  # the conductor is trusted
        self._bodies: deque[memoryview] = deque()
        self._sending = threading.Lock()

    def receive(self) -> Received | None:
        """Wait for the next message and return it; None when the conductor has closed its end."""
        while not self._bodies:
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionResetError:  # closed before it had read everything
                data = b""
            if not data:
                return None
            self._bodies.extend(self._unframer.feed(data))
        return self._decoder.decode(self._bodies.popleft())

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; safe from any thread.

        Raises:
            ConductorGone: the conductor has closed its end.
            WireError: the message has more than `largest` bytes.
        """
        whole = frame(message)
        if (size := len(whole) - LENGTH.size) > self._largest:
            raise WireError(f"it has {size:,} bytes; at most {self._largest:,} are allowed")
        with self._sending:
            try:
                self._socket.sendall(whole)
            except ConnectionError:
                raise ConductorGone from None


class ConductorEnd(Generic[Received]):
    """The conductor's end of a channel: each wait but `next` has a deadline, and errors name the role.

    A child of the role, or a fork server that hangs, may hold the role's end open. So the channel also closes when the
    role's process ends. Messages that the role has sent before can still be read.
    """

    def __init__(
        self, role: str, decoder: msgspec.msgpack.Decoder[Received], log: str = "", largest: int = LARGEST_FRAME
    ) -> None:
        """Make a socket pair; the role gets `far`. `role`, `log`: name and log path of the role, for errors. `decoder`:
        of received messages. `largest`: most bytes of a message from the role."""
        self.role = role
        self._log = log
        self._decoder = decoder
        self._unframer = Unframer(largest)
        self._bodies: deque[memoryview] = deque()
        self._near, self.far = socket.socketpair()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._opening = self._closed = False
        self._parting: asyncio.Task[None] | None = None

    async def open(self, ended: Callable[[], Awaitable[object]]) -> None:
        """Close the role's end here and start reading; call it once, after the role's process has inherited its end.
        `ended` waits until that process has ended. Raises RoleDied if the channel was closed while the role's process
        was being started."""
        if self._closed:
            raise RoleDied(self.role, "was given up while it was started", self._log)
        self.far.close()
        self._opening = True
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._near)
        finally:
            self._opening = False
            if self._closed:
                self.close()
        if not self._closed:
            self._parting = asyncio.create_task(self._end_with(ended), name=f"{self.role}: end of its connection")

    async def _end_with(self, ended: Callable[[], Awaitable[object]]) -> None:
        """Close the channel when the process has ended. No deadline: this end is closed by its owner."""
        await ended()
        with contextlib.suppress(OSError):  # it is closed already
            self._near.shutdown(socket.SHUT_RD)

    @property
    def is_open(self) -> bool:
        """Whether `open` has connected the channel; stays True after `close`."""
        return self._writer is not None

    async def send(self, message: msgspec.Struct) -> None:
        """Send one message; call it after `open`.

        Raises:
            DeadlineExceeded: the role did not take the message within 60 seconds.
            RoleDied: the role closed its end.
            WireError: the message has 4 GiB or more.
        """
        assert self._writer is not None, "open() comes first"
        try:
            async with deadline("conductor", f"{self.role} to take a message", 60):
                await send(self._writer, frame(message))
        except ConnectionError:
            raise RoleDied(self.role, "closed its connection", self._log) from None

    async def receive(self, awaited: str, seconds: float) -> Received:
        """Wait for the next message, at most `seconds`, and return it. `awaited` describes the message in errors.

        Raises:
            DeadlineExceeded: nothing came within `seconds`.
            RoleDied: the role closed its end, or has ended.
            WireError, MsgspecError: the message is larger than allowed, or cannot be decoded.
        """
        async with deadline("conductor", f"{self.role} {awaited}", seconds):
            return await self.next()

    async def next(self) -> Received:
        """Wait for the next message without a deadline, and return it. For a task that reads as long as the role runs.

        Raises:
            RoleDied: the role closed its end, or has ended.
            WireError, MsgspecError: the message is larger than allowed, or cannot be decoded.
        """
        assert self._reader is not None, "open() comes first"
        while not self._bodies:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise RoleDied(self.role, "closed its connection", self._log)
            self._bodies.extend(self._unframer.feed(data))
        return self._decoder.decode(self._bodies.popleft())

    def close(self) -> None:
        """Close both ends, also before or during `open`; a second call does nothing."""
        self._closed = True
        if self._parting is not None:
            self._parting.cancel()
        if self._writer is not None:
            self._writer.close()
        elif not self._opening:  # while `open` runs, the event loop uses the socket; `open` then closes it
            self._near.close()
            self.far.close()


_LAST_BYTES = 1 << 16  # of a log


def run_role(part: Callable[[], None], tell: Callable[[Failed], None]) -> int:
    """Run `part`, the work of a role's process; returns the process's exit code: 0, also if the conductor is gone;
    after a StrettoError its own `exit_code`, after an OSError that of RoleFailed. For these two the traceback goes to
    the role's log, and `tell` is called with the message for the conductor. Other exceptions are raised."""
    try:
        part()
    except ConductorGone:
        return 0
    except StrettoError as error:
        return _failed(str(error), error.exit_code, tell, again=isinstance(error, OutOfMemory))
    except OSError as error:
        return _failed(described(error), RoleFailed.exit_code, tell)
    return 0


def _failed(problem: str, exit_code: int, tell: Callable[[Failed], None], *, again: bool = False) -> int:
    traceback.print_exc()
    with contextlib.suppress(ConductorGone):  # the log has it
        tell(Failed(problem=problem, exit_code=exit_code, again=again))
    return exit_code


def users_mistake(death: RoleDied) -> RoleFailed | None:
    """Convert the end of a role with exit code 2, that of a UserError, to a RoleFailed. Its message is the text after
    the last line start ``ROLE: `` in the role's log. None for another end, or if the log has no such line."""
    if death.how != describe_exit(UserError.exit_code):
        return None
    try:
        with Path(death.log).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _LAST_BYTES))
            said = "\n" + log.read().decode(errors="replace")
    except OSError:  # the log is gone: how it ended is all that is known
        return None
    _, found, problem = said.rpartition(f"\n{death.role}: ")
    return RoleFailed(death.role, problem.strip(), UserError.exit_code) if found else None


class Failed(Record, frozen=True, tag=True):
    """Message: the role cannot continue. `problem` is meant for the user; the traceback is in the role's log.
    `again`: a new process may succeed, as after a device that was out of memory."""

    problem: str
    exit_code: int
    again: bool = False
