"""Busy times of an engine: consecutive steps are merged into one span."""

from __future__ import annotations

from collections import deque

from stretto.core.events import Span

#: Steps within this many seconds of each other are one span.
_GAP = 0.02

#: Most spans kept for `drain`. A run drains them all the time; a server used without a run may never do.
MOST_SPANS = 16_384


class BusySpans:
    """Collects the spans of one role. A span that continues the last one (same name and version, a gap below 20 ms)
    extends it. Only the newest `MOST_SPANS` are kept.

    >>> stretches = BusySpans("engine-0")
    >>> for start in (0.0, 0.002, 0.004): stretches.add("generate", start, start + 0.002, version=3)
    >>> [(span.name, span.start, span.end) for span in stretches.drain()]
    [('generate', 0.0, 0.006)]
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._done: deque[Span] = deque(maxlen=MOST_SPANS)
        self._last: Span | None = None

    def add(self, name: str, start: float, end: float, version: int, bytes: int = 0) -> None:
        """Add a span; times are seconds of `time.monotonic`."""
        last = self._last
        if last is not None:
            if (last.name, last.version) == (name, version) and start - last.end < _GAP:
                start, bytes = last.start, last.bytes + bytes
            else:
                self._done.append(last)
        self._last = Span(role=self._role, name=name, start=start, end=end, version=version, bytes=bytes)

    def drain(self) -> list[Span]:
        """Return all spans since the last call, and forget them."""
        if self._last is not None:
            self._done.append(self._last)
        drained, self._last = list(self._done), None
        self._done.clear()
        return drained
