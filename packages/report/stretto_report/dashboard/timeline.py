"""Timeline plot: one lane for each role, over a few training steps from the middle of the run, or of the best layout
of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from stretto.core.events import Span
from stretto_report.dashboard.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PINK,
    QUIET,
    RED,
    SKY,
    YELLOW,
    canvas,
    nothing_yet,
    panels,
    saved_as,
    titled,
)
from stretto_report.reading.series import role_rank

STEPS_SHOWN = 12

_LOAD = "load"
_PUBLISH, _WRITE = "publish", "write"
_STEP = "update"
_LOOKS: dict[str, tuple[str, str]] = {  # span name: colour, label in the legend
    "generate": (SKY, "generate"),
    "recompute": (ORANGE, "recompute the cache"),
    _LOAD: (RED, "load weights: completions are interrupted"),
    "map": ("#d9a0a0", "check a version"),
    "pull": ("#a0a0d9", "pull a version"),
    "score": (PINK, "score completions"),
    "proximal": (GREEN, "proximal log-probabilities"),
    _STEP: (BLUE, "update"),
    _PUBLISH: (INK, "publish a version"),
    _WRITE: ("#a8a8b8", "write a version"),
    "checkpoint": (YELLOW, "checkpoint"),
    "evaluate": ("#b3b3b3", "held-out evaluation"),
}
_OTHER = ("#b3b3b3", "other")
_LANES = ("conductor", "engine", "reward", "trainer")  # from top to bottom, by how a role's name begins
_WIDTH, _LEFT, _RIGHT, _ABOVE, _BELOW, _LANE = 13.0, 1.25, 0.65, 0.7, 1.2, 0.5  # inches
_BAR = 0.62  # of a lane's height
_LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "borderaxespad": 0.4,
    "frameon": False,
    "fontsize": 9,
    "labelcolor": INK,
    "handlelength": 1.4,
    "columnspacing": 1.6,
}
_THINNEST = 0.0012  # of the window: shorter bars would be invisible


@dataclass(frozen=True)
class Window:
    """Time range of the plot, in seconds of the spans' clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def plot_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write a PNG to `path` with the work of each role over time, the weight loads that interrupt completions, and the
    publications. The plot shows twelve training steps from the middle of the run, or all if there are fewer. Without
    spans it is empty and says so."""
    lanes = sorted({span.role for span in spans}, key=_lane_order)
    height = _ABOVE + _BELOW + _LANE * max(len(lanes), 3)
    figure, axes = canvas(_WIDTH, height)
    figure.set_layout_engine("none")
    axes.set_position((_LEFT / _WIDTH, _BELOW / height, 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_ABOVE + _BELOW) / height))
    with saved_as(path, figure):
        if not spans:
            titled(axes, "Timeline")
            nothing_yet(axes, "nothing recorded yet")
            return
        window = middle_window(spans, STEPS_SHOWN)
        sentence = f"{window.seconds:.2f} s from the middle of the run; at the right: busy share of each role"
        titled(axes, "Timeline", sentence, x="seconds since the first span")
        drawn = draw_lanes(axes, spans, window)
        place = (_LEFT / _WIDTH, 0.0)
        figure.legend(handles=legend_of(drawn), bbox_to_anchor=place, ncols=min(len(drawn), 5), **_LEGEND)


def draw_lanes(axes: Axes, spans: Sequence[Span], window: Window) -> set[str]:
    """Draw one lane for each role of `spans` (at least one), with times since the first span; return the names of the
    spans in the window."""
    lanes = sorted({span.role for span in spans}, key=_lane_order)
    origin = min(span.start for span in spans)
    shown = [span for span in spans if span.end > window.start and span.start < window.end]
    for number, lane in enumerate(lanes):
        _draw_lane(axes, [span for span in shown if span.role == lane], window, origin, number)
    written = [span for span in shown if span.name == _WRITE]  # none in a run of an earlier stretto
    _draw_publications(axes, written or [span for span in shown if span.name == _PUBLISH], origin)
    axes.set_xlim(window.start - origin, window.end - origin)
    axes.set_ylim(len(lanes) - 0.4, -0.75)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return {span.name for span in shown}


def middle_window(spans: Sequence[Span], steps_shown: int) -> Window:
    """Return the time of `steps_shown` updates (all, if there are fewer) in the middle of the run; that of all spans if
    there is no update. `spans` must not be empty."""
    updates = sorted((span for span in spans if span.name == _STEP), key=lambda span: span.start)
    if not updates:
        return Window(min(span.start for span in spans), max(span.end for span in spans))
    first = max(0, (len(updates) - steps_shown) // 2)
    last = min(first + steps_shown, len(updates)) - 1
    return Window(updates[first].start, updates[last].end)


def busy_fraction(spans: Sequence[Span], window: Window) -> float:
    """Return the fraction of the window during which at least one span is active; 0 for an empty window.

    >>> halves = [Span(role="a", name="x", start=0, end=2), Span(role="a", name="y", start=1, end=3)]
    >>> busy_fraction(halves, Window(0, 6))
    0.5
    """
    busy, reached = 0.0, window.start
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, window.end)
        if end > start:
            busy, reached = busy + end - start, end
    return busy / window.seconds if window.seconds > 0 else 0.0


def _draw_lane(axes: Axes, spans: Sequence[Span], window: Window, origin: float, lane: int) -> None:
    thinnest = _THINNEST * window.seconds
    order = [*_LOOKS]
    for name in sorted({span.name for span in spans}, key=lambda name: order.index(name) if name in order else 0):
        cut = [(max(span.start, window.start), min(span.end, window.end)) for span in spans if span.name == name]
        bars = [(start - origin, max(end - start, thinnest)) for start, end in cut]
        colour = _LOOKS.get(name, _OTHER)[0]
        edge = "white" if name == _STEP else "none"
        axes.broken_barh(bars, (lane - _BAR / 2, _BAR), facecolors=colour, edgecolors=edge, linewidth=0.5)
    loads = [span.start - origin for span in spans if span.name == _LOAD and span.start >= window.start]
    axes.plot(loads, [lane - _BAR / 2 - 0.09] * len(loads), "v", color=RED, markersize=5, clip_on=False)
    axes.annotate(
        f"{busy_fraction(spans, window):.0%}",
        (1.006, lane),
        xycoords=("axes fraction", "data"),
        fontsize=9.5,
        color=QUIET,
        va="center",
    )


def _draw_publications(axes: Axes, publications: Sequence[Span], origin: float) -> None:
    for span in publications:
        axes.axvline(span.end - origin, color=INK, linewidth=0.7, linestyle=(0, (2, 3)), alpha=0.55, zorder=0)
        if span.version >= 0:
            place = (span.end - origin, -0.72)
            axes.annotate(f"v{span.version}", place, ha="center", va="top", fontsize=7.5, color=QUIET, clip_on=True)


def legend_of(names: set[str]) -> list[Artist]:
    """Return legend handles for the span `names`: one for each known name, and one for all unknown names, if any."""
    handles: list[Artist] = []
    for name, (colour, label) in _LOOKS.items():
        if name == _LOAD and name in names:
            handles.append(Line2D([], [], color=colour, marker="v", linewidth=3, markersize=5, label=label))
        elif name in names:
            handles.append(Patch(facecolor=colour, label=label))
    if names - set(_LOOKS):
        handles.append(Patch(facecolor=_OTHER[0], label=_OTHER[1]))
    return handles


def _lane_order(role: str) -> tuple[int, int, str]:
    kind = next((number for number, begin in enumerate(_LANES) if role.startswith(begin)), len(_LANES))
    return kind, role_rank(role)[2], role


_LOOKS_OF_ENGINES = {1: (BLUE, "o"), 2: (ORANGE, "s"), 4: (GREEN, "^"), 8: (PINK, "D")}  # by the devices of an engine


def plot_plan(path: Path, title: str, spans: Sequence[Span], splits: Sequence[tuple[float, float, int]]) -> None:
    """Write the plot of a plan as PNG to `path`: the timeline of one layout, and the throughput of all layouts.

    Args:
        title: name of the plan, written above its timeline.
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
    """Draw throughput against the share of devices that train, one line for each engine size. `splits`: share,
    throughput and devices of one engine, for each layout; at least one. Layouts of equal share (with other staleness
    bounds) have the same x position."""
    for tensor in sorted({size for _, _, size in splits}):
        shown = sorted((share, rate) for share, rate, size in splits if size == tensor)
        colour, marker = _LOOKS_OF_ENGINES.get(tensor, _LOOKS_OF_ENGINES[8])
        label = "engines of one device" if tensor == 1 else f"engines of {tensor} devices"
        axes.plot(*zip(*shown, strict=True), color=colour, marker=marker, linewidth=1.2, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * max(rate for _, rate, _ in splits))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=9)
