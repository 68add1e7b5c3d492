"""A process of a run does not outlive the process that started it, and tells it now and then that it is not hung. A
disk that has no room for its log does not end it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: The process that a role ends with, and the descriptor of the pipe on which it tells that it lives: its environment
#: has both.
PARENT, HEARTBEAT = "STRETTO_PARENT", "STRETTO_PULSE"
PULSE_SECONDS = 1.0

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process `parent` ends, even if this one hangs at that moment."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        sys.exit(0)


def cpu_ticks(pid: int) -> int:
    """Hundredths of a second for which a process has computed, or the kernel for it; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def begin_role() -> None:
    """What a role does first: it ends with its parent from now on, and gives signs of life. One that was started by
    hand has nobody to end with, and nobody to give signs to."""
    survive_a_full_disk()
    if (parent := os.environ.pop(PARENT, None)) is not None:
        die_with_parent(int(parent))
    send_heartbeats()


def survive_a_full_disk() -> None:
    """Let standard output and standard error leave out what the log's disk does not take, instead of raising for it."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Forgiving(number)), encoding="utf-8", errors="replace", line_buffering=True)
        for number in (1, 2)
    )


class _Forgiving(io.RawIOBase):
    """Writes to a descriptor; what cannot be written is left out."""

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
    """Write one byte a second on the pulse's pipe, if there is one, until the process ends.

    A thread of its own does it, so that a long step is no silence; a process that is stopped, or whose interpreter is
    stuck in one call, is silent.
    """
    descriptor = os.environ.pop(HEARTBEAT, None)
    if descriptor is not None:
        threading.Thread(target=_beat, args=(int(descriptor),), name="pulse", daemon=True).start()


def _beat(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    while True:
        try:
            with contextlib.suppress(BlockingIOError):  # nobody reads for a while: what is there says enough
                os.write(descriptor, b".")
        except OSError:  # whoever listened is gone
            return
        time.sleep(PULSE_SECONDS)
