"""Export of a run's timeline in Chrome's Trace Event Format, for Perfetto: a process per role, spans as complete events
on lanes, events of the run as instant events, measurements as counters.

Events are sorted by time in a temporary SQLite file, so that memory does not grow with the run.
"""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import msgspec

from stretto.core.errors import StoreError
from stretto.store.files import users_file
from stretto.store.ledger.reading import read_fact
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import StepMetrics, iterate_metrics
from stretto.store.totals import ENGINES, Membership
from stretto_report.reading.series import iterate_spans, role_rank

_RUN = 0  # process id for the run's events and counters
_NANO = 1e9
_TABLES = """
CREATE TABLE spans (start REAL, until REAL, role TEXT, name TEXT, version INTEGER, bytes INTEGER);
CREATE TABLE moments (at REAL, name TEXT, kind TEXT, detail TEXT);
"""
#: Time at which the batch of a step was taken: start of the newest trainer span `proximal` of its version.
_BATCH_TAKEN = """
    SELECT version + 1, start, max(rowid) FROM spans WHERE role = 'trainer' AND name = 'proximal' GROUP BY version
"""
_ALL = """
    SELECT start, until, role, name, version, bytes, NULL FROM spans
    UNION ALL SELECT at, at, NULL, name, kind, NULL, detail FROM moments
    ORDER BY 1, 2 DESC
"""
_COMMITTED = "SELECT step, committed FROM steps"
_EVENTS = "SELECT at, name, detail FROM events"

Event = dict[str, Any]


def export_trace(path: str | Path, file: str | Path) -> int:
    """Write the timeline of the run in the folder `path` to `file`, compressed if its name ends with ``.gz``. Return
    the number of events, without those that name processes and lanes. An existing file is replaced; after an error, it
    is as it was before.

    Raises:
        RunFolderError: there is no run, or `file` cannot be written, is no regular file or is a record of a run.
        StoreError: the run's spans, metrics or ledger cannot be read, or a number has more than 64 bits.
    """
    folder, target = RunFolder.open(path), Path(file)
    name = folder.path.resolve().name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    with closing(sqlite3.connect("", isolation_level=None)) as table:
        table.executescript(f"BEGIN; {_TABLES}")
        try:
            _collect(folder, table)
            with users_file(target) as output:
                if target.suffix != ".gz":
                    return _write(output, name, _events(table, _machines(folder)))
                with gzip.GzipFile("", "wb", fileobj=output, mtime=0) as packed:
                    return _write(packed, name, _events(table, _machines(folder)))
        except OverflowError as error:
            raise StoreError(f"{folder.path}: a number of the timeline has more than 64 bits") from error


def _collect(folder: RunFolder, table: sqlite3.Connection) -> None:
    """Fill `table` with the spans, counters, publications and events of the run, on the clock of the spans. Counters
    and events are left out if no batch has a time on that clock."""
    spans = (
        (span.start, max(span.start, span.end), span.role, span.name, span.version, span.bytes)
        for span in iterate_spans(folder.spans)
    )
    table.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", spans)
    taken = {step: at for step, at, _ in table.execute(_BATCH_TAKEN)}
    moments = (
        (taken[line.step], name, "C", msgspec.json.encode(values).decode())
        for line in iterate_metrics(folder.metrics)
        if isinstance(line, StepMetrics) and line.step in taken
        for name, values in _counters(line).items()
        if values
    )
    table.executemany("INSERT INTO moments VALUES (?, ?, ?, ?)", moments)
    table.execute(
        "INSERT INTO moments SELECT until, 'version ' || version || ' published', 'i', '' FROM spans"
        " WHERE name = 'write' OR (name = 'publish' AND NOT EXISTS (SELECT 1 FROM spans WHERE name = 'write'))"
    )
    committed, events = once_at_rest(folder.ledger, partial(_of_ledger, folder.ledger))
    if behind := [at - taken[step] for step, at in committed if step in taken]:
        offset = median(behind)  # from Unix time to the spans' clock
        rows = ((at - offset, name, "i", detail) for at, name, detail in events)
        table.executemany("INSERT INTO moments VALUES (?, ?, ?, ?)", rows)


def _of_ledger(ledger: Path) -> tuple[list[Any], list[Any]]:
    with reading(ledger) as connection:
        return connection.execute(_COMMITTED).fetchall(), connection.execute(_EVENTS).fetchall()


def _counters(line: StepMetrics) -> dict[str, dict[str, float]]:
    groups = {name: value for name, value in line.queues.items() if value is not None}
    return {"staleness": {"mean": line.staleness_mean, "largest": line.staleness_max}, "groups": groups}


def _machines(folder: RunFolder) -> dict[str, str]:
    return {engine.name: engine.host for engine in read_fact(folder.ledger, ENGINES, tuple[Membership, ...]) or ()}


def _write(output: BinaryIO | gzip.GzipFile, name: str, events: Iterator[Event]) -> int:
    encode, count = msgspec.json.Encoder().encode, 0
    output.write(b'{"displayTimeUnit":"ms","otherData":' + encode({"run": name}) + b',"traceEvents":[')
    for number, event in enumerate(events):
        output.write((b",\n" if number else b"\n") + encode(event))
        count += event["ph"] != "M"
    output.write(b"\n]}\n")
    return count


def _events(table: sqlite3.Connection, machines: Mapping[str, str]) -> Iterator[Event]:
    """Yield the trace events of `table` ordered by time, in microseconds since the first. Processes are named at the
    beginning, a lane before its first event. `machines`: host of each engine, by role."""
    yield from _named(_RUN, 0, "run")
    roles = [role for (role,) in table.execute("SELECT DISTINCT role FROM spans")]
    numbers = {role: number for number, role in enumerate(sorted(roles, key=role_rank), start=_RUN + 1)}
    for role, number in numbers.items():
        yield from _named(number, number, f"{machines[role]}/{role}" if role in machines else role)
    lanes = {role: _Lanes() for role in roles}
    origin: float | None = None
    for start, until, role, name, version, size, detail in table.execute(_ALL):
        origin = start if origin is None else origin
        begin, end = round((start - origin) * _NANO), round((until - origin) * _NANO)
        if role is None:
            yield _moment(begin, name, version, detail)
            continue
        lane, is_new = lanes[role].place(begin, end)
        if is_new:
            label = role if lane == 1 else f"{role} ({lane})"
            yield {"ph": "M", "name": "thread_name", "pid": numbers[role], "tid": lane, "args": {"name": label}}
        facts = ({"version": version} if version >= 0 else {}) | ({"bytes": size} if size else {})
        place = {"pid": numbers[role], "tid": lane, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "name": name, "cat": "span", **place, "args": facts}


def _named(process: int, order: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": order}}


def _moment(begin: int, name: str, kind: str, detail: str) -> Event:
    event: Event = {"ph": kind, "name": name, "cat": "run", "pid": _RUN, "tid": 0, "ts": begin / 1e3}
    if kind == "C":
        return event | {"args": msgspec.json.decode(detail)}
    return event | {"s": "g", "args": {"detail": detail} if detail else {}}


class _Lanes:
    """Lanes of one role. Events of one lane must be nested or disjoint, so an event that overlaps in part goes to the
    next lane."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []  # by lane: ends of the enclosing events, outermost first

    def place(self, begin: int, end: int) -> tuple[int, bool]:
        """Take the next event, from `begin` to `end` in nanoseconds. Return its lane, the first (from 1) whose running
        events have ended or contain it, and whether the lane is new. Events must come ordered by begin, of those with
        the same begin the longer ones first."""
        for number, ends in enumerate(self._open, start=1):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return number, False
        self._open.append([end])
        return len(self._open), True
