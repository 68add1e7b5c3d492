"""Follow the records of a run, and pass each line and each alarm to a logging tool once.

    metrics.jsonl, samples.jsonl ──► RunFollower ──► Outlet, a tool: points, tables, alarms
                                        │
                                        ▼
                       cursor file in the run folder: what the tool has

Curves of a tool are append-only, because no tool can take a point back. A step that is repeated after a crash keeps
its first values there.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from stretto.core.records import Record
from stretto.store.files import write_atomically
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, SampledCompletion
from stretto_report.audit.alarms import AlarmWatch
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.points import MetricsPoint, Value, point_of
from stretto_report.reading.series import LinesRead

_ALARM_SECONDS = 5.0  # between two looks for alarms without a new line


class AlarmFollower:
    """Follows ``metrics.jsonl`` of a run and computes its alarms. It reads from the first line, even if the tool
    already has these lines, because alarms compare with the first steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines, self._watch = LineFollower(RunFolder(folder).metrics, METRICS), AlarmWatch(folder)
        self._asked = float("-inf")

    def new(self, sent: Collection[str]) -> list[Alarm]:
        """Read the new lines, and return the alarms that fire now and whose titles are not in `sent`; empty if there is
        no new line and they were asked for within five seconds. Raises StoreError if the metrics cannot be read."""
        if self._watch.read(self._lines) < 0 and time.monotonic() - self._asked < _ALARM_SECONDS:
            return []
        self._asked = time.monotonic()
        return [alarm for alarm in self._watch.alarms() if alarm.title not in sent]


How = Literal["finished", "stopped", "failed"]

ROWS = 16  #: most rows of a table
ROW_STEPS = 10  #: least steps between two tables
PORTION = 20  #: most points sent at once: few enough that a slow tool replies before it counts as hung
_LONGEST_TEXT = 20_000  # characters of a text in a table

_SAMPLES = msgspec.json.Decoder(SampledCompletion)


class Cursor(Record, frozen=True):
    """Position of a tool in a run: what it has received. The file of the cursor is written after each portion.

    `project`: in the tool; "": not recorded. `run`: run id in the tool; "": no run was created. `began`: Unix time when
    the run began. `sent`: newest step of each curve. `points`: number of points sent. `tabled`: step of the newest
    table. `metrics`, `samples`: how far the files were read; None: not at all. `sampled`: newest version of a sample
    that was sent. `repeated`: samples of versions up to this one are left out, since their file was rewritten.
    `alarms`: first step of each alarm that was sent, by title. `fault`: newest line that could not be read and was
    skipped; "": none.
    """

    project: str = ""
    run: str = ""
    began: float = 0.0
    sent: Mapping[str, int] = {}
    points: int = 0
    tabled: int = -ROW_STEPS
    metrics: LinesRead | None = None
    samples: LinesRead | None = None
    sampled: int = -1
    repeated: int = -1  # samples up to this version are not sent again: a resumed run has rewritten their file
    alarms: Mapping[str, int] = {}
    fault: str = ""


def read_cursor(path: Path) -> Cursor:
    """Read the cursor file `path`. Return a new cursor if there is none. Raises OSError or msgspec.MsgspecError if the
    file cannot be read."""
    return msgspec.json.decode(path.read_bytes(), type=Cursor) if path.exists() else Cursor()


class About(Record, frozen=True):
    """Description of a run for a tool. `folder`: the run folder, where the tool may write files. `config`: the recipe
    with dotted keys. `began`: Unix time of the run's start, in seconds."""

    folder: Path
    project: str
    name: str
    tags: tuple[str, ...]
    config: Mapping[str, Value]
    began: float


class Outlet(Protocol):
    """A run in one logging tool (Protocol). It is created with an `About` and the `Cursor`, and creates or resumes the
    run in the tool. An exception of a method ends the process; a new process continues from the cursor."""

    @property
    def run(self) -> str:
        """Run id in the tool, with which another process resumes logging."""

    @property
    def had(self) -> Mapping[str, int]:
        """Newest step of each curve that the tool already has; these points are not sent again. Empty if the tool
        ignores repeated points, or cannot be asked."""

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        """Send points; on return, the tool has stored them. `first`: index of the first among all points of the run."""

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        """Send a table of sampled completions, `rows`, at the training step `step`. `points`: number of points of the
        run that were sent before."""

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm; on return, the tool has stored it."""

    def close(self, how: How) -> None:
        """Close the run in the tool; `how` says how it ended. The last call."""


class RunFollower:
    """Passes new lines of a run's records to one outlet, and writes the cursor file."""

    def __init__(self, folder: Path, path: Path, cursor: Cursor, outlet: Outlet, beat: Callable[[], None]) -> None:
        """Continue after `cursor` and after the steps that `outlet` has already (`had`). The cursor is written to the
        file `path`, now and whenever it changes. `folder`: the run folder. `beat` is called each time the tool has
        taken a portion of points."""
        run = RunFolder(folder)
        self._outlet, self._path, self._beat = outlet, path, beat
        self._metrics, self._samples = LineFollower(run.metrics, METRICS), LineFollower(run.samples, _SAMPLES)
        if cursor.metrics is not None:
            cursor.metrics.restore(self._metrics)
        if cursor.samples is not None:
            cursor.samples.restore(self._samples)
        self._alarms = AlarmFollower(folder)
        self._waiting: deque[SampledCompletion] = deque(maxlen=ROWS)
        # An earlier process may have died after it sent a point and before it wrote the cursor.
        had: Mapping[str, int] = getattr(outlet, "had", {})  # optional in a user-defined outlet
        sent = {curve: max(cursor.sent.get(curve, -1), had.get(curve, -1)) for curve in sorted({*cursor.sent, *had})}
        self._cursor = msgspec.structs.replace(cursor, run=outlet.run, sent=sent)
        self._write()  # before anything is sent, so that a later process resumes the same run in the tool

    def advance(self) -> bool:
        """Read about a megabyte of new lines, and send their points in portions, a table every ten steps, and, at the
        end of the file, new alarms. Return whether there may be more lines. Raises StoreError if a file of the run
        cannot be read, and any error of the tool."""
        lines, _ = self._metrics.read_on()
        points = self._new([point_of(line) for line in lines])
        self._wait_for_table(*self._samples.read_on())
        for start in range(0, len(points), PORTION):
            self._send(points[start : start + PORTION])
        # Only after the last portion: lines that are read again after a crash are recognised by their steps.
        self._keep(msgspec.structs.replace(self._cursor, metrics=LinesRead.of(self._metrics), fault=self._fault()))
        if self._step >= self._cursor.tabled + ROW_STEPS:
            self._hand_on_table()
        if not self._metrics.more:
            self._hand_on_alarms()
        return self._metrics.more or self._samples.more

    def finish(self, how: Callable[[], How] = lambda: "finished") -> None:
        """Send the rest and close the run in the tool. `how` is called after that, and returns how the run ended.
        Raises as `advance` does."""
        while self.advance():
            pass
        self._hand_on_table()
        self._outlet.close(how())

    @property
    def _step(self) -> int:
        return self._cursor.sent.get("step", 0)

    def _send(self, points: Sequence[MetricsPoint]) -> None:
        self._outlet.send(points, self._cursor.points)
        sent = {**self._cursor.sent, **{point.curve: point.step for point in points}}
        self._keep(msgspec.structs.replace(self._cursor, sent=sent, points=self._cursor.points + len(points)))
        self._beat()

    def _fault(self) -> str:
        fault = self._metrics.fault or self._samples.fault or self._cursor.fault
        if fault != self._cursor.fault:
            print(fault, file=sys.stderr)
        return fault

    def _new(self, points: Sequence[MetricsPoint]) -> list[MetricsPoint]:
        sent, new = dict(self._cursor.sent), []
        for point in points:
            if point.step > sent.get(point.curve, -1):
                sent[point.curve] = point.step
                new.append(point)
        return new

    def _wait_for_table(self, samples: Sequence[SampledCompletion], again: bool) -> None:
        """Collect samples for the next table, the newest 16 at most. `again`: the file was rewritten, and `samples` are
        its first; from then on, samples of versions that the tool already has are left out."""
        if again:
            self._waiting.clear()  # unsent ones that the file still has are read again
            self._keep(msgspec.structs.replace(self._cursor, repeated=self._cursor.sampled))
        self._waiting.extend(sample for sample in samples if sample.version > self._cursor.repeated)

    def _hand_on_table(self) -> None:
        if not self._waiting:
            return
        self._outlet.table(self._step, [_shortened(sample) for sample in self._waiting], self._cursor.points)
        sampled = max(self._cursor.sampled, *(sample.version for sample in self._waiting))
        self._waiting.clear()
        cursor = msgspec.structs.replace(self._cursor, sampled=sampled, tabled=self._step)
        self._keep(msgspec.structs.replace(cursor, samples=LinesRead.of(self._samples)))

    def _hand_on_alarms(self) -> None:
        """Send the alarms that fire now and whose title was not sent before: each once per run, even if it ceases and
        returns, or its steps are repeated."""
        for alarm in self._alarms.new(self._cursor.alarms):
            self._outlet.alarm(alarm)
            alarms = {**self._cursor.alarms, alarm.title: alarm.first_step}
            self._keep(msgspec.structs.replace(self._cursor, alarms=alarms))

    def _keep(self, cursor: Cursor) -> None:
        if cursor != self._cursor or not self._path.exists():
            self._cursor = cursor
            self._write()

    def _write(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._cursor))


def _shortened(sample: SampledCompletion) -> SampledCompletion:
    prompt, completion = sample.prompt[:_LONGEST_TEXT], sample.completion[:_LONGEST_TEXT]
    return msgspec.structs.replace(sample, prompt=prompt, completion=completion)
