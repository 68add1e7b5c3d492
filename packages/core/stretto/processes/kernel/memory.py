"""Memory options of the C library, and in-memory files of the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Mapping


def set_memory(options: Mapping[int, int]) -> None:
    """Set options of glibc's allocator (mallopt); another C library is left as it is."""
    with contextlib.suppress(AttributeError):
        option = ctypes.CDLL(None).mallopt
        for name, value in options.items():
            option(name, value)


def memory_file(name: str) -> int:
    """Create a file in memory; its descriptor is closed in programs that this process starts.

    Raises:
        OSError: there are too many descriptors, or the system lacks memfd.
    """
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no files in memory")
