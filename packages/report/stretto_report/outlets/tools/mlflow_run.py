"""MLflow. Its server or file is set by its own variable, ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import importlib
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, How
from stretto_report.outlets.points import COLUMNS, MetricsPoint, Value, row_of

_PACKAGE = "mlflow"
_METRICS, _PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # limits of one request
_STATUS: Mapping[How, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_STRANGE = re.compile(r"[^\w\-. :/]")  # in the name of a metric, a parameter or a tag
#: Give up early on a server that does not answer: another process tries again.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowRun:
    """Outlet: a run of MLflow in the experiment named by the project. A point may be sent twice: MLflow's databases
    ignore it, because its time is the same; so `had` is empty."""

    had: Mapping[str, int] = {}

    def __init__(self, about: About, cursor: Cursor) -> None:
        mlflow: Any = importlib.import_module(_PACKAGE)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._entities, self._client, self._began = mlflow.entities, mlflow.MlflowClient(), about.began
        self.run = cursor.run or self._created(about)
        self._config: Mapping[str, Value] | None = about.config  # until MLflow has it

    def _begin(self) -> None:
        """Log the settings that the run does not have yet, and mark it as running, at the first call; later calls do
        nothing. The cursor has the run id by then, so an error here does not create a new run at each attempt."""
        if self._config is None:
            return
        self._client.update_run(self.run, status="RUNNING")
        known = self._client.get_run(self.run).data.params  # MLflow lets none of them change
        values = {accepted_name(key): str(value)[:_LONGEST_PARAM] for key, value in self._config.items()}
        params = [self._entities.Param(key, value) for key, value in values.items() if key not in known]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self.run, params=part)
        self._config = None

    def _created(self, about: About) -> str:
        experiment = self._client.get_experiment_by_name(about.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(about.project)
        tags = dict.fromkeys(map(accepted_name, about.tags), "true")
        made = self._client.create_run(number, start_time=self._time(0.0), run_name=about.name, tags=tags)
        return str(made.info.run_id)

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        self._begin()
        metrics = [
            self._entities.Metric(accepted_name(name), value, self._time(point.seconds), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self.run, metrics=part)

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        columns = zip(*(row_of(sample) for sample in rows), strict=True)
        table = {name: list(cells) for name, cells in zip(COLUMNS, columns, strict=True)}
        self._client.log_table(self.run, table, f"samples/step-{step:06d}.json")

    def alarm(self, alarm: Alarm) -> None:
        self._begin()
        self._client.set_tag(self.run, accepted_name(f"alarm/{alarm.title}"), str(alarm))

    def close(self, how: How) -> None:
        self._begin()
        self._client.set_terminated(self.run, _STATUS[how])

    def _time(self, seconds: float) -> int:
        return round(1000 * (self._began + seconds))


def accepted_name(name: str) -> str:
    """Return a name that MLflow accepts: forbidden characters become "_". If the name is then no normal relative file
    path, so do "/" and ".".

    >>> accepted_name("lr=1e-4"), accepted_name("rewards/exact, short"), accepted_name("v1/")
    ('lr_1e-4', 'rewards/exact_ short', 'v1_')
    """
    name = _STRANGE.sub("_", name)
    is_path = posixpath.normpath(name) == name and not name.startswith(("/", "."))
    return name if is_path else name.replace("/", "_").replace(".", "_")


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
