"""Promises of whole runs whose engine is a real server of vLLM or SGLang.

- A run trains on what the server sampled, under policies of staleness: its bound holds, the books balance, and the
  checker finds every law kept. The server is one that runs already (`engine.addresses`), shared by the runs.
- `stretto replay` repeats such a run bit for bit, without a server; `stretto eval` measures the model that it is given,
  whatever weights a server had.
- A server that keeps its old weights and reports success ends the run with its name and exit code 1, before a token of
  a version that it has not proven is trained on.

In `clients/` a server's worker, its main process and the adapter are killed: a new server is started, completions go on
behind the tokens that were journalled, nothing is lost or trained twice, and no process of a server outlives the run.
"""

import json
import re
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import (
    TINY,
    Command,
    Laboratory,
    assert_the_law,
    exported,
    said,
    steps_done,
    trained_ages,
    wait_until,
)
from tests.real_engines.serving import BUILT, MODEL, RealServer

STEPS = 6
SETTINGS = (*BUILT, "sampling.max_tokens=128", "deadlines.engine_restarts=100", "engine.device=cpu")


def assert_all_is_well(run_dir: Path, steps: int) -> None:
    """Every law of the checker holds, and the books balance."""
    found = assert_the_law(run_dir)
    assert (found.steps, found.trajectories.failed) == (steps, 0)
    findings = check_run(run_dir)
    assert findings.kept, findings.breaches


def test_the_bound_holds(server: RealServer, laboratory: Laboratory, tmp_path: Path) -> None:
    bounded(server, laboratory, tmp_path / "run", "expire")


def bounded(server: RealServer, laboratory: Laboratory, run_dir: Path, beyond_bound: str) -> None:
    """A run under a policy of staleness, and what is on record of its tokens."""
    engine = (f"engine.kind={server.kind}", f"engine.addresses=['{server.address}']")
    rollout = (f"rollout.beyond_bound={beyond_bound}", f"trainer.steps={STEPS}")
    with laboratory.train(run_dir, *SETTINGS, *engine, *rollout) as command:
        command.end(150).well()
        command.assert_nothing_is_left()
    assert_all_is_well(run_dir, STEPS)
    found, trajectories = assert_the_law(run_dir), exported(laboratory, run_dir)
    trained = [trajectory for trajectory in trajectories if trajectory["state"] == "trained"]
    ages = trained_ages(trajectories)
    assert max(ages) >= 1, "every completion began behind the last update"
    if beyond_bound in ("train", "expire"):
        assert "the weights are bit-equal to the run's" in laboratory.run("replay", run_dir, "--from", "0").well()
    if beyond_bound == "wait":
        assert max(t["trained_step"] - 1 - t["versions"][0] for t in trained) <= 1
    if beyond_bound == "expire":
        assert max(ages) <= 1
    if beyond_bound in ("mask", "expire"):
        within = [age for age in ages if age <= 1]
        assert found.staleness.histogram == {age: within.count(age) for age in sorted(set(within))}


SEEDS = {"vllm": 1, "sglang": 2}


@pytest.fixture(scope="module")
def accuracies(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, float]:
    """By the embedded engine, of the model that each make of server is given."""
    found = {}
    for kind, seed in SEEDS.items():
        build_policy(MODEL, folder := tmp_path_factory.mktemp("measured") / kind, seed=seed)
        found[folder] = evaluated(laboratory, folder)
    assert len(set(found.values())) == len(SEEDS), "the models are too alike for this test"
    return found


def evaluated(laboratory: Laboratory, folder: Path, *engine: str) -> float:
    settings = ("sampling.temperature=0.001", "evaluation.prompts=16", *engine)
    out = laboratory.run("eval", folder, "--task", TINY, "--json", *settings).well()
    accuracy: float = json.loads(out)["accuracy"]
    return accuracy


def test_eval_measures_the_model_that_it_is_given(
    server: RealServer, laboratory: Laboratory, accuracies: dict[Path, float]
) -> None:
    engine = (f"engine.kind={server.kind}", f"engine.addresses=['{server.address}']")
    (folder,) = (folder for folder in accuracies if folder.name == server.kind)
    assert evaluated(laboratory, folder, *engine) == accuracies[folder]


def test_a_server_that_keeps_its_old_weights_ends_the_run_before_a_token_is_trained_on(
    server: RealServer, laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    engine = (f"engine.kind={server.kind}", f"engine.addresses=['{server.address}']")
    with laboratory.train(run_dir, *SETTINGS, *engine, "trainer.steps=200") as command:
        wait_until_step(command, run_dir, 3)
        with server.loads_spoilt("old"):
            ended = command.end(150)
        command.assert_nothing_is_left()
    assert ended.code == 1, ended.out + ended.err
    assert (named := re.search(r"engine-0: has not proven version (\d+): ", ended.err)), ended.err
    newest, _ = inspect_run(run_dir).canary_proofs
    assert (newest.engine, newest.version, newest.proven) == ("engine-0", int(named[1]), False)
    assert newest.compared == newest.tensors > 0
    trained = [one for one in exported(laboratory, run_dir) if one["state"] == "trained"]
    assert max(max(one["versions"]) for one in trained) < newest.version
    assert check_run(run_dir).kept, check_run(run_dir).breaches


def wait_until_step(command: Command, run_dir: Path, step: int) -> None:
    """A start of a server takes as long as many steps."""
    for _ in range(4):
        try:
            wait_until(lambda: steps_done(run_dir) >= step, f"step {step}", command)
        except AssertionError as late:
            if "not in" not in str(late):
                raise
        else:
            return
    raise AssertionError(f"step {step} has not come:\n{said(run_dir)[-2000:]}")
