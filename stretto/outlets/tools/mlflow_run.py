"""MLflow. The server or the file is that of its own variable, ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from stretto.outlets.follower import About, Cursor
from stretto.outlets.points import MetricsPoint
from stretto.outlets.tools.rows import COLUMNS, row_of
from stretto.store.series.samples import SampledCompletion

_METRICS, _PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # what one request may have
_STRANGE = re.compile(r"[^\w\-. :/]")  # in the name of a metric
#: A server that does not answer: this process waits no longer, and another one asks it again.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowRun:
    """A run of MLflow in the experiment of the project. MLflow's databases keep a point that is sent twice once: it has
    the same time."""

    def __init__(self, mlflow: Any, about: About, cursor: Cursor) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._entities, self._client, self._began = mlflow.entities, mlflow.MlflowClient(), about.began
        self.run = cursor.run or self._created(about)
        self._client.update_run(self.run, status="RUNNING")
        known = self._client.get_run(self.run).data.params  # MLflow lets none of them change
        params = [
            mlflow.entities.Param(key, str(value)[:_LONGEST_PARAM])
            for key, value in about.config.items()
            if key not in known
        ]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self.run, params=part)

    def _created(self, about: About) -> str:
        experiment = self._client.get_experiment_by_name(about.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(about.project)
        made = self._client.create_run(
            number, start_time=self._time(0.0), run_name=about.name, tags=dict.fromkeys(about.tags, "true")
        )
        return str(made.info.run_id)

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        metrics = [
            self._entities.Metric(_STRANGE.sub("_", name), value, self._time(point.seconds), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self.run, metrics=part)

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        columns = zip(*(row_of(sample) for sample in rows), strict=True)
        table = {name: list(cells) for name, cells in zip(COLUMNS, columns, strict=True)}
        self._client.log_table(self.run, table, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self.run)

    def _time(self, seconds: float) -> int:
        """Milliseconds since 1970 of a moment of the run."""
        return round(1000 * (self._began + seconds))


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
