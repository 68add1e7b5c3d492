"""trackio: its database on this machine, or the one set by its variables (``TRACKIO_SPACE_ID``,
``TRACKIO_SERVER_URL``)."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from typing import Any

from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, How
from stretto_report.outlets.points import COLUMNS, MetricsPoint, newest_steps, row_of

_PACKAGE = "trackio"
_REMOTE = frozenset({"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"})  # variables of a database elsewhere


class TrackioRun:
    """Outlet: a run of trackio, resumed by its name (with a unique number).

    trackio writes in a thread, and only `finish` waits until all is written: so each portion of points is begun and
    finished, which takes hundredths of a second.
    """

    def __init__(self, about: About, cursor: Cursor) -> None:
        self._trackio: Any = importlib.import_module(_PACKAGE)
        self._about = about
        self.run = cursor.run or f"{about.name}-{uuid.uuid4().hex[:8]}"
        self.had = self._newest_steps() if cursor.run and not _REMOTE & os.environ.keys() else {}

    def _newest_steps(self) -> dict[str, int]:
        """Return the newest step of each curve in the database of this machine. trackio has no interface for this; if a
        version stores points elsewhere, the result is empty, and a point may be sent twice after a crash."""
        try:
            storage = importlib.import_module(f"{self._trackio.__name__}.sqlite_storage").SQLiteStorage
            points = storage.get_logs(self._about.project, self.run)
        except (ImportError, AttributeError, TypeError):
            return {}
        return newest_steps((point["step"], point) for point in points)

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        self._log([(point.step, dict(point.values)) for point in points])

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=[row_of(sample) for sample in rows])
        self._log([(step, {"samples": table})])

    def alarm(self, alarm: Alarm) -> None:
        run = self._opened()
        self._trackio.alert(title=alarm.title, text=str(alarm), level=self._trackio.AlertLevel.WARN)
        run.finish()

    def close(self, how: How) -> None:
        """Do nothing: each portion is finished already."""

    def _log(self, lines: Sequence[tuple[int, dict[str, Any]]]) -> None:
        run = self._opened()
        for step, values in lines:
            run.log(values, step=step)
        run.finish()

    def _opened(self) -> Any:
        config = {**self._about.config, "tags": ", ".join(self._about.tags)}
        return self._trackio.init(
            project=self._about.project,
            name=self.run,
            resume="allow",
            config=config,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
