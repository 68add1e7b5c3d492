"""A run on a real Ray cluster of three nodes, each a raylet with processes of its own, on this machine.

- `stretto train --ray ADDRESS` spreads engines over the nodes; a node that is killed takes its engine with it, and Ray
  starts an agent elsewhere, whose engine serves at once. No trajectory is lost, none is trained twice.
- `stretto scale` lets engines come and go while the run goes on.
- The head node killed: the run ends with the name of what it has lost, and goes on elsewhere from a copy of its folder.
- A cluster that is not there, or too small, is refused before any role starts; `--ray local` starts one for the run."""

import shutil
import signal
import socket
from pathlib import Path

import pytest

from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import TINY, Laboratory, said, wait_for_step, wait_until
from tests.real_clusters.nodes import ENDLESS, cluster, engines_join

pytest.importorskip("ray")

#: Ray starts slowly, and waits for what has died: the limit of other tests is too short.
pytestmark = pytest.mark.timeout(900)


def test_nodes_are_killed_and_engines_come_and_go(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with cluster(head=1, first=2, second=2) as nodes:
        words = ("train", TINY, *ENDLESS, "engine.count=2", "--ray", nodes.address, "--run-dir", run_dir)
        with laboratory.start(*words, run_dir=run_dir, cold=True) as command:
            wait_for_step(command, 3)
            engines_join(command, run_dir, 2)
            nodes.kill("second")
            wait_until(lambda: "has left" in said(run_dir), "an engine's end", command)
            nodes.start("third", 2)
            engines_join(command, run_dir, 2)
            assert "4 engines" in laboratory.run("scale", run_dir, "engines=4").out
            engines_join(command, run_dir, 4)
            laboratory.run("scale", run_dir, "engines=100").refused("needs 96 CPU for 96 engine(s)", "add nodes")
            assert "3 engines" in laboratory.run("scale", run_dir, "engines=3").out
            engines_join(command, run_dir, 3)
            assert "4 engines" in laboratory.run("scale", run_dir, "engines=4").out
            engines_join(command, run_dir, 4)
            assert "1 engine" in laboratory.run("scale", run_dir, "engines=1").out
            engines_join(command, run_dir, 1)
            wait_for_step(command, inspect_run(run_dir).steps + 3)
            ended, _ = command.stop(signal.SIGINT)
            assert ended.code == 130, ended.err
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    assert inspect_run(run_dir).trajectories.failed == 0


def test_a_run_whose_head_node_dies_ends_by_name_and_goes_on_in_a_copy(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    with cluster(head=2) as nodes:
        words = ("train", TINY, *ENDLESS, "deadlines.start=20", "--ray", nodes.address, "--run-dir", run_dir)
        with laboratory.start(*words, run_dir=run_dir, cold=True) as command:
            wait_for_step(command, 3)
            nodes.kill("head")
            ended = command.end(180)
    assert ended.code == 1, ended.err
    assert "engine-0 has left" in ended.err or "the placer of Ray" in ended.err, ended.err
    shutil.copytree(run_dir, copy)
    steps = inspect_run(copy).steps
    local = ("cluster.placer=local", f"trainer.steps={steps + 2}")
    laboratory.run("train", "--resume", copy, *local).well()
    assert check_run(copy).kept, check_run(copy).breaches


def test_a_cluster_that_is_not_there_or_too_small_is_refused(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its address, and as the one that runs: that is where Ray's own variable says, on a machine with several."""
    absent = laboratory.run("train", TINY, "--ray", "127.0.0.1:1", "--run-dir", tmp_path / "absent")
    absent.refused("cluster.ray: '127.0.0.1:1'", "ray start --head")
    with cluster(head=1) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        for where in (nodes.address, "auto"):
            words = ("train", TINY, "engine.count=5", "--ray", where, "--run-dir", tmp_path / "small")
            laboratory.run(*words).refused("needs 5 CPU for 5 engine(s), and has 1 in all", "add nodes")
    assert not [*tmp_path.iterdir()]


def test_a_cluster_of_this_machine_starts_for_the_run_and_ends_with_it(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("train", TINY, "trainer.steps=3", "--ray", "local", "--run-dir", run_dir)
    with laboratory.start(*words, run_dir=run_dir, cold=True) as command:
        command.end(300).well()
        wait_until(lambda: not command.processes(), "the end of Ray's processes")
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    assert [engine.host for engine in inspect_run(run_dir).engines] == [socket.gethostname()]
