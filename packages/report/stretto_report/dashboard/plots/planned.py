"""Plot of a plan: a few steps of its best layout, and throughput against the share of devices that train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from stretto.core.events import Span
from stretto_report.dashboard.plots.style import BLUE, GREEN, ORANGE, PINK, panels, saved_as, titled
from stretto_report.dashboard.plots.timeline import Window, draw_lanes, legend_of

_LOOKS = {1: (BLUE, "o"), 2: (ORANGE, "s"), 4: (GREEN, "^"), 8: (PINK, "D")}  # by the devices of an engine


def plot_plan(path: Path, title: str, spans: Sequence[Span], splits: Sequence[tuple[float, float, int]]) -> None:
    """Write the plot of a plan as PNG to `path`.

    Args:
        spans: spans of one engine and of the trainer, in seconds; at least one.
        splits: for each layout the share of devices that train, tokens per second, and devices per engine.
    """
    figure, (lanes, points) = panels(15, 4.2, 2)
    with saved_as(path, figure):
        window = Window(0.0, max(span.end for span in spans))
        titled(lanes, "Typical steps", f"{title}; at the right: busy share", x="seconds")
        drawn = draw_lanes(lanes, spans, window)
        lanes.legend(handles=legend_of(drawn), loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, frameon=False)
        titled(
            points, "Throughput against split", "of the layouts of the plan", "devices that train", "trained tokens/s"
        )
        draw_splits(points, splits)


def draw_splits(axes: Axes, splits: Sequence[tuple[float, float, int]]) -> None:
    """Draw throughput against the share of devices that train, one line for each engine size. Layouts of equal share
    (with other staleness bounds) have the same x position."""
    for tensor in sorted({size for _, _, size in splits}):
        shown = sorted((share, rate) for share, rate, size in splits if size == tensor)
        colour, marker = _LOOKS.get(tensor, _LOOKS[8])
        label = "engines of one device" if tensor == 1 else f"engines of {tensor} devices"
        axes.plot(*zip(*shown, strict=True), color=colour, marker=marker, linewidth=1.2, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * max(rate for _, rate, _ in splits))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=9)
