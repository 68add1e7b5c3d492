"""Plot of a plan, in a file of its own so that a run does not import matplotlib."""

from __future__ import annotations

from pathlib import Path

from stretto.core.errors import Problem, RunFolderError
from stretto_app.extensions.commands.plan import named, rank_share
from stretto_foresight.planner.predict import RunPlan
from stretto_report.dashboard.timeline import plot_plan


def draw(found: RunPlan, path: Path) -> None:
    """Write a PNG with the last simulated steps of the best layout, and throughput against the share of devices that
    train.

    Raises:
        RunFolderError: the file cannot be written.
    """
    points = [(rank_share(one), one.tokens_per_second, one.tensor) for one in found.layouts]
    try:
        plot_plan(path, f"{found.machine}: {named(found.layouts[0])}", found.layouts[0].timeline, points)
    except OSError as error:
        said = f"cannot be written: {error.strerror}"
        raise RunFolderError([Problem(f"--picture {path}", said, "give a file in a folder that is there")]) from None
