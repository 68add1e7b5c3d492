"""Functions that only Linux has: descriptors of processes (pidfd), leases on files, options of memory, requests of a
process about itself (prctl), and probes of silent connections.

A lease is refused while another process has the file open or mapped. An overlay file system grants one although the
file is mapped; so each answer is tested with a mapping of the file itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import sys
from collections.abc import Mapping


def end_of(pid: int) -> int:
    """Open a descriptor (pidfd) that becomes readable when the process ends; the caller closes it.

    Raises:
        ProcessLookupError: the process has ended, and was waited for.
        OSError: there are too many descriptors, or the system lacks pidfd.
    """
    if sys.platform == "linux":
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no descriptors of processes")


def send_signal(end: int, number: signal.Signals) -> None:
    """Send a signal to the process of `end`, a descriptor from `end_of`.

    Raises:
        ProcessLookupError: the process has ended, and was waited for.
        OSError: the system lacks pidfd.
    """
    if sys.platform == "linux":
        signal.pidfd_send_signal(end, number)
    else:
        raise OSError(errno.ENOSYS, f"{sys.platform} has no descriptors of processes")


def has_exited(pid: int) -> bool:
    """Whether the child `pid` has exited, or was reaped already. The call does not reap it, so that it can still be
    waited for. Raises OSError where the system cannot say."""
    if sys.platform == "linux":
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was reaped already
            return True
    raise OSError(errno.ENOSYS, f"{sys.platform} cannot look at a child without waiting for it")


_FAILED = ctypes.c_void_p(-1).value


def take_lease(path: str | os.PathLike[str], file: int) -> bool:
    """Take a write lease (fcntl) on the file at `path`, which the caller has open for writing as the descriptor `file`.
    False, without a lease, if something else has the file open or mapped, or if that cannot be known. Everybody who
    opens the file during the lease waits until `end_lease`, or until the descriptor is closed."""
    with contextlib.suppress(OSError):  # the file system has no leases
        return _tells_of_mappings(path, file) and _granted(file)
    return False


def end_lease(file: int) -> None:
    """Let others open the file again. Does nothing if there is no lease."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _tells_of_mappings(path: str | os.PathLike[str], file: int) -> bool:
    """Whether the file system refuses a lease on the file while it is mapped, with no other descriptor open."""
    library = ctypes.CDLL(None)  # Python's own mmap keeps a descriptor
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    reader = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        place = library.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, reader, 0)
    finally:
        os.close(reader)
    if place == _FAILED:
        return False
    try:
        return not _granted(file)
    finally:
        end_lease(file)
        library.munmap(place, mmap.PAGESIZE)


def _granted(file: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # sent when somebody opens the file; ignored by default
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def set_memory(options: Mapping[int, int]) -> None:
    """Set options of glibc's allocator (mallopt): value by option number; another C library is left as it is."""
    with contextlib.suppress(AttributeError):
        option = ctypes.CDLL(None).mallopt
        for name, value in options.items():
            option(name, value)


def memory_file(name: str) -> int:
    """Create a file in memory, and return its descriptor, which programs that this process starts do not inherit.
    `name`: shown in ``/proc`` only. Raises OSError if there are too many descriptors, or the system lacks memfd."""
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no files in memory")


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process the signal `number` when its parent ends, even if this process hangs
    then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_descendants() -> None:
    """Make this process the parent of its descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def notice_silence(connected: socket.socket, seconds: int) -> None:
    """Enable TCP keepalive probes that close an idle connection after `seconds` without a response.

    A plain timeout would not do: a completion may take longer than a peer may be away.
    """
    asks = max(1, seconds // 4)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, asks)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
