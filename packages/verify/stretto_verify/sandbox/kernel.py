"""Linux-only descriptors: in-memory files, and O_PATH handles of folders."""

from __future__ import annotations

import errno
import os
import sys


def memory_file(name: str) -> int:
    """Create a file in memory; returns its descriptor.

    Raises:
        OSError: there are too many descriptors, or the system lacks memfd.
    """
    if sys.platform == "linux":
        return os.memfd_create(name)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no files in memory")


def place(path: str) -> int:
    """Open a folder without read access (O_PATH); return the descriptor.

    Raises:
        OSError: there is no such folder, or the system lacks O_PATH.
    """
    if sys.platform == "linux":
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    raise OSError(errno.ENOSYS, f"{sys.platform} opens no folders without reading them")
