"""Promises of the comparison of predictions with runs:

- a step time's error is a share of what was measured, the others are differences, over the roles that both name;
- the summary has the middle and the worst of all settings, whatever their signs;
- every setting has a committed prediction; a run beside it is kept, one beside another prediction is made again;
- a machine that works for others is refused."""

import json
from pathlib import Path

import pytest

from benchmarks.predictions import PREDICTED, SETTINGS, compared, known_rows, refuse_load, summary


def test_errors_are_shares_and_differences() -> None:
    predicted = {"step_seconds": 0.9, "busy": {"engine-0": 0.8, "trainer": 0.5}, "staleness": {"mean": 1.5, "p99": 2}}
    found = {"step_seconds": 1.0, "busy": {"engine-0": 0.7, "trainer": 0.55, "conductor": 0.3}, "staleness_mean": 1.7}
    assert compared(predicted, found) == pytest.approx({"step": -0.1, "busy": 0.1, "staleness": -0.2})


def test_the_summary_has_the_middle_and_the_worst() -> None:
    rows = {str(x): {"errors": {"step": x, "busy": abs(x) / 2, "staleness": -x}} for x in (-0.3, 0.1, 0.2)}
    assert summary(rows) == pytest.approx(
        {
            "settings": 3, "step_median": 0.2, "step_worst": 0.3, "busy_median": 0.1, "busy_worst": 0.15,
            "staleness_median": 0.2, "staleness_worst": 0.3,
        }
    )  # fmt: skip


def test_every_setting_has_a_committed_prediction() -> None:
    assert json.loads(PREDICTED.read_text()).keys() == SETTINGS.keys()


def test_an_interrupted_comparison_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    results = tmp_path / "predictions.json"
    predictions = {"one": {"step_seconds": 1.0}, "two": {"step_seconds": 2.0}}
    assert known_rows(predictions, results) == {}
    done = {"predicted": {"step_seconds": 1.0}, "load": 0.1}
    results.write_text(json.dumps({"results": {"rows": {"one": done, "two": done, "gone": done}}}))
    assert known_rows(predictions, results) == {"one": done}


def test_a_machine_that_works_for_others_is_refused() -> None:
    refuse_load(0.2, loaded=False)
    refuse_load(4.0, loaded=True)
    with pytest.raises(SystemExit, match=r"load 4\.0"):
        refuse_load(4.0, loaded=False)
