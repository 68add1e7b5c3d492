"""Start of every role process: parent-death signal, heartbeats, safe logging on a full disk, memory limit."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stretto.processes.kernel import signal_with_parent

#: Environment variables of a role: the process that it ends with, and the descriptor that takes its heartbeats.
PARENT, HEARTBEAT = "STRETTO_PARENT", "STRETTO_HEARTBEAT"
HEARTBEAT_SECONDS = 1.0


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent process ends, even if this one hangs at that moment. Exits at once,
    with code 0, if `parent` is not the parent (any more)."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        sys.exit(0)


def keep_exit_codes() -> None:
    """If SIGCHLD is ignored, set its default again, so that this process, and those that it starts, get the exit codes
    of their children. Some supervisors start their programs with SIGCHLD ignored; then the kernel reaps children, and
    each of them seems to have ended with exit code 0."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def begin_role() -> None:
    """Set up this process as a role: it ends with its parent (`end_with_conductor`), and a thread sends heartbeats. A
    role started by hand, without `PARENT` and `HEARTBEAT` in its environment, does neither."""
    end_with_conductor()
    send_heartbeats()


def end_with_conductor() -> None:
    """Make this process end with its parent, if a conductor has started it, and keep it running when its log cannot be
    written because the disk is full. A role that sends its heartbeats itself (`own_heartbeat`) calls this in place of
    `begin_role`."""
    survive_a_full_disk()
    keep_exit_codes()
    if (parent := os.environ.pop(PARENT, None)) is not None:
        die_with_parent(int(parent))


def survive_a_full_disk() -> None:
    """Replace standard output and error by streams that drop data that cannot be written, instead of raising."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Forgiving(number)), encoding="utf-8", errors="replace", line_buffering=True)
        for number in (1, 2)
    )


def bound_memory(limit: int) -> None:
    """Limit this process, and those that it starts, to `limit` bytes of data each, or less by a hard limit in force,
    for good. Address space is not limited, since torch and CUDA reserve far more than they use."""
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Forgiving(io.RawIOBase):
    """Writes to a descriptor and drops what cannot be written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return len(data)


def send_heartbeats() -> None:
    """Start a thread that sends one heartbeat a second until the process ends; none if the role has no pipe for it.

    A long step does not stop the heartbeats; a stopped process, or an interpreter that is stuck in one call, does.
    """
    descriptor = os.environ.pop(HEARTBEAT, None)
    if descriptor is not None:
        threading.Thread(target=_beat, args=(int(descriptor),), name="heartbeat", daemon=True).start()


def own_heartbeat() -> Callable[[], None]:
    """Return a function that sends one heartbeat; it does nothing if the role has no pipe for it. For a role whose main
    loop calls foreign code: without a thread, its heartbeats stop when that code hangs."""
    descriptor = os.environ.pop(HEARTBEAT, None)
    return (lambda: None) if descriptor is None else partial(_send, int(descriptor))


def _beat(descriptor: int) -> None:
    while True:
        try:
            _send(descriptor)
        except OSError:  # the reader has ended
            return
        time.sleep(HEARTBEAT_SECONDS)


def _send(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):  # the pipe is full: the conductor has not read for a while
        os.write(descriptor, b".")
