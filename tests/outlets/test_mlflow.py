"""Promises: names that MLflow refuses are sent as names that it takes; a server that takes nothing has one run, not one
for each process; another project gets the whole run from its beginning.

The server is a small one with MLflow's rule of names; the real package is that of tests/real_outlets.
"""

import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stretto.store.ending import ENDING, Ending
from stretto_report.outlets.follower import read_cursor
from tests.outlets.recorded import RecordedRun, follow_to_the_end, step
from tests.store.make import ledger_at


class Param(NamedTuple):
    key: str
    value: str


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class SmallServer:
    """The part of MLflow's package that stretto calls: experiments are their names, runs are numbers."""

    def __init__(self) -> None:
        self.entities = SimpleNamespace(Param=Param, Metric=Metric)
        self.runs: dict[str, tuple[str, set[str]]] = {}  # the experiment and the tags
        self.params: dict[str, dict[str, str]] = {}
        self.steps: dict[str, list[int]] = {}
        self.answers, self.ends = True, list[str]()
        self.MlflowClient = lambda: self

    def get_experiment_by_name(self, name: str) -> None:
        """There is none."""

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, start_time: int, run_name: str, tags: Mapping[str, str]) -> Any:
        run = str(len(self.runs))
        self.runs[run] = (experiment, {_taken(tag) for tag in tags})
        self.params[run], self.steps[run] = {}, []
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None: ...

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=self.params[run]))

    def log_batch(self, run: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        if not self.answers:
            raise ConnectionError("the server does not answer")
        self.params[run] |= {_taken(param.key): param.value for param in params}
        self.steps[run] += [metric.step for metric in metrics if _taken(metric.key) == "reward"]

    def set_terminated(self, run: str, status: str) -> None:
        self.ends.append(status)


def _taken(name: str) -> str:
    if not re.fullmatch(r"[/\w.\- :]+", name) or posixpath.normpath(name) != name or name.startswith(("/", "..")):
        raise ValueError(f"invalid name {name!r}")
    return name


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SmallServer:
    made = SmallServer()
    monkeypatch.setitem(sys.modules, "mlflow", made)
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    return made


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    made = RecordedRun(tmp_path / "run")
    made.metrics.append(step(1))
    return made


def test_names_that_mlflow_refuses_are_sent_in_characters_it_takes(run: RecordedRun, server: SmallServer) -> None:
    run.folder.recipe.write_text('[rewards]\n"a,b" = 1\n"max tokens?" = 2\n')
    follow_to_the_end(run, "mlflow", tags=("lr=1e-4", "v1/", ".."))
    assert server.runs == {"0": ("first", {"lr_1e-4", "v1_", "__"})}
    assert server.params["0"] == {"rewards.a_b": "1", "rewards.max tokens_": "2"}


def test_a_server_that_takes_nothing_has_one_run_of_all_processes(run: RecordedRun, server: SmallServer) -> None:
    server.answers = False
    for _ in range(2):
        with pytest.raises(ConnectionError):
            follow_to_the_end(run, "mlflow")
    server.answers = True
    follow_to_the_end(run, "mlflow")
    assert (server.steps, server.params["0"]) == ({"0": [1]}, {"seed": "1", "trainer.steps": "6"})


def test_another_project_gets_the_run_from_its_beginning(run: RecordedRun, server: SmallServer) -> None:
    follow_to_the_end(run, "mlflow")
    run.metrics.append(step(2))
    follow_to_the_end(run, "mlflow")
    follow_to_the_end(run, "mlflow", project="second")
    assert server.steps == {"0": [1, 2], "1": [1, 2]}
    assert [experiment for experiment, _ in server.runs.values()] == ["first", "second"]
    assert read_cursor(run.folder.outlets / "mlflow.json").project == "second"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (None, "FINISHED"),  # an earlier stretto does not say
        (Ending("finished"), "FINISHED"),
        (Ending("stopped", "stopped by SIGTERM"), "KILLED"),
        (Ending("running"), "FAILED"),  # its process ends, and has not said that it has finished
    ],
)
def test_the_run_of_mlflow_ends_as_the_ledger_says(
    run: RecordedRun, server: SmallServer, ending: Ending | None, status: str
) -> None:
    with ledger_at(run.folder.ledger) as ledger:
        if ending is not None:
            ledger.put(ENDING, ending)
    follow_to_the_end(run, "mlflow")
    assert server.ends == [status]


def test_the_run_of_mlflow_fails_with_a_ledger_that_cannot_be_read(run: RecordedRun, server: SmallServer) -> None:
    run.folder.ledger.write_bytes(b"no ledger" * 100)
    follow_to_the_end(run, "mlflow")
    assert server.ends == ["FAILED"]
