"""Spans: the activities of a run's roles, for the timeline; the spans of an engine's consecutive steps are merged. Two
further records: the progress of supervised training, and a call of a session.

A span is one activity of a role with start and end; the timeline plot has one lane per role. Times are seconds of the
machine's monotonic clock (`time.monotonic`), which all processes of a machine share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from stretto.core.frames import Count, Moment, Name, Whole
from stretto.core.records import Record


class Span(Record, frozen=True):
    """One activity of a role, from `start` to `end`.

    Example: ``Span(role="engine-0", name="load", start=12.031, end=12.044, version=7)``

    Names in use: ``generate``, ``map``, ``load``, ``recompute``, ``prove`` (engines); ``pull`` (the mirror of a
    machine); ``proximal``, ``update``, ``again`` (repeats a step of an earlier trainer process), ``publish`` (copies a
    version), ``write`` (writes the copy to files, beside other work), ``checkpoint`` (trainer); ``score``
    (rewards); ``evaluate`` (conductor). `bytes`: amount of data moved. Not applicable: `version` -1, `bytes` 0.
    """

    role: Name
    name: Name
    start: Moment
    end: Moment
    version: Whole = -1
    bytes: Count = 0

    def shifted(self, seconds: float) -> Span:
        """The same span on a clock that is `seconds` ahead, such as the clock of another machine."""
        return msgspec.structs.replace(self, start=self.start + seconds, end=self.end + seconds) if seconds else self


#: Steps within this many seconds of each other are one span.
_GAP = 0.02

#: Most spans kept for `drain`. A run drains them all the time; a server used without a run may never do.
MOST_SPANS = 16_384


class BusySpans:
    """Collects the spans of one role. A span that continues the last one (same name and version, a gap below 20 ms)
    extends it. Only the newest 16,384 are kept.

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
        """Add a span of work: `name` of the work, `start` and `end` in seconds of `time.monotonic`, version of the
        weights and moved bytes. A span of the same name and version that follows at once extends the one before."""
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


class SupervisedProgress(Record, frozen=True, tag=True):
    """Message: progress of supervised training, a warm start or preference learning. `step` of `steps` has ended;
    `loss` is in nats per completion token, or per pair; `seconds` since the training began. `accuracy`: of preferences,
    the share of pairs ranked correctly, else None."""

    step: int
    steps: int
    loss: float
    seconds: float = 0.0
    accuracy: float | None = None
    phase: str = "warm start"


@dataclass
class RecordedCall:
    """A call of a session: to a tool, or by an agent to the gateway. `number`: counts the session's calls from 0.
    `asked`: encoded request. `reply`: encoded reply; None while it has not come."""

    number: int
    asked: bytes
    reply: bytes | None = None
