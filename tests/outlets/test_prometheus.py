"""Promises: the page is one that Prometheus' own parser reads; what only grows is a counter, and one that is summed
counts each step once; a scrape is answered while a run is followed; a port in use is refused before a start.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stretto.core.errors import RecipeError
from stretto.launch.preflight.checks import check_logging
from stretto.launch.recipe.outlets import OutletsConfig
from stretto_report.outlets.supervision import followed
from stretto_report.outlets.tools.prometheus_page import series_of
from tests.outlets.recorded import RecordedRun, evaluation, step
from tests.outlets.test_processes import processes, until


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


def test_a_scrape_reads_the_newest_step_and_the_sums_of_all(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / 'a "run"')
    run.folder.logs.mkdir()
    port, said = free_port(), list[str]()
    for line in (evaluation(0), step(1), step(2, reward=0.75)):
        run.metrics.append(line)

    async def follow() -> str:
        config = OutletsConfig(prometheus_port=port)
        async with followed(config, run.folder, said.append, stopped=lambda: False):
            await until(lambda: "stretto_step" in scraped(port))
            page = scraped(port)
        assert processes() == []
        return page

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(follow()))}
    found = {
        sample.name: (sample.labels.pop("run"), sample.labels, sample.value)
        for family in families.values()
        for sample in family.samples
    }
    name = 'a "run"'
    assert found["stretto_step"] == (name, {}, 2)
    assert found["stretto_reward"] == (name, {}, 0.75)
    assert found["stretto_trainer_loss"] == (name, {}, 0.25)
    assert found["stretto_busy"] == (name, {"role": "engine-0"}, 0.75)
    assert found["stretto_queues"] == (name, {"queue": "buffered"}, 3)
    assert found["stretto_evaluation_accuracy"] == (name, {}, 0.125)
    assert found["stretto_trained_tokens_total"] == (name, {}, 1920)  # 960 of each step
    assert found["stretto_wall_seconds_total"] == (name, {}, 12)
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
