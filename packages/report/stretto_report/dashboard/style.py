"""Style of all plots: the palette of Okabe and Ito, which colour-blind readers can tell apart, and one kind of axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK = "#2b2b2b"
QUIET = "#8a8a8a"
GRID = "#e6e6e6"
BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
RED = "#d55e00"
PINK = "#cc79a7"
YELLOW = "#f0e442"

_DOTS_PER_INCH = 130


def canvas(width: float = 8.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """Make a figure of `width` by `height` inches with one pair of axes, not registered with pyplot."""
    figure, (axes,) = panels(width, height, 1)
    return figure, axes


def panels(width: float, height: float, count: int) -> tuple[Figure, tuple[Axes, ...]]:
    """Make a figure of `width` by `height` inches with `count` pairs of axes side by side."""
    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, tuple(_framed(figure.add_subplot(1, count, place + 1)) for place in range(count))


def _framed(axes: Axes) -> Axes:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def titled(axes: Axes, title: str, subtitle: str = "", x: str = "", y: str = "") -> None:
    """Set a bold title, the sentence `subtitle` under it, and the labels `x` and `y` on the axes."""
    axes.set_title(title + "\n", loc="left", fontsize=13, fontweight="bold", color=INK)
    axes.annotate(subtitle, (0, 1), (0, 7), "axes fraction", "offset points", fontsize=9.5, color=QUIET, va="bottom")
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_ylabel(y, fontsize=10, color=INK)


def nothing_yet(axes: Axes, sentence: str) -> None:
    """Write `sentence` into the middle of an empty plot, as the reason why it is empty, and remove its ticks."""
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", va="center", color=QUIET, fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])


@contextmanager
def saved_as(path: Path, figure: Figure) -> Iterator[None]:
    """Context manager: save `figure` as PNG to `path` when the block ends without an error. The file is complete or as
    it was before."""
    yield
    part = path.with_name(f".{path.name}.part")
    with warnings.catch_warnings():
        # A glyph that the font lacks becomes a box in the picture, which must not end a run.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(part, format="png", facecolor="white")
    part.replace(path)
