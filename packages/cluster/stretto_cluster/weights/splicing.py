"""Bytes from a socket into a file without a copy in this process, where the kernel can do that (splice)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from typing import Self

_BYTES = 1 << 20


class Splice:
    """Context manager: a pipe of the kernel between a socket and a file; on other systems than Linux, a buffer of this
    process.

    Example::

        with Splice() as splice:
            count = splice.take(connection.fileno(), 1 << 20)
            splice.place(file.fileno(), offset)
    """

    def __enter__(self) -> Self:
        self._near, self._far = os.pipe()
        self._taken, self._data = 0, b""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the user has too many pages in pipes: a small pipe is slower, no more
                fcntl.fcntl(self._far, fcntl.F_SETPIPE_SZ, _BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._near)
        os.close(self._far)

    def take(self, source: int, most: int) -> int:
        """Take up to `most` bytes, 1 MiB at most, that have arrived at the non-blocking socket with the descriptor
        `source`. Returns their number, 0 if the peer has closed the connection. Call `place` before the next `take`.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the connection is broken.
        """
        if sys.platform == "linux":
            self._taken = os.splice(source, self._far, min(most, _BYTES))
        else:
            self._data = os.read(source, min(most, _BYTES))
            self._taken = len(self._data)
        return self._taken

    def place(self, target: int, offset: int) -> None:
        """Write all bytes of the last `take` to the file descriptor `target`, at `offset`.

        Raises:
            OSError: the disk is full, or fails.
        """
        if sys.platform == "linux":
            while self._taken:
                try:
                    placed = os.splice(self._near, target, self._taken, offset_dst=offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    break  # this file system does not splice
                self._taken, offset = self._taken - placed, offset + placed
            self._data = os.read(self._near, self._taken) if self._taken else b""
        left = memoryview(self._data)
        while left:
            written = os.pwrite(target, left, offset)
            left, offset = left[written:], offset + written
        self._taken, self._data = 0, b""
