"""Whole runs: the engine's process skips one tensor and reports success.

The run ends with an exit code above 0 and a sentence that names engine and version; no token of that version was
trained on; `stretto inspect` shows the proof that failed, and `stretto check` finds every law kept. Resumed with an
honest engine, the run goes on to its end.

An engine whose weights are right, and that samples something else than they say, is replaced after two steps in which
the trainer has compared its tokens; where its replacement does the same, the run ends with the engine's name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stretto.audit.check import check_run
from stretto.store.inspection import inspect_run
from tests.launch.running import Laboratory, exported

FIRST = 3  # version whose tensor is skipped
SABOTAGE = Path(__file__).parent / "sabotage"
SABOTAGED = ("env", f"PYTHONPATH={SABOTAGE}:{Path(__file__).parents[2]}", f"SABOTAGED_FROM={FIRST}")


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"), tmp_path_factory.mktemp("cache"))


def test_a_run_ends_before_one_token_of_unproven_weights_is_trained_on(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "--no-plots", before=SABOTAGED) as command:
        ended = command.end()
        command.assert_nothing_is_left()
    assert ended.code == 1, ended.out + ended.err
    assert (named := re.search(r"engine-0: has not proven version (\d+): ", ended.err)), ended.err
    newest, worst = inspect_run(run_dir).canary
    # The replacement may find a newer version than the engine that was replaced.
    assert (newest.engine, newest.version, newest.proven) == ("engine-0", int(named[1]), False)
    assert newest.version >= FIRST
    assert newest.distance > newest.tolerance
    assert worst == newest or not worst.proven
    assert all(
        max(trajectory["versions"], default=0) < FIRST
        for trajectory in exported(laboratory, run_dir)
        if trajectory["state"] == "trained"
    )
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    resumed = laboratory.run("train", "--resume", run_dir)
    assert resumed.code == 0, resumed.err
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    assert all(one.proven for one in inspect_run(run_dir).canary if one.which == "newest")


def test_an_engine_that_disagrees_with_the_trainer_is_replaced_and_then_ends_the_run(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = ("--no-plots", "trainer.steps=40", "rollout.max_staleness=0", "trainer.minibatches=1")
    with laboratory.train(run_dir, *settings, before=(*SABOTAGED, "SABOTAGED=logprobs")) as command:
        ended = command.end()
    assert ended.code == 1, ended.out + ended.err
    assert "engine-0: differs from the trainer by 0.01 nats a token, 0.001 allowed" in ended.err
    assert "0.001 allowed: it is replaced" in ended.out
    found = inspect_run(run_dir)
    assert all(one.proven for one in found.canary), "the weights were right"
    assert found.steps <= 6
