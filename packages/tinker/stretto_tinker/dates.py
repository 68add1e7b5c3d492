"""Dates (Unix time) for clients and for the lifetime of checkpoints, which outlive the process."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> float:
    """Current Unix time in seconds."""
    return time.time()


def written(seconds: float) -> str:
    """Format a Unix time in the SDK's date format (ISO 8601, UTC).

    >>> written(0.5)
    '1970-01-01T00:00:00.500000+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
