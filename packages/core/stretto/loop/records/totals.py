"""What the work of a run has come to so far: its totals, those of earlier processes of the run included."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from stretto.core.events import Span
from stretto.measures.goodput import WORK
from stretto.store.totals import NEWEST_TRANSFERS, Carried, Totals

Count = TypeVar("Count", int, float)


def carried_over(totals: Totals, kept: int) -> Totals:
    """The totals with which a resumed run begins: all work counts, also that of steps which are done again. `kept`: the
    tokens that are on record, or go on."""
    stopped = max(0, totals.generated - kept)
    return msgspec.structs.replace(totals, stopped=stopped, unfinished=0, final_accuracy=None, rewards={})


@dataclass(frozen=True)
class Work:
    """The work of the roles since they were started: tokens sampled, recomputed, sampled for completions that were
    stopped or have not ended; seconds of work by role."""

    generated: int = 0
    recomputed: int = 0
    stopped: int = 0
    unfinished: int = 0  # of requests that are open
    busy: Mapping[str, float] = field(default_factory=dict)
    generated_by: Mapping[str, int] = field(default_factory=dict)  # engine: its part of `generated`


class RunClock:
    """Seconds of the whole run and of its reinforcement learning, those before a resumption included."""

    def __init__(self, earlier: Totals, since: float) -> None:
        """`since`: when this process started the run, by `time.monotonic`."""
        self._earlier = earlier
        self._since = since
        self._rl_since: float | None = None
        self._rl_seconds = earlier.rl_seconds
        self.starting_seconds = earlier.starting_seconds  #: until the first prompt was admitted

    def rl_begins(self) -> None:
        self._rl_since = time.monotonic()
        self.starting_seconds = self._earlier.starting_seconds + self._rl_since - self._since

    def updated(self) -> None:
        """An update is done."""
        if self._rl_since is not None:
            self._rl_seconds = self._earlier.rl_seconds + time.monotonic() - self._rl_since

    @property
    def rl_seconds(self) -> float:
        """Until the last update."""
        return self._rl_seconds

    @property
    def wall_seconds(self) -> float:
        return self._earlier.wall_seconds + time.monotonic() - self._since


def with_transfers(carried: Carried, spans: Sequence[Span]) -> Carried:
    """With what the spans tell of versions on their way: over a network the mirror of a machine pulls them; in shared
    memory an engine maps and checks what the trainer has written. Generation pauses for the load."""
    transfer = "pull" if carried.medium == "http" else "map"
    pulls = [(span.bytes, round(span.end - span.start, 6)) for span in spans if span.name == transfer]
    pauses = [round(span.end - span.start, 6) for span in spans if span.name == "load"]
    return msgspec.structs.replace(
        carried,
        pulls=(*carried.pulls, *pulls)[-NEWEST_TRANSFERS:],
        pauses=(*carried.pauses, *pauses)[-NEWEST_TRANSFERS:],
    )


def with_activities(
    activities: Mapping[str, Mapping[str, float]], spans: Sequence[Span]
) -> dict[str, dict[str, float]]:
    """Seconds of work by role and span name, with those of `spans`."""
    found = {role: dict(seconds) for role, seconds in activities.items()}
    for span in spans:
        if span.name in WORK:
            of_role = found.setdefault(span.role, {})
            of_role[span.name] = of_role.get(span.name, 0.0) + span.end - span.start
    return found


def over_the_run(
    now: Mapping[str, Count], before: Mapping[str, Count], earlier: Mapping[str, Count]
) -> dict[str, Count]:
    """Counters of this process since `before`, and those of earlier processes of the run."""
    names = dict.fromkeys([*earlier, *now])
    return {name: now.get(name, 0) - before.get(name, 0) + earlier.get(name, 0) for name in names}
