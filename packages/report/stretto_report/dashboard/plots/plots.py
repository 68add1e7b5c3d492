"""All plots of a run folder."""

from __future__ import annotations

from pathlib import Path

from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import inspect_run
from stretto.store.series.metrics import read_metrics
from stretto.store.series.spans import read_spans
from stretto_report.dashboard.plots.curves import plot_accuracy, plot_response_length, plot_reward, plot_staleness
from stretto_report.dashboard.plots.timeline import plot_timeline


def plot_run(path: str | Path) -> tuple[Path, ...]:
    """Draw all plots of a run as PNG files into its folder ``plots``; return the files.

    Raises:
        RunFolderError: there is no run.
        StoreError: its files cannot be read.
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
