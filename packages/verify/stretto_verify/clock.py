"""Limits by the clock that belong to limits of processor time."""

from __future__ import annotations

_TIMES, _MORE = 10, 60.0


def clock_limit(seconds: float) -> float:
    """Seconds by the clock for something that may take `seconds` of processor time: ten times as many, and at most
    60 s more. What waits instead of computing, or gets no processor, ends there."""
    return seconds + min((_TIMES - 1) * seconds, _MORE)
