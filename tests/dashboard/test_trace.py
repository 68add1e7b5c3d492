"""The timeline of a run in the Trace Event Format.

Promises: times are microseconds since the first span, worked by hand on a small run; moments and counters stand where
their step is; events come in the order of time, and those of one lane lie in one another or apart, whatever the spans
are; what a name may hold does no harm; a file whose name ends with .gz is compressed; a file is whole or absent.
"""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import RunFolderError, StoreError
from stretto.core.events import Span
from stretto.store.series.lines import SpanLog
from stretto.store.series.metrics import StepMetrics
from stretto.store.totals import ENGINES, Membership
from stretto_report.dashboard.trace import export_trace
from tests.store.lines import step_line, write_lines
from tests.store.make import Make, buffered, run_at, sql

SPANS = (  # as the roles reported them: not in the order of time
    Span("trainer", "proximal", 100.5, 101.0, version=0),
    Span("trainer", "update", 101.0, 102.0, version=0),
    Span("trainer", "publish", 102.0, 102.25, version=1),
    Span("engine-1", "generate", 100.0, 104.0, version=0),
    Span("engine-0", "generate", 100.0, 102.5, version=0),
    Span("engine-0", "load", 102.5, 102.75, version=1),
    Span("engine-0", "map", 102.125, 102.625, version=1, bytes=4096),  # a thread, beside the end of the generation
    Span("rewards-0", "score", 100.25, 100.2500015),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step, whose batch was taken at 100.5, and an engine that died half a second later."""
    make = Make()
    with run_at(tmp_path_factory.mktemp("trace") / 'a"run') as (folder, ledger):
        ledger.put(ENGINES, (Membership("engine-0", "native", "node-3", 1, 0),))
        group = make.group("0.1.0", make.trajectory("0.1.0", 0))
        buffered(ledger, group)
        ledger.commit_batch(make.batch(1, group))
        ledger.event("role", "engine-1 ended with signal 9\x1b[2J\u202e")
        SpanLog(folder.spans).append(SPANS)
        write_lines(folder.metrics, [step(1), step(2)])  # the span of the second is not on record
    sql(folder.ledger, "UPDATE steps SET committed = 5000.0; UPDATE events SET at = 5000.5")
    return folder.path


def step(number: int) -> StepMetrics:
    return step_line(number, staleness_mean=0.5, staleness_max=3, queues={"in_flight": 24.0, "buffered": None})


def exported(run: Path, file: Path) -> list[dict[str, Any]]:
    assert export_trace(run, file) == 8 + 4
    content = file.read_bytes()
    trace = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    assert (trace["displayTimeUnit"], trace["otherData"]) == ("ms", {"run": 'a"run'})
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_spans_are_complete_events_in_microseconds_since_the_first(run: Path, tmp_path: Path) -> None:
    events = exported(run, tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["run", "trainer", "node-3/engine-0", "engine-1", "rewards-0"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [
        (lanes[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"], event["args"])
        for event in events
        if event["ph"] == "X"
    ]
    assert found == [
        ("engine-1", "generate", 0, 4_000_000, {"version": 0}),
        ("engine-0", "generate", 0, 2_500_000, {"version": 0}),
        ("rewards-0", "score", 250_000, 1.5, {}),
        ("trainer", "proximal", 500_000, 500_000, {"version": 0}),
        ("trainer", "update", 1_000_000, 1_000_000, {"version": 0}),
        ("trainer", "publish", 2_000_000, 250_000, {"version": 1}),
        ("engine-0 (2)", "map", 2_125_000, 500_000, {"version": 1, "bytes": 4096}),
        ("engine-0", "load", 2_500_000, 250_000, {"version": 1}),
    ]


def test_moments_and_counters_stand_at_their_step(run: Path, tmp_path: Path) -> None:
    moments = [event for event in exported(run, tmp_path / "trace.json.gz") if event["ph"] in {"i", "C"}]
    found = [(event["ph"], event["name"], event["ts"], event["args"]) for event in moments]
    assert sorted(found[:2]) == [
        ("C", "groups", 500_000, {"in_flight": 24}),
        ("C", "staleness", 500_000, {"mean": 0.5, "largest": 3}),
    ]
    assert found[2:] == [  # half a second after the commit, which was when the batch was taken
        ("i", "role", 1_000_000, {"detail": "engine-1 ended with signal 9\x1b[2J\u202e"}),
        ("i", "version 1 published", 2_250_000, {}),
    ]
    assert all(event["s"] == "g" for event in moments if event["ph"] == "i")
    assert b"\x1b" not in gzip.decompress((tmp_path / "trace.json.gz").read_bytes())


def assert_ordered_and_nested(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert all(before <= after for before, after in pairwise(times))
    lanes: dict[tuple[int, int], list[int]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        begin, end = round(1e3 * event["ts"]), round(1e3 * event["ts"]) + round(1e3 * event["dur"])
        ends = lanes.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)


_TIMES = st.integers(0, 40).map(lambda eighths: 1e5 + eighths / 8)
_SPANS = st.builds(Span, role=st.sampled_from(["trainer", "e-0"]), name=st.text(), start=_TIMES, end=_TIMES)


@settings(max_examples=15)
@given(st.lists(_SPANS, max_size=30))
def test_events_are_in_order_and_those_of_a_lane_nested_whatever_the_spans(run: Path, spans: list[Span]) -> None:
    before = (run / "spans.jsonl").read_bytes()
    try:
        (run / "spans.jsonl").write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
        export_trace(run, run.parent / "any.json")
        assert_ordered_and_nested(events := json.loads((run.parent / "any.json").read_text())["traceEvents"])
        assert [event["ph"] for event in events].count("X") == len(spans)
    finally:
        (run / "spans.jsonl").write_bytes(before)


def test_a_run_without_spans_has_a_trace_without_events(tmp_path: Path) -> None:
    with run_at(tmp_path / "run"):
        pass
    assert export_trace(tmp_path / "run", tmp_path / "trace.json") == 0
    assert [e["ph"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]] == ["M", "M"]


@pytest.mark.parametrize("line", ["{bad", '{"role":"a","name":"b","start":1,"end":2,"version":99999999999999999999}'])
def test_spans_that_cannot_be_read_leave_the_file_as_it_was(tmp_path: Path, line: str) -> None:
    with run_at(tmp_path / "run") as (folder, _):
        folder.write("spans.jsonl", f"{line}\n")
    (tmp_path / "trace.json").write_text("as it was")
    with pytest.raises(StoreError, match=r"spans.jsonl: line 1|more than 64 bits"):
        export_trace(tmp_path / "run", tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == "as it was"
    (tmp_path / "run" / "spans.jsonl").unlink()
    with pytest.raises(RunFolderError, match=r"cannot be written: No such file"):
        export_trace(tmp_path / "run", tmp_path / "nowhere" / "trace.json")
