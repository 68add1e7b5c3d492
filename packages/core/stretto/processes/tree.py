"""Processes in /proc: CPU time, memory, descendants, and killing of orphans."""

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
    """CPU time of a process in hundredths of a second, kernel time included; 0 once it has ended."""
    return sum(map(int, _fields_of(pid)[11:13]))


def spent_seconds(pid: int) -> float:
    """CPU seconds of a process, of its running descendants, and of those that these have waited for; 0 once it has
    ended. A child that ends meanwhile may be left out until the next call, and none counts twice."""
    ticks = (sum(map(int, _fields_of(one)[11:15])) for one in (pid, *descendants(pid)))
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _fields_of(pid: int) -> list[bytes]:
    return _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _content(path: str) -> bytes:
    """Content of a file in /proc; empty once its process has ended. (A `Path` takes several times as long, and the
    conductor reads hundreds of files each second.)"""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
    except OSError:
        return b""
    finally:
        os.close(file)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants, in bytes; 0 once it has ended. A page that several of them
    share counts once for each."""
    return sum(own_resident_bytes(one) for one in (pid, *descendants(pid)))


def own_resident_bytes(pid: int | None = None) -> int:
    """Resident memory of one process, by default (None) this one, without descendants, in bytes; 0 once it has
    ended."""
    try:
        return int(Path(f"/proc/{pid or os.getpid()}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):  # it has ended
        return 0


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid` that have not been waited for; none if `pid` itself has ended."""
    found = list[int]()
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _content(f"/proc/{pid}/task/{task}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid`, without itself: each child, followed by its own descendants."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_marked(mark: str) -> None:
    """Send SIGKILL to every process that was started with `mark`, a ``NAME=VALUE``, in its environment, also to
    orphans. Repeated until none is left, at most 20 times; processes of other users stay."""
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
    """Open descriptors of this process, including the one used to list them."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def threads() -> int:
    """Number of threads of this process."""
    return len(os.listdir("/proc/self/task"))
