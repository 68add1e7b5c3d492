"""Promises: an alarm reaches TensorBoard as a text at its first step, once though the process is replaced, and
Prometheus as a number that a scrape reads. What W&B, MLflow and trackio have of one is read back in tests/real_outlets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto_report.outlets.follower import About, Cursor, RunFollower
from stretto_report.outlets.tools.prometheus_page import PrometheusPage
from tests.outlets.recorded import RecordedRun, collapsing, follow_to_the_end
from tests.outlets.test_prometheus import free_port, scraped


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


def test_an_alarm_is_a_text_of_tensorboard_at_its_first_step(run: RecordedRun) -> None:
    collapsing(run, 1, 20)
    follow_to_the_end(run, "tensorboard")
    collapsing(run, 21, 22)
    follow_to_the_end(run, "tensorboard")
    found = EventAccumulator(str(run.folder.path / "tensorboard")).Reload()
    assert [name for name in found.Tags()["tensors"] if name.startswith("alarms/")] == ["alarms/entropy_collapse"]
    (told,) = found.Tensors("alarms/entropy_collapse")
    assert told.step == 19
    assert told.tensor_proto.string_val[0].decode().startswith("    alarm  entropy collapse since step 19: ")
    assert [point.step for point in found.Scalars("trainer/entropy")] == list(range(1, 23))


def test_an_alarm_is_a_number_that_a_scrape_reads(run: RecordedRun) -> None:
    port, path = free_port(), run.folder.path
    page = PrometheusPage(About(path, "stretto", "run", (), {}, 0.0), "127.0.0.1", port)
    try:
        follower = RunFollower(path, path / "cursor.json", Cursor(), page, lambda: None)
        collapsing(run, 1, 19)
        follower.advance()
        assert "alarm" not in scraped(port)
        collapsing(run, 20, 20)
        follower.advance()
        families = {family.name: family for family in text_string_to_metric_families(scraped(port))}
    finally:
        page.close("finished")
    ((_, labels, value, *_),) = families["stretto_alarm_first_step"].samples
    assert (labels, value) == ({"run": "run", "alarm": "entropy collapse"}, 19)
    assert families["stretto_alarm_first_step"].type == "gauge"
