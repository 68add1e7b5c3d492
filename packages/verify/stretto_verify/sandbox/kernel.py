"""Descriptors that only Linux gives: files in memory, and places without a right to read them."""

from __future__ import annotations

import errno
import os
import sys


def memory_file(name: str) -> int:
    """The descriptor of a new file in memory.

    Raises:
        OSError: there are too many descriptors, or the system has no such files.
    """
    if sys.platform == "linux":
        return os.memfd_create(name)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no files in memory")


def place(path: str) -> int:
    """A descriptor that names a folder, and reads nothing of it.

    Raises:
        OSError: there is no such folder, or the system has no such descriptors.
    """
    if sys.platform == "linux":
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    raise OSError(errno.ENOSYS, f"{sys.platform} opens no folders without reading them")
