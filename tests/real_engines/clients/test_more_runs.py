"""Promises of whole runs whose engine is a real server, as in `tests/real_engines/test_runs.py`, in cases that other
tests have without one: the bound holds where completions wait and where tokens are masked (`tests/launch`); each
process of a server, and the one between it and the conductor, is killed, and nothing is lost or left
(`tests/servers/test_processes.py`); a hundred honest updates are proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.running import Laboratory
from tests.real_engines.serving import Installed, RealServer
from tests.real_engines.test_canary import proven
from tests.real_engines.test_runs import bounded, disturbed


@pytest.mark.parametrize("beyond_bound", ["wait", "mask"])
def test_the_bound_holds(server: RealServer, laboratory: Laboratory, tmp_path: Path, beyond_bound: str) -> None:
    bounded(server, laboratory, tmp_path / "run", beyond_bound)


@pytest.mark.timeout(900)
def test_killed_servers_cost_nothing_and_leave_nothing(
    installed: Installed, laboratory: Laboratory, tmp_path: Path
) -> None:
    disturbed(installed, laboratory, tmp_path / "run", ["main", "worker", "adapter"])


def test_a_hundred_honest_updates_are_proven(either_server: RealServer) -> None:
    either_server.run(proven(either_server, 100))
