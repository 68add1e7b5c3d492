"""Processes as the kernel shows them in /proc: processor time, memory, descendants, and how to end orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_SWEEPS = 20  # a process that forks faster than it is found
_PAUSE_SECONDS = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_ticks(pid: int) -> int:
    """Hundredths of a second for which a process has computed, or the kernel for it; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def resident_bytes(pid: int) -> int:
    """Memory in use of a process and of all its descendants; 0 once it has ended. What they share counts for each."""
    return sum(own_resident_bytes(one) for one in (pid, *descendants(pid)))


def own_resident_bytes(pid: int | None = None) -> int:
    """Memory in use of one process alone, this one if no other is given; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # it has ended
        return 0


def children(pid: int) -> list[int]:
    """The processes that a process has started and not waited for."""
    found = list[int]()
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """The children of a process, each followed by its own descendants."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_marked(mark: str) -> None:
    """SIGKILL to every process that was started with this ``NAME=VALUE`` in its environment, also to those that are
    descendants of nothing any more because their parents have exited."""
    for _ in range(_SWEEPS):
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _has(pid, mark.encode())]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def open_descriptors() -> list[int]:
    """The descriptors that this process has open, and the one that the list itself was read by."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def threads() -> int:
    """The threads of this process."""
    return len(os.listdir("/proc/self/task"))
