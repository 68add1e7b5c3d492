"""Promises of a prediction beside its run:

- terms are seconds of a step by role and work, engines in the mean of them; the one that explains most of the error is
  named, and never an outcome such as the step itself;
- a prediction of another recipe is refused by its digest, which has no paths, no bytes and no settings without effect;
- one in the folder of a run that was resumed with another recipe is passed over: the summary says why;
- without a prediction, and before the first step that took time, there is no comparison, without a common term no term
  is most off; what is no prediction is refused.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RunFolderError
from stretto.store.inspection import Inspection, StalenessSummary, TokenCounts, TrajectoryCounts, WeightsSummary
from stretto.store.totals import Category, Totals
from stretto_report.dashboard.prediction import (
    Term,
    compared,
    measured_terms,
    predicted_beside_measured,
    run_digest,
    settings_digest,
)
from stretto_report.dashboard.terminal.summary import comparison_lines, print_inspection

RECORDED = Path(__file__).parents[1] / "data" / "synchronous_run"


def ten_steps() -> dict[str, float]:
    """A run of 10 steps of 2 s; two engines that worked 16 and 12 s, of which a quarter and nothing for loads."""
    totals = Totals(
        max_staleness=4,
        busy={"engine-0": 16.0, "engine-1": 12.0, "trainer": 15.0, "rewards": 1.0, "conductor": 2.0},
        generated_by={"engine-0": 600, "engine-1": 400},
        activities={
            "engine-0": {"generate": 6.0, "load": 2.0},  # half of the work is in spans
            "engine-1": {"generate": 12.0},
            "trainer": {"update": 12.0, "publish": 3.0},
        },
    )
    inspection = Inspection(
        steps=10,
        version=10,
        wall_seconds=25.0,
        rl_seconds=20.0,
        initial_accuracy=None,
        final_accuracy=None,
        tokens=TokenCounts(1000, 700, 0, 0),
        trajectories=TrajectoryCounts(100, 80, 0, 20, 0, 0, 0),
        staleness=StalenessSummary(4.0, 4, 1.5, {}),
        interrupted=0,
        multi_version=0,
        busy={},
        engines=(),
        weights=WeightsSummary(None, None, None, None),
        goodput={"masked": Category(0.0, 100)},
    )
    return measured_terms(inspection, totals)


def test_measured_terms_are_seconds_of_a_step_by_role_and_work() -> None:
    assert ten_steps() == pytest.approx(
        {
            "step_seconds": 2.0, "tokens_per_second": 40.0, "completion_tokens": 10.0, "staleness": 1.5,
            "engines.generate": (12.0 + 12.0) / 2 / 10, "engines.load": 4.0 / 2 / 10,
            "engines.idle": (4.0 + 8.0) / 2 / 10, "trainer.update": 1.2, "trainer.publish": 0.3, "trainer.idle": 0.5,
            "rewards.score": 0.1, "rewards.idle": 1.9,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "value", "term", "off"),
    [
        ("trainer.publish", 0.1, Term(0.1, 0.3, 0.3333, -0.1), -0.1),
        ("completion_tokens", 16.0, Term(16.0, 10.0, 1.6, 0.6), 0.6),
        ("staleness", 1.0, Term(1.0, 1.5, 0.6667, -0.5), -0.5),
    ],
)
def test_the_term_that_explains_most_is_named(wrong: str, value: float, term: Term, off: float) -> None:
    """Beside it the step and the rate are off by more, and the load by less."""
    measured = ten_steps()
    guess = measured | {"step_seconds": 9.0, "tokens_per_second": 1.0, "engines.load": 0.22, wrong: value, "new": 3.0}
    found = compared("clock", "digest", guess, measured)
    assert found.most_off == wrong
    assert found.terms[wrong] == term
    assert found.terms[found.most_off].off == off
    assert "new" not in found.terms


def tables(**trainer: Any) -> dict[str, Any]:
    model, rest = {"path": "/here/models/7b"}, {"steps": 10, "ranks": 2, **trainer}
    return {"seed": 1, "model": model, "trainer": rest, "evaluation": {"every": 5}}


def test_a_digest_is_of_the_settings_that_a_step_depends_on() -> None:
    same = tables(steps=99) | {"model": {"path": "/there/7b"}, "evaluation": {"every": 1}}
    assert settings_digest(same) == settings_digest(dict(reversed(tables().items())))
    assert settings_digest(tables(ranks=4)) != settings_digest(tables())
    moved = {"logging": {"follow": True}, "cluster": {"placer": "slurm"}}
    assert settings_digest(tables() | moved) == settings_digest(tables())


def prediction(path: Path, recipe: str | None) -> Path:
    terms = {"step_seconds": 1.0, "trainer.idle": 0.5, "engines.idle": 1e6}
    path.write_text(json.dumps({"machine": "clock", "goal": "time", "recipe": recipe, "layouts": [{"terms": terms}]}))
    return path


def test_a_recorded_run_is_compared_with_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted_beside_measured(RECORDED) is None
    mine = prediction(tmp_path / "mine.json", run_digest(RECORDED))
    print_inspection(RECORDED, as_json=True, predicted=mine)
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert found["most_off"] == "engines.idle"
    assert found["terms"]["trainer.idle"].keys() == {"predicted", "measured", "ratio", "off"}
    print_inspection(RECORDED, predicted=mine)
    assert "most off: engines.idle" in capsys.readouterr().out
    print_inspection(RECORDED, as_json=True)
    assert json.loads(capsys.readouterr().out)["predicted"] is None
    for recipe, said in (("0" * 20, f"digest {'0' * 20}"), (None, "without --gpus")):
        with pytest.raises(RunFolderError, match=said):
            predicted_beside_measured(RECORDED, prediction(tmp_path / "other.json", recipe))
    for text, said in (("{", "is no prediction"), ('{"machine": "m", "layouts": []}', "it has no layout")):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(RunFolderError, match=said):
            predicted_beside_measured(RECORDED, tmp_path / "broken.json")


def test_a_prediction_in_the_folder_of_a_run_that_goes_on_with_another_recipe_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    earlier = prediction(run / "prediction.json", "0" * 20)
    print_inspection(run)
    found = " ".join(capsys.readouterr().out.split())
    assert "held-out accuracy" in found
    assert "not compared with its prediction" in found
    assert "the prediction of another recipe" in found
    print_inspection(run, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["predicted"] is None
    assert "is the prediction of another recipe" in told["not_predicted"]
    with pytest.raises(RunFolderError, match="another recipe"):
        print_inspection(run, predicted=earlier)


@pytest.mark.parametrize(
    ("predicted", "accelerators", "same"),
    [
        ("Intel(R) Xeon(R) Processor, 2 cores", [], True),
        ("Intel(R) Xeon(R) Processor, 8 cores", [], False),
        ("h100", [], False),
        ("h100", ["NVIDIA H100 80GB HBM3, 81559 MiB"], True),
        ("NVIDIA H100 80GB HBM3", ["NVIDIA H100 80GB HBM3, 81559 MiB"], True),
        ("h20", ["NVIDIA H200, 143771 MiB"], False),
    ],
)
def test_a_prediction_for_another_machine_than_the_runs_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], predicted: str, accelerators: list[str], same: bool
) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    machine = json.loads((run / "machine.json").read_text()) | {"accelerators": accelerators}
    (run / "machine.json").write_text(json.dumps(machine))
    saved = json.loads(prediction(run / "prediction.json", run_digest(run)).read_text())
    (run / "prediction.json").write_text(json.dumps(saved | {"machine": predicted}))
    print_inspection(run)
    assert ("the run was on another machine" not in " ".join(capsys.readouterr().out.split())) is same


def test_before_time_has_passed_there_is_no_comparison(tmp_path: Path) -> None:
    """As of a run that a resume has just recorded the first step of."""
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    prediction(run / "prediction.json", run_digest(run))
    assert predicted_beside_measured(run) is not None
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        connection.execute("UPDATE meta SET value = json_set(value, '$.rl_seconds', 0.0) WHERE name = 'totals'")
        connection.commit()
    assert predicted_beside_measured(run) is None


def test_without_a_common_term_none_is_most_off() -> None:
    found = compared("clock", "digest", {"new": 3.0, "step_seconds": 1.0}, ten_steps())
    assert (found.most_off, list(found.terms)) == ("", ["step_seconds"])
    assert len(comparison_lines(found)) == 2
