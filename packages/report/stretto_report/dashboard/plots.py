"""Plots of a run folder: accuracy, reward and completion length over training steps, and the histogram of staleness;
`plot_run` draws these and the timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from stretto.store.inspection import StalenessSummary
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, StepMetrics, alike, read_metrics
from stretto_report.dashboard.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    SKY,
    canvas,
    nothing_yet,
    saved_as,
    titled,
)
from stretto_report.dashboard.timeline import plot_timeline
from stretto_report.reading.inspection import inspect_run
from stretto_report.reading.series import read_spans

Series = npt.NDArray[np.float64]

_WINDOWS = 30  # a smooth curve averages over the run's steps divided by this
_NO_STEPS = "no training step yet"


def plot_accuracy(path: Path, steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationLine]) -> None:
    """Write a PNG to `path` that plots the accuracy of completions judged before each step (filtered groups included)
    and of held-out prompts. Without either, the plot is empty and says so."""
    figure, axes = canvas()
    with saved_as(path, figure):
        titled(axes, "Accuracy", _accuracy_sentence(evaluations), x="training step", y="accuracy")
        if not steps and not evaluations:
            nothing_yet(axes, _NO_STEPS)
            return
        if steps:  # a run may be stopped between its first evaluation and its first step
            _dots_and_curve(axes, steps, [step.accuracy for step in steps], SKY, BLUE, "sampled in training")
        axes.plot(
            [evaluation.step for evaluation in evaluations],
            [evaluation.accuracy for evaluation in evaluations],
            color=RED,
            marker="D",
            markersize=5.5,
            linewidth=1.6,
            markeredgecolor="white",
            label="held out",
        )
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _finish(axes)


def plot_reward(path: Path, steps: Sequence[StepMetrics]) -> None:
    """Write a PNG to `path` that plots the mean reward of each batch. Before the first step the plot is empty and says
    so."""
    figure, axes = canvas()
    with saved_as(path, figure):
        titled(axes, "Reward", "mean over the completions of each batch", x="training step", y="reward")
        if not steps:
            nothing_yet(axes, _NO_STEPS)
            return
        _dots_and_curve(axes, steps, [step.reward for step in steps], SKY, BLUE, "sampled in training")
        _finish(axes)


def plot_response_length(path: Path, steps: Sequence[StepMetrics]) -> None:
    """Write a PNG to `path` that plots the mean and longest completion of each batch, in tokens. Before the first step
    the plot is empty and says so."""
    figure, axes = canvas()
    with saved_as(path, figure):
        titled(axes, "Completion length", "logarithmic scale", x="training step", y="tokens")
        if not steps:
            nothing_yet(axes, _NO_STEPS)
            return
        _dots_and_curve(axes, steps, [step.length_max for step in steps], "#f3d9a4", ORANGE, "longest of the batch")
        _dots_and_curve(axes, steps, [step.length_mean for step in steps], SKY, BLUE, "mean of the batch")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _finish(axes)


def plot_staleness(path: Path, staleness: StalenessSummary) -> None:
    """Write a PNG to `path` that plots the histogram of staleness (versions between sampling and training) over trained
    tokens, with the bound. Before the first step the plot is empty and says so."""
    figure, axes = canvas()
    with saved_as(path, figure):
        bound = "no bound" if staleness.bound is None else f"bound η = {staleness.bound:g}"
        sentence = f"{bound}   ·   mean {staleness.mean:.2f}   ·   largest {staleness.max}"
        titled(axes, "Staleness", sentence, x="versions between sampling and training", y="share of trained tokens")
        tokens = sum(staleness.histogram.values())
        if not tokens:
            nothing_yet(axes, _NO_STEPS)
            return
        ages = sorted(staleness.histogram)
        shares = [staleness.histogram[age] / tokens for age in ages]
        bars = axes.bar(ages, shares, width=0.82, color=[_age_colour(age, staleness.bound) for age in ages])
        if len(ages) <= 12:
            axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=2, fontsize=9, color=INK)
        if staleness.bound is not None:
            axes.axvline(staleness.bound + 0.5, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                f" η = {staleness.bound:g}",
                (staleness.bound + 0.5, 0.97),
                xycoords=("data", "axes fraction"),
                color=INK,
                fontsize=10,
                va="top",
            )
        axes.set_xlim(-0.6, max(ages[-1], staleness.bound or 0) + 1.1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def smooth(values: Sequence[float], window: int) -> Series:
    """Return the running mean over `window` neighbours, over fewer at the ends, as long as `values`, which must not be
    empty.

    >>> smooth([0, 3, 6, 9], window=3).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    array = np.asarray(values, dtype=np.float64)
    kernel = np.ones(min(window, len(array)))
    return np.convolve(array, kernel, "same") / np.convolve(np.ones_like(array), kernel, "same")


def _dots_and_curve(
    axes: Axes, steps: Sequence[StepMetrics], values: Sequence[float], pale: str, strong: str, label: str
) -> None:
    x = [step.step for step in steps]
    axes.plot(x, values, ".", color=pale, markersize=3.5, alpha=0.65)
    axes.plot(x, smooth(values, max(1, len(values) // _WINDOWS)), color=strong, linewidth=2.2, label=label)


def _finish(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.legend(loc="best", frameon=False, fontsize=9.5, labelcolor=INK)


def _accuracy_sentence(evaluations: Sequence[EvaluationLine]) -> str:
    if not evaluations:
        return "no held-out evaluation yet"
    first, last = alike(evaluations)[0], evaluations[-1]
    prompts = f"{last.prompts} held-out prompts"
    if first is last:
        return f"{prompts}: {last.accuracy:.1%} at version {last.version}"
    return f"{prompts}: {first.accuracy:.1%} → {last.accuracy:.1%} after {last.rl_seconds:.0f} s of RL"


def _age_colour(age: int, bound: float | None) -> str:
    if age == 0:
        return GREEN
    return BLUE if bound is None or age <= bound else RED


def plot_run(path: str | Path) -> tuple[Path, ...]:
    """Draw all plots of the run in the folder `path` as PNG files into its folder ``plots``, and return the files.

    Raises:
        RunFolderError: there is no run.
        StoreError: the run's files cannot be read.
    """
    folder = RunFolder.open(path)
    steps, evaluations = read_metrics(folder.metrics)
    folder.plots.mkdir(exist_ok=True)
    names = ("accuracy", "reward", "response_length", "staleness", "timeline")
    accuracy, reward, length, staleness, timeline = files = tuple(folder.plots / f"{name}.png" for name in names)
    plot_accuracy(accuracy, steps, evaluations)
    plot_reward(reward, steps)
    plot_response_length(length, steps)
    plot_staleness(staleness, inspect_run(path).staleness)
    plot_timeline(timeline, read_spans(folder.spans))
    return files
