"""The plots.

Promises: every run folder can be drawn, also one with nothing in it; each plot is a PNG; the numbers behind the curves
and the timeline are what their names say.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RunFolderError
from stretto.core.events import Span
from stretto.store.series.lines import SpanLog
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.totals import TOTALS, Totals
from stretto_report.dashboard.plots import plot_run, smooth
from stretto_report.dashboard.style import canvas
from stretto_report.dashboard.timeline import Window, busy_fraction, draw_splits, middle_window, plot_timeline
from tests.store.lines import evaluation_line, step_line, write_lines
from tests.store.make import Make, run_at, trained

NAMES = ["accuracy.png", "response_length.png", "reward.png", "staleness.png", "timeline.png"]


def spans_of(steps: int) -> list[Span]:
    spans = []
    for step in range(steps):
        spans += [
            Span(role="engine-0", name="generate", start=step, end=step + 0.9, version=step),
            Span(role="engine-0", name="load", start=step + 0.9, end=step + 0.91, version=step + 1),
            Span(role="trainer", name="update", start=step + 0.1, end=step + 0.8, version=step),
            Span(role="trainer", name="publish", start=step + 0.8, end=step + 0.85, version=step + 1),
            Span(role="somebody", name="something", start=step, end=step + 0.1),
        ]
    return spans


def test_a_run_is_drawn_completely(tmp_path: Path) -> None:
    with run_at(tmp_path / "run") as (folder, ledger):
        trained(ledger, Make.batch(1, Make.group("0.1.0", Make.trajectory("0.1.0", 0, (0, 3))), version=3))
        ledger.put(TOTALS, Totals(max_staleness=1.0))
        lines = [step_line(step, accuracy=min(1.0, 0.4 + 0.02 * step)) for step in range(1, 30)]
        write_lines(folder.metrics, [evaluation_line(0, 0.4), *lines, evaluation_line(29, 0.9)])
        SpanLog(folder.spans).append(spans_of(30))
    files = plot_run(tmp_path / "run")
    assert sorted(file.name for file in files) == NAMES == sorted(file.name for file in folder.plots.iterdir())
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    ("lines", "spans"),
    [([], 0), ([evaluation_line(0)], 0), ([step_line(1)], 1)],
    ids=["nothing", "stopped before its first step", "one step"],
)
def test_a_run_of_which_little_is_on_record_can_be_drawn(
    tmp_path: Path, lines: list[StepMetrics | EvaluationLine], spans: int
) -> None:
    """It has no bound either."""
    with run_at(tmp_path) as (folder, ledger):
        ledger.put(TOTALS, Totals(max_staleness=None))
        write_lines(folder.metrics, lines)
        SpanLog(folder.spans).append(spans_of(spans))
    assert sorted(file.name for file in plot_run(tmp_path)) == NAMES


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        plot_run(tmp_path)


def test_spans_of_a_run_that_never_trained_are_drawn_whole(tmp_path: Path) -> None:
    spans = [Span(role="engine-0", name="generate", start=3.0, end=5.0)]
    assert middle_window(spans, 12) == Window(3.0, 5.0)
    plot_timeline(tmp_path / "timeline.png", spans)
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_the_window_is_the_middle_of_the_run() -> None:
    # Updates begin at 0.1, 1.1, ... 99.1; the twelve in the middle are numbers 44 to 55.
    assert middle_window(spans_of(100), 12) == Window(44.1, 55.8)
    assert middle_window(spans_of(3), 12) == Window(0.1, 2.8)


def test_time_that_two_spans_share_is_counted_once() -> None:
    spans = [Span(role="a", name="x", start=start, end=end) for start, end in ((0, 4), (1, 2), (3, 5), (8, 99))]
    assert busy_fraction(spans, Window(0, 10)) == 0.7


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.integers(1, 60))
def test_a_smooth_curve_is_as_long_as_its_values_and_stays_between_them(values: list[float], window: int) -> None:
    curve = smooth(values, window)
    assert len(curve) == len(values)
    assert np.all(curve >= min(values) - 1e-6)
    assert np.all(curve <= max(values) + 1e-6)


def test_throughput_stands_against_the_split_with_a_line_for_each_size_of_an_engine() -> None:
    _, axes = canvas()
    draw_splits(axes, [(0.5, 300.0, 1), (0.25, 400.0, 1), (0.25, 350.0, 2)])
    drawn = {str(line.get_label()): np.column_stack(line.get_data()).tolist() for line in axes.get_lines()}
    assert drawn == {"engines of one device": [[0.25, 400.0], [0.5, 300.0]], "engines of 2 devices": [[0.25, 350.0]]}
    assert axes.get_ylim()[0] == 0
