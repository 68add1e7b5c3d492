"""Files that nobody else reads: leases of the kernel, which it refuses while another process has the file open or
mapped.

Only Linux has them. An overlay file system grants a lease although the file is mapped; so each answer is tested with a
mapping of the file itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import sys

_FAILED = ctypes.c_void_p(-1).value


def take_lease(path: str | os.PathLike[str], file: int) -> bool:
    """Take a lease on the file at `path`, which the caller has open for writing as the descriptor `file`. False,
    without a lease, if something else has the file open or mapped, or if that cannot be known. Everybody who opens the
    file during the lease waits until `end_lease`, or until the descriptor is closed."""
    with contextlib.suppress(OSError):  # the file system has no leases
        return _tells_of_mappings(path, file) and _granted(file)
    return False


def end_lease(file: int) -> None:
    """Let others open the file again. Does nothing if there is no lease."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _tells_of_mappings(path: str | os.PathLike[str], file: int) -> bool:
    """Whether a lease is refused because of a mapping alone."""
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
