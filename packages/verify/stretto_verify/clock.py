"""Wall-clock limits derived from CPU time limits."""

from __future__ import annotations

_TIMES, _MORE = 10, 60.0


def clock_limit(seconds: float) -> float:
    """Wall-clock limit in seconds for work that may use `seconds` of CPU time: ten times as much, but at most 60 s
    more. It ends work that waits instead of computing, or gets no CPU."""
    return seconds + min((_TIMES - 1) * seconds, _MORE)
