"""The processes of a run, of which a resumed one has several: the identity of the active one, and the work and the
time of all.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from stretto.core.events import Span
from stretto.core.frames import Name, Whole
from stretto.core.machine import allowed_cores, busy_seconds
from stretto.core.records import Record
from stretto.processes.tree import spent_seconds
from stretto.store.totals import ENDING, IDLE, NEWEST_TRANSFERS, OTHERS, REST, STARTING, WORK, Carried, Totals


class Tenure(Record, frozen=True, order=True):
    """Identifies one conductor process of a run. Tenures are ordered by age: of two conductors, the one with the lower
    tenure gives way. Each start of the run has the next `epoch`. If two copies of a run folder are resumed, epochs are
    equal, and the random name `conductor` decides."""

    epoch: Whole
    conductor: Name


def next_tenure(before: Tenure | None) -> Tenure:
    """Return the tenure of a new conductor: the epoch after `before` (None: 1), with a random name."""
    return Tenure(epoch=1 if before is None else before.epoch + 1, conductor=secrets.token_hex(8))


Count = TypeVar("Count", int, float)


def carried_over(totals: Totals, kept: int) -> Totals:
    """Return the totals with which a resumed run begins: `totals`, but all tokens that are not in the ledger count as
    stopped, none as unfinished, and the final accuracy and rewards are not yet known. All earlier work counts,
    including that of repeated steps.

    Args:
        totals: the last totals of the earlier processes.
        kept: number of tokens in the ledger, of finished completions or in flight; the other generated tokens count as
            stopped.
    """
    stopped = max(0, totals.generated - kept)
    return msgspec.structs.replace(totals, stopped=stopped, unfinished=0, final_accuracy=None, rewards={})


@dataclass(frozen=True)
class Work:
    """Work of the roles since they started, in tokens; `recomputed`: their KV cache was computed again; `stopped`: of
    aborted completions. `busy`: seconds of work by role. `left`: the engines in it that have left the run."""

    generated: int = 0
    recomputed: int = 0  # KV cache computed again after an interruption
    stopped: int = 0  # sampled for completions that were aborted
    busy: Mapping[str, float] = field(default_factory=dict)  # role: seconds of work
    generated_by: Mapping[str, int] = field(default_factory=dict)  # engine: its part of `generated`
    left: Collection[str] = ()  # engines of these that have left


def run_seconds() -> tuple[float, float]:
    """CPU seconds of this process and its descendants, and those of all processes on the cores that it may use; the
    second is 0 where the system does not tell it."""
    return spent_seconds(os.getpid()), busy_seconds()


_APART = 1.0  # seconds between two readings of processes
_RUN = ""  # beside the roles: the run's processes together


class RunClock:
    """Measures the seconds of the whole run and of its RL part, from the first admitted prompt to the last update
    (`rl_begins` and `updated` report these), and what of its cores' time went into what. Earlier processes of the run
    are included."""

    def __init__(
        self,
        earlier: Totals,
        since: float,
        taken: tuple[float, float] = (0.0, 0.0),
        spent: Callable[[], Mapping[str, Mapping[int, float]]] = dict,
    ) -> None:
        """Continue the clocks of `earlier` processes of the run.

        Args:
            since: `time.monotonic` at the start of this process's part.
            taken: `run_seconds` at that moment; without it the cores' time is not measured.
            spent: returns the CPU seconds by role and process id.
        """
        self._earlier = earlier
        self._since = since
        self._taken, self._spent, self._cores = taken, spent, allowed_cores()
        self._by_process: dict[tuple[str, int], float] = {}
        self._read, self._others = -math.inf, 0.0
        self._now: Mapping[str, float] = {}  # role: CPU seconds; `_RUN`: all processes, since `taken`
        self._at_begin: Mapping[str, float] | None = None  # `_now` as the first prompt was admitted
        self._at_update: Mapping[str, float] = {}
        self._rl_since: float | None = None
        #: From the first admitted prompt to the last update, summed over the processes of the run.
        self.rl_seconds = earlier.rl_seconds
        self.starting_seconds = earlier.starting_seconds  #: until the first prompt was admitted

    def rl_begins(self) -> None:
        """Start the RL seconds of this process: the first prompt is about to be admitted."""
        self.read_cores(0.0)
        self._at_begin = self._at_update = self._now
        self._rl_since = time.monotonic()
        self.starting_seconds = self._earlier.starting_seconds + self._rl_since - self._since

    def updated(self) -> None:
        """Advance the RL seconds to now: a training step has finished. Does nothing before the first prompt was
        admitted."""
        if self._rl_since is not None:
            self.read_cores()
            self._at_update = self._now
            self.rl_seconds = self._earlier.rl_seconds + time.monotonic() - self._rl_since

    @property
    def wall_seconds(self) -> float:
        return self._earlier.wall_seconds + time.monotonic() - self._since

    def read_cores(self, apart: float = _APART) -> None:
        """Read what the processes of the run and of the machine have spent, unless the last reading was less than
        `apart` seconds ago, or the cores' time is not measured."""
        if (now := time.monotonic()) - self._read < apart or not self._taken[1]:
            return
        self._read = now
        for role, theirs in self._spent().items():
            for pid, seconds in theirs.items():  # an ended child may be missing for a moment
                self._by_process[role, pid] = max(seconds, self._by_process.get((role, pid), 0.0))
        found = dict[str, float]()
        for (role, _), seconds in self._by_process.items():
            found[role] = found.get(role, 0.0) + seconds
        run, busy = (last - first for last, first in zip(run_seconds(), self._taken, strict=True))
        self._now = {**found, _RUN: max(run, self._now.get(_RUN, 0.0))}
        self._others = max(0.0, busy - self._now[_RUN])

    @property
    def cores(self) -> dict[str, float]:
        """Seconds of the cores that the run may use, as of the last reading: what each role took from the first prompt
        to the last update, and the rest by what had it (`totals.REST` and others), which add up to cores × wall
        seconds. Earlier processes of the run are included; without a reading in this one, theirs alone (empty where the
        system tells none)."""
        if not self._now:
            return dict(self._earlier.cores)
        begin = self._now if self._at_begin is None else self._at_begin
        end = self._now if self._at_begin is None else self._at_update
        roles = {role: end[role] - begin.get(role, 0.0) for role in end if role != _RUN}
        rest = max(0.0, end[_RUN] - begin[_RUN] - sum(roles.values()))
        found = roles | {STARTING: begin[_RUN], ENDING: self._now[_RUN] - end[_RUN], REST: rest}
        left = max(0.0, self._cores * (self._read - self._since) - sum(found.values()))
        found |= {OTHERS: (others := min(self._others, left)), IDLE: left - others}
        return over_the_run(found, {}, self._earlier.cores)


#: The ledger's fact about the time axis of ``spans.jsonl``, which all processes of a run share: the Unix time of its
#: zero, and the newest time on it that was written.
SPAN_AXIS = "span_axis"


def span_offset(known: tuple[float, float] | None, monotonic: float, unix: float) -> float:
    """Seconds to add to the monotonic clock of a process for the time axis of the run's spans. That clock begins anew
    when the machine restarts. A later process continues the axis by Unix time, and never before spans that were
    written.

    Args:
        known: the fact `SPAN_AXIS`: (Unix time at 0 of the axis, end of the last span on it); None: no earlier process
            has recorded it, and this clock is the axis.
        monotonic, unix: both clocks at the start of this process.

    >>> span_offset((1_000_000.0, 70.0), monotonic=20.0, unix=1_000_100.0)
    80.0
    """
    if known is None:
        return 0.0
    zero, last = known
    return max(unix - zero, last) - monotonic


def with_transfers(carried: Carried, spans: Sequence[Span]) -> Carried:
    """Return `carried` with the weight transfers in `spans` added, the loads (pauses) after them, and the publications;
    the newest 99 of each kind are kept.

    A transfer is a download over the network, or mapping and checking of shared memory. Generation goes on during a
    transfer; it pauses only for the load after it.
    """
    transfer = "pull" if carried.medium == "http" else "map"
    pulls = [(span.bytes, round(span.end - span.start, 6)) for span in spans if span.name == transfer]
    pauses = [round(span.end - span.start, 6) for span in spans if span.name == "load"]
    copied = [span.bytes for span in spans if span.name == "publish"]
    written = [(span.bytes, round(span.end - span.start, 6)) for span in spans if span.name == "write"]
    return msgspec.structs.replace(
        carried,
        pulls=(*carried.pulls, *pulls)[-NEWEST_TRANSFERS:],
        pauses=(*carried.pauses, *pauses)[-NEWEST_TRANSFERS:],
        copied=(*carried.copied, *copied)[-NEWEST_TRANSFERS:],
        written=(*carried.written, *written)[-NEWEST_TRANSFERS:],
    )


def with_activities(
    activities: Mapping[str, Mapping[str, float]], spans: Sequence[Span]
) -> dict[str, dict[str, float]]:
    """Return `activities` (role: span name: busy seconds) with the seconds of `spans` added; spans that are no work
    (not in `WORK`) are left out."""
    found = {role: dict(seconds) for role, seconds in activities.items()}
    for span in spans:
        if span.name in WORK:
            of_role = found.setdefault(span.role, {})
            of_role[span.name] = of_role.get(span.name, 0.0) + span.end - span.start
    return found


def over_the_run(
    now: Mapping[str, Count], before: Mapping[str, Count], earlier: Mapping[str, Count]
) -> dict[str, Count]:
    """Return the counters of the whole run, by key: the increase from `before` to `now` in this process, plus the
    counters of `earlier` processes."""
    names = dict.fromkeys([*earlier, *now])
    return {name: now.get(name, 0) - before.get(name, 0) + earlier.get(name, 0) for name in names}
