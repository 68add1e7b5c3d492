"""Promises: the page is one that Prometheus' own parser reads; what only grows is a counter, and one that is summed
counts each step once; a scrape is answered while a run is followed; a port in use is refused before a start. An alarm
is a number that a scrape reads, and a text of TensorBoard at its first step, once though the process is replaced; what
W&B, MLflow and trackio have of one is read back in tests/real_outlets.
"""

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stretto.core.errors import RecipeError
from stretto.launch.preflight.checks import check_logging
from stretto.launch.recipe.extensions import OutletsConfig
from stretto_report.outlets.follower import About, Cursor, RunFollower
from stretto_report.outlets.supervision import followed
from stretto_report.outlets.tools.prometheus_page import PrometheusPage, series_of
from tests.asynchronous import until
from tests.outlets.curves import in_tensorboard
from tests.outlets.recorded import RecordedRun, collapsing, evaluation, follow_to_the_end, step
from tests.outlets.test_processes import processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scraped(port: int) -> str:
    """The page; empty as long as nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""


async def test_a_scrape_reads_the_newest_step_and_the_sums_of_all(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / 'a "run"')

    port, said = free_port(), list[str]()
    run.append(evaluation(0), step(1), step(2, reward=0.75))

    async with followed(OutletsConfig(prometheus_port=port), run.folder, said.append, stopped=lambda: False):
        await until(lambda: "stretto_step" in scraped(port))
        page = scraped(port)
    assert processes() == []
    families = {family.name: family for family in text_string_to_metric_families(page)}
    found = {
        sample.name: (sample.labels.pop("run"), sample.labels, sample.value)
        for family in families.values()
        for sample in family.samples
    }
    plain = {"step": 2, "reward": 0.75, "trainer_loss": 0.25, "evaluation_accuracy": 0.125, "wall_seconds_total": 12}
    plain |= {"trained_tokens_total": 1920}  # 960 of each step
    for name, value in plain.items():
        assert found[f"stretto_{name}"] == ('a "run"', {}, value)
    assert found["stretto_busy"] == ('a "run"', {"role": "engine-0"}, 0.75)
    assert found["stretto_queues"] == ('a "run"', {"queue": "buffered"}, 3)
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["stretto_trained_tokens"] == kinds["stretto_wall_seconds"] == "counter"
    assert kinds["stretto_reward"] == kinds["stretto_busy"] == "gauge"
    assert said == []


def test_a_name_has_only_characters_that_prometheus_takes() -> None:
    assert series_of("trainer/größe")[0] == "stretto_trainer_gr__e"


def test_a_port_in_use_is_refused_before_anything_is_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"logging.prometheus_port: 127.0.0.1:{port}: .*; choose a free port"):
            check_logging(OutletsConfig(prometheus_port=port))
    check_logging(OutletsConfig(prometheus_port=port))


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


def test_an_alarm_is_a_text_of_tensorboard_at_its_first_step(run: RecordedRun) -> None:
    collapsing(run, 1, 20)
    follow_to_the_end(run, "tensorboard")
    collapsing(run, 21, 22)
    follow_to_the_end(run, "tensorboard")
    found = in_tensorboard(run)
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
