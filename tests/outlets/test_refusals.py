"""Promises: a tool that stretto does not know, or that is not installed, is refused before anything is started; where
each shows the run is a sentence at the start."""

import sys
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.preflight.checks import check_logging, is_installed
from stretto.launch.recipe.extensions import OutletsConfig
from stretto.launch.recipe.recipe import load_recipe
from stretto_report.outlets.supervision import destinations
from tests.launch.running import TINY


def test_an_unknown_tool_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"logging.to.*'wanb' is none of wandb, .* did you mean 'wandb'\?"):
        load_recipe(TINY, ["logging.to=['wanb']"])


def test_one_tool_needs_no_list_and_none_is_named_twice() -> None:
    assert load_recipe(TINY, ["logging.to=wandb"]).logging.to == ("wandb",)
    assert load_recipe(TINY, ["logging.to=['mlflow','mlflow']"]).logging.to == ("mlflow",)
    assert load_recipe(TINY).logging.to == ()


def test_a_tool_that_is_not_installed_is_refused_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(RecipeError) as refused:
        check_logging(OutletsConfig(to=("tensorboard", "trackio")))
    assert str(refused.value) == "logging.to: 'trackio' is not installed; pip install 'stretto[trackio]'"


def test_the_folder_that_a_tool_has_left_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes to a folder `wandb`, which Python would import as a package without code."""
    (tmp_path / "left_by_a_tool").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("left_by_a_tool")
    assert is_installed("pytest")


def test_where_each_tool_shows_the_run_is_a_sentence() -> None:
    config = OutletsConfig(
        to=("wandb", "tensorboard", "mlflow", "trackio"), project="sums", prometheus_port=9400, prometheus_host="::1"
    )
    offline = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "sqlite:///m.db", "TRACKIO_DIR": "/data"}
    assert destinations(config, Path("runs/first"), offline) == [
        "shown in wandb: files in runs/first/wandb; wandb sync runs/first/wandb/offline-run-*",
        "shown in tensorboard: files in runs/first/tensorboard; tensorboard --logdir runs",
        "shown in mlflow: experiment sums at sqlite:///m.db",
        "shown in trackio: project sums at /data",
        "shown in prometheus: http://[::1]:9400/metrics",
    ]
    online = destinations(OutletsConfig(to=("wandb", "mlflow")), Path("r"), {"WANDB_BASE_URL": "http://localhost:8080"})
    assert online == [
        "shown in wandb: project stretto at http://localhost:8080",
        f"shown in mlflow: experiment stretto at a database in {Path.cwd()}",
    ]
