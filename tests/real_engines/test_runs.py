"""Promises of whole runs whose engine is a real server of vLLM or SGLang.

- A run trains on what the server sampled, under policies of staleness: its bound holds, the books balance, and the
  checker finds every law kept. The server is one that runs already (`engine.addresses`), shared by the runs.
- `stretto replay` repeats such a run bit for bit, without a server; `stretto eval` measures the model that it is given,
  whatever weights a server had.
- A server that keeps its old weights and reports success ends the run with its name and exit code 1, before a token of
  a version that it has not proven is trained on.
- A worker of a server is killed in mid-completion: a new server is started, completions go on behind the tokens that
  were journalled, nothing is lost or trained twice, and no process of a server outlives the run. In `clients/` its main
  process and the adapter are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from stretto.store.inspection import inspect_run
from stretto_report.audit.check import check_run
from tests.launch.running import TINY, Command, Laboratory, assert_the_law, exported, said, steps_done, wait_until
from tests.launch.test_staleness import trained_ages
from tests.real_engines.serving import BUILT, MODEL, Installed, RealServer

STEPS = 6
SETTINGS = (*BUILT, "sampling.max_tokens=128", "deadlines.engine_restarts=100", "engine.device=cpu")

#: The main process of a server, in words of its command line.
MAIN = {"vllm": "vllm.entrypoints", "sglang": "sglang.launch_server"}
TRACKER = "resource_tracker"
ADAPTER, GUARD = "stretto_servers.role", "stretto_servers.guard"


def assert_all_is_well(run_dir: Path, steps: int) -> None:
    """Every law of the checker holds, and the books balance."""
    found = assert_the_law(run_dir)
    assert found.steps == steps
    assert found.trajectories.failed == 0
    findings = check_run(run_dir)
    assert findings.kept, findings.breaches


@pytest.mark.parametrize("beyond_bound", ["train", "expire"])
def test_the_bound_holds(server: RealServer, laboratory: Laboratory, tmp_path: Path, beyond_bound: str) -> None:
    bounded(server, laboratory, tmp_path / "run", beyond_bound)


def bounded(server: RealServer, laboratory: Laboratory, run_dir: Path, beyond_bound: str) -> None:
    """A run under a policy of staleness, and what is on record of its tokens."""
    engine = (f"engine.kind={server.kind}", f"engine.addresses=['{server.address}']")
    rollout = (f"rollout.beyond_bound={beyond_bound}", f"trainer.steps={STEPS}")
    with laboratory.train(run_dir, *SETTINGS, *engine, *rollout) as command:
        ended = command.end(150)
        assert ended.code == 0, ended.out + ended.err
        command.assert_nothing_is_left()
    assert_all_is_well(run_dir, STEPS)
    found, trajectories = assert_the_law(run_dir), exported(laboratory, run_dir)
    trained = [trajectory for trajectory in trajectories if trajectory["state"] == "trained"]
    ages = trained_ages(trajectories)
    assert max(ages) >= 1, "every completion began behind the last update"
    if beyond_bound == "train":
        replayed = laboratory.run("replay", run_dir, "--from", "0")
        assert replayed.code == 0, replayed.err
        assert "the weights are bit-equal to the run's" in replayed.out
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
    told = laboratory.run("eval", folder, "--task", TINY, "--json", *settings)
    assert told.code == 0, told.err
    accuracy: float = json.loads(told.out)["accuracy"]
    return accuracy


def test_eval_measures_the_model_that_it_is_given(
    server: RealServer, laboratory: Laboratory, accuracies: dict[Path, float]
) -> None:
    engine = (f"engine.kind={server.kind}", f"engine.addresses=['{server.address}']")
    (folder,) = (folder for folder in accuracies if folder.name == server.kind)
    assert evaluated(laboratory, folder, *engine) == accuracies[folder]


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
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
    newest, _ = inspect_run(run_dir).canary
    assert (newest.engine, newest.version, newest.proven) == ("engine-0", int(named[1]), False)
    assert newest.compared == newest.tensors > 0
    trained = [one for one in exported(laboratory, run_dir) if one["state"] == "trained"]
    assert max(max(one["versions"]) for one in trained) < newest.version
    assert check_run(run_dir).kept, check_run(run_dir).breaches


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
def test_a_killed_worker_costs_nothing_and_leaves_nothing(
    installed: Installed, laboratory: Laboratory, tmp_path: Path
) -> None:
    """The rarer kills, of SGLang too, are in `clients/`: each is a start of two servers."""
    disturbed(installed, laboratory, tmp_path / "run", ["worker"])


def disturbed(installed: Installed, laboratory: Laboratory, run_dir: Path, kills: list[str]) -> None:
    """A run whose engine's processes are killed one after the other, each while completions are in flight."""
    steps = STEPS * (len(kills) + 1)
    engine = (f"engine.kind={installed.kind}", f"engine.python={installed.python}")
    main = MAIN[installed.kind]
    sessions: set[int] = set()
    settings = (*SETTINGS, *engine, f"trainer.steps={steps}", "trainer.checkpoint_every=10", "deadlines.batch=300")
    with laboratory.train(run_dir, *settings) as command:
        for number, kill in enumerate(kills):
            wait_until_step(command, run_dir, (number + 1) * STEPS - STEPS // 2)
            sessions |= (session := sessions_of_servers(command))
            of_server = [pid for pid in of_sessions(session) if TRACKER not in command_line(pid)]
            victims = {
                "main": [pid for pid in of_server if main in command_line(pid)],
                "worker": sorted(pid for pid in of_server if main not in command_line(pid))[
                    :1
                ],  # the first one started
                "adapter": command.processes(ADAPTER),
            }[kill]
            assert victims, f"{kill}: none of {[command_line(pid) for pid in of_server]}"
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            wait_for_engines(command, run_dir, number + 1)
        ended = command.end(300)
        assert ended.code == 0, ended.out + ended.err
        command.assert_nothing_is_left()
    assert of_sessions(sessions) == []
    assert_all_is_well(run_dir, steps)
    trajectories = exported(laboratory, run_dir)
    assert all(trajectory["group"].endswith(".0") for trajectory in trajectories), "no prompt was asked twice"
    assert said(run_dir).count("a new one is started") == len(kills)


def sessions_of_servers(command: Command) -> set[int]:
    """A guard starts its server in a session of its own."""
    found = set()
    for guard in command.processes(GUARD):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
            found |= {os.getsid(int(child)) for child in children}
    return found


def of_sessions(sessions: set[int]) -> list[int]:
    """The living processes of sessions; a server's workers overwrite their environment, by which others are found."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) in sessions:
                found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def wait_for_engines(command: Command, run_dir: Path, count: int) -> None:
    wait_until(lambda: said(run_dir).count("a new one is started") >= count, f"{count} new engines", command)


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
