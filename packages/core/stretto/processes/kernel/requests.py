"""Requests of a process about itself (prctl)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_with_parent(number: signal.Signals) -> None:
    """Ask for a signal when the parent ends, even if this process hangs at that moment."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_descendants() -> None:
    """Become the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
