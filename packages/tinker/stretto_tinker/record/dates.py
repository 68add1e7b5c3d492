"""Dates, which clients read; the lifetime of a checkpoint is counted in them, since it outlasts the process."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def written(seconds: float) -> str:
    """A date as the SDK reads it.

    >>> written(0.5)
    '1970-01-01T00:00:00.500000+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
