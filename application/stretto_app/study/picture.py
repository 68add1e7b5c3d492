"""Picture of a study: final accuracy of each cell, and accuracy over steps and over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from stretto.core.errors import several
from stretto_app.study.statistics import CurvePoint, Interval
from stretto_app.study.summary import CellSummary, StudyResult
from stretto_report.dashboard.style import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, panels, saved_as, titled

_COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY)
_ROW = 0.3  # inches


def draw(path: Path, result: StudyResult) -> None:
    """Write the plot of a study as PNG. A cell has the same colour in all three parts."""
    figure, (axes, steps, clock) = panels(16, max(4.5, 1.6 + _ROW * len(result.cells)), 3)
    colours = _colours(len(result.cells))
    with saved_as(path, figure):
        titled(axes, result.study, result.intervals, x="held-out accuracy of the last version")
        _cells(axes, result.cells, colours)
        titled(steps, "Against steps", f"{several(result.trajectories, 'trained trajectory')} a run", x="training step")
        titled(clock, "Against the clock", "until the quickest run has ended", x="seconds")
        for cell, colour in zip(result.cells, colours, strict=True):
            _curve(steps, cell.by_step, colour)
            _curve(clock, cell.by_clock, colour)
        for part in (steps, clock):
            part.set_ylim(0, 1.02)
            part.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _colours(cells: int) -> Sequence[str | tuple[float, float, float, float]]:
    if cells <= len(_COLOURS):
        return _COLOURS[:cells]
    return [colormaps["turbo"](0.05 + 0.9 * place / (cells - 1)) for place in range(cells)]


def _cells(axes: Axes, cells: Sequence[CellSummary], colours: Sequence[object]) -> None:
    for row, (cell, colour) in enumerate(zip(cells, colours, strict=True)):
        if cell.accuracy is not None:
            low, high = _ends(cell.accuracy)
            axes.plot([low, high], [row, row], color=colour, linewidth=2)
            axes.plot([cell.accuracy.mean], [row], "o", color=colour)
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells], fontsize=8, color=INK)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _curve(axes: Axes, points: Sequence[CurvePoint], colour: object) -> None:
    at = [point.at for point in points]
    low, high = zip(*(_ends(point.accuracy) for point in points), strict=True) if points else ((), ())
    axes.plot(at, [point.accuracy.mean for point in points], color=colour, linewidth=1.6)
    axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)


def _ends(interval: Interval) -> tuple[float, float]:
    mean = interval.mean
    return (mean if interval.low is None else interval.low, mean if interval.high is None else interval.high)
