"""An outlet: the numbers of each step as rows of a CSV file in the run folder.

[logging]
to = ["wandb", "my_tools:Table"]
"""

from __future__ import annotations

import csv
from collections.abc import Sequence

from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, How
from stretto_report.outlets.points import MetricsPoint


class Table:
    """Created in a process of its own, and again after the process died; then `cursor.run` is the `run` of before."""

    def __init__(self, about: About, cursor: Cursor) -> None:
        self.run = cursor.run or about.name
        self._path = about.folder / "table.csv"

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        """`first`: index of the first point among all; a point that is sent again has the same index."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = ((first + at, point.curve, point.step, dict(point.values)) for at, point in enumerate(points))
            csv.writer(file).writerows(rows)

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        """Completions are not written."""

    def alarm(self, alarm: Alarm) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(("alarm", alarm.title, alarm.first_step, alarm.message))

    def close(self, how: How) -> None:
        """Nothing to close."""
