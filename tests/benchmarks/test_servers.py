"""Promises of the benchmark of runs with servers: a token whose log-probability is not its version's is found, and of
the processes of a run those of its server are known."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from benchmarks import servers
from stretto.processes.tree import descendants
from tests.launch.running import Laboratory


def test_every_token_is_scored_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    laboratory, run_dir = Laboratory(tmp_path, tmp_path / "cache", warm=True), tmp_path / "run"
    slow = "engine.slots=1"  # a batch takes longer to be sampled than to be trained on: updates meet completions
    laboratory.trained(run_dir, "trainer.steps=12", "evaluation.prompts=1", slow)
    rows = servers.exported_rows(run_dir)
    told = servers.rescored(run_dir, rows)
    assert told["tokens"] == sum(len(row["token_ids"]) for row in rows) > 0
    assert told["completions_of_several_versions"] > 0
    assert told["beyond_tolerance"] == 0
    wrong = deepcopy(rows[:4])
    wrong[0]["behavior_logprobs"][-1] -= 0.25
    found = servers.rescored(run_dir, wrong)
    assert found["beyond_tolerance"] == 1
    assert found["largest_error"] == pytest.approx(0.25, abs=servers.TOLERANCE)
    swapped = deepcopy([row for row in rows if min(row["versions"], default=0) > 0][-8:])
    for row in swapped:
        row["versions"] = [version - 1 for version in row["versions"]]
    assert servers.rescored(run_dir, swapped)["beyond_tolerance"] > 0


def test_the_processes_below_another_are_found() -> None:
    sleep = "import time; print(1, flush=True); time.sleep(60)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        (child,) = descendants(parent.pid)
        assert "time.sleep(60)" in servers.command_line(child)
        parent.kill()
        subprocess.run(["kill", "-KILL", str(child)], check=True)
