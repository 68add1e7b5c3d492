"""Spans: the activities of a run's roles, for the timeline. Also calls of sessions, and the progress of supervised
training.

A span is one activity of a role with start and end; the timeline plot has one lane per role. Times are seconds of the
machine's monotonic clock (`time.monotonic`), which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stretto.core.records import Record


class Span(Record, frozen=True):
    """One activity of a role, from `start` to `end`.

    Example: ``Span(role="engine-0", name="load", start=12.031, end=12.044, version=7)``

    Names in use: ``generate``, ``map``, ``load``, ``recompute``, ``prove`` (engines); ``pull`` (the mirror of a
    machine); ``proximal``, ``update``, ``again`` (a step that an earlier trainer process has done), ``publish`` (a
    version is copied), ``write`` (the copy is written, beside other work), ``checkpoint`` (trainer); ``score``
    (rewards); ``evaluate`` (conductor). `bytes`: amount of data moved, 0 if not applicable.
    """

    role: str
    name: str
    start: float
    end: float
    version: int = -1
    bytes: int = 0

    def shifted(self, seconds: float) -> Span:
        """The same span on a clock that is `seconds` ahead, such as the clock of another machine."""
        return msgspec.structs.replace(self, start=self.start + seconds, end=self.end + seconds) if seconds else self


class SupervisedProgress(Record, frozen=True, tag=True):
    """Progress of supervised training; `loss` in nats per completion token, or per pair."""

    step: int
    steps: int
    loss: float
    seconds: float = 0.0  # since the training began
    accuracy: float | None = None  # preferences: share of pairs ranked correctly
    phase: str = "warm start"


@dataclass
class RecordedCall:
    """A call of a session: to a tool, or by an agent to the gateway. `asked`: encoded request. `reply`: encoded reply;
    None while it has not come."""

    number: int
    asked: bytes
    reply: bytes | None = None
