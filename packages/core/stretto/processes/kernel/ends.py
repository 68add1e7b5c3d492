"""Process descriptors (pidfd), to wait for and signal a process whose pid may be reused."""

from __future__ import annotations

import errno
import os
import signal
import sys


def end_of(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends.

    Raises:
        ProcessLookupError: it has ended, and was waited for.
        OSError: there are too many descriptors, or the system lacks pidfd.
    """
    if sys.platform == "linux":
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, f"{sys.platform} has no descriptors of processes")


def send_signal(end: int, number: signal.Signals) -> None:
    """Send a signal to the process of a descriptor from `end_of`.

    Raises:
        ProcessLookupError: it has ended.
    """
    if sys.platform == "linux":
        signal.pidfd_send_signal(end, number)
    else:
        raise OSError(errno.ENOSYS, f"{sys.platform} has no descriptors of processes")


def has_exited(pid: int) -> bool:
    """Whether a child has exited; unless the kernel reaps it (SIGCHLD is ignored), it can still be waited for
    afterwards. Raises OSError where the system cannot say."""
    if sys.platform == "linux":
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was reaped already
            return True
    raise OSError(errno.ENOSYS, f"{sys.platform} cannot look at a child without waiting for it")
