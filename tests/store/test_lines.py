"""Metrics and spans as lines.

Promises: what was appended is read back; a torn last line is left out and cut before the next one is written; a broken
line in the middle is named, and costs a run that goes on a warning; so does a disk that is full, never the run.
"""

import logging
import math
import os
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.core.events import Span
from stretto.store.series.lines import LineFollower, LineWriter, SpanLog
from stretto.store.series.metrics import METRICS, MetricsLog, StepMetrics, read_metrics, rewind_metrics
from stretto_report.reading.series import read_spans
from tests.store.lines import evaluation_line, step_line


def metrics(step: int) -> StepMetrics:
    return step_line(step, trainer={"loss": 0.25}, busy={"trainer": 0.9})


EVALUATION = evaluation_line(0, 0.41)


def test_steps_and_evaluations_are_read_back_apart(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for line in (EVALUATION, metrics(1), metrics(2)):
        log.append(line)
    assert read_metrics(tmp_path / "metrics.jsonl") == ([metrics(1), metrics(2)], [EVALUATION])
    assert read_metrics(tmp_path / "nothing.jsonl") == ([], [])


def test_a_measurement_that_is_no_number_is_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_line(1, trainer={"kl": math.nan, "ratio": math.inf, "loss": 1.0}))
    [[step], _] = read_metrics(tmp_path / "metrics.jsonl")
    assert step.trainer == {"kl": None, "ratio": None, "loss": 1.0}


def test_a_file_from_which_nothing_goes_is_not_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        MetricsLog(path).append(metrics(step))
    follower = LineFollower(path, METRICS)
    follower.read_on()
    rewind_metrics(path, 2)
    assert follower.read_on() == ([], False)
    rewind_metrics(path, 1)
    MetricsLog(path).append(step_line(2, trainer={"loss": 0.5}, busy={"trainer": 0.9}))
    lines, again = follower.read_on()
    assert ([line.step for line in lines], again) == ([1, 2], True), "readers see that lines are gone"


def test_of_what_was_written_before_a_resume_decodes_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    log, extents = MetricsLog(path), []
    for line in (metrics(1), metrics(2), EVALUATION, metrics(3)):
        extents.append(log.extent)
        log.append(line)
    assert [MetricsLog(path).extent, log.extent] == [(path.stat().st_size, log.extent[1])] * 2
    rewind_metrics(path, 0, extents[2])
    assert read_metrics(path) == ([metrics(1), metrics(2)], [EVALUATION])
    assert MetricsLog(path).extent == extents[3]
    path.write_bytes(b"{}" + path.read_bytes()[2:] + b"{}\n")
    with caplog.at_level(logging.WARNING):
        rewind_metrics(path, 3, extents[2])
    assert read_metrics(path) == ([metrics(2)], [EVALUATION])
    assert f"{path}: line 1 cannot be read" in caplog.text
    known = MetricsLog(path).extent
    path.write_bytes(path.read_bytes() + b"{}\n")
    with caplog.at_level(logging.WARNING):
        rewind_metrics(path, 3, known)
    assert f"{path}: line 3 cannot be read" in caplog.text


def test_a_rewound_file_loses_its_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(metrics(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    rewind_metrics(path, 1)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_a_long_torn_line_is_cut_up_to_the_line_before(tmp_path: Path, size: int) -> None:
    path = tmp_path / "spans.jsonl"
    for before in (b"", b"{}\n", b"{}\n" * 70_000):
        path.write_bytes(before + b"x" * size)
        SpanLog(path)
        assert path.read_bytes() == before


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    spans = [Span(role="trainer", name="update", start=1.0, end=2.0, version=k) for k in range(3)]
    SpanLog(path).append(spans)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        survivors = [span for k, span in enumerate(spans) if size >= sum(map(len, lines[: k + 1]))]
        assert read_spans(path) == survivors
        SpanLog(path).append(spans[:1])
        assert read_spans(path) == [*survivors, spans[0]]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path).append([Span(role="trainer", name="update", start=1.0, end=2.0)])
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(StoreError, match=r"spans.jsonl: line 1 cannot be read"):
        read_spans(path)


def test_a_run_goes_on_without_the_lines_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        MetricsLog(path).append(metrics(step))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:40] + b"\0\xff\n" + second + b"{}\n" + third)
    with caplog.at_level(logging.WARNING):
        rewind_metrics(path, 2)
    assert [step.step for step in read_metrics(path)[0]] == [1, 2]
    [record] = caplog.records
    assert f"{path}: line 2 cannot be read" in record.getMessage()
    assert record.getMessage().endswith("the run continues without this line and 1 more")


def test_a_run_goes_on_with_lines_that_cannot_be_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in (metrics(1), metrics(2), EVALUATION):
        MetricsLog(path).append(line)
    before = path.read_bytes()
    (tmp_path / f".metrics.jsonl.{os.getpid()}.part").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        rewind_metrics(path, 1)
    assert path.read_bytes() == before
    [record] = caplog.records
    assert f"{path} cannot be rewritten (No space left on device)" in record.getMessage()


def test_a_folder_in_place_of_the_lines_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    rewind_metrics(path, 1, MetricsLog(path).extent)
    assert f"{path} cannot be rewritten (Is a directory)" in caplog.text


def test_a_full_disk_costs_one_warning_and_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    writer: LineWriter[Span] = LineWriter(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.append([Span(role="trainer", name="update", start=1.0, end=2.0)] * 2)
    assert writer.lost == 6
    [record] = caplog.records
    assert "/dev/full cannot be written" in record.getMessage()


def test_a_folder_that_vanished_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    log.append(metrics(1))
    assert len(caplog.records) == 1
    os.mkdir(tmp_path / "gone")
    log.append(metrics(2))
    assert [step.step for step in read_metrics(tmp_path / "gone" / "metrics.jsonl")[0]] == [2]


def test_whatever_byte_of_a_line_is_damaged_the_line_is_named_and_a_run_goes_on_without_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        MetricsLog(path).append(metrics(step))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for at in range(len(second) - 1):
        path.write_bytes(first + second[:at] + b"\xff" + second[at + 1 :] + third)
        with pytest.raises(StoreError, match=r"metrics.jsonl: line 2 cannot be read"):
            read_metrics(path)
    within_a_text = second.index(b"loss") + 1
    path.write_bytes(first + second[:within_a_text] + b"\xff" + second[within_a_text + 1 :] + third)
    rewind_metrics(path, 3)
    assert read_metrics(path) == ([metrics(1), metrics(3)], [])
