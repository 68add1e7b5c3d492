"""Workflows in whole runs: conversations are trained on as they were sampled, whatever happens to the processes.

- Updates interrupt turns, the history stays exact to the token, and every law of `stretto check` holds.
- A policy learns what the workflow rewards.
- A killed engine costs no conversation, and no call is made twice.
- After a kill of the conductor conversations go on where they stood, and no tool is called a second time.
- The held-out accuracy of a run, and that of `stretto eval`, is that of the workflow.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from stretto.core.records import Segment, Trajectory
from stretto.launch.recipe.recipe import load_recipe
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto.store.series.metrics import read_metrics
from tests.launch.running import (
    ROOT,
    TINY,
    Laboratory,
    assert_the_law,
    exported,
    said,
    steps_done,
    wait_for_step,
    with_sections,
)
from tests.workflows.users_own import Asks

_TURNS = 4
STEPS = 10


def recipe_of(folder: Path, *further: str) -> Path:
    """Four turns of sixteen tokens and less, with a call between them that notes its name in a file."""
    section = f"""
[workflow]
function = "tests.workflows.users_own:Asks"
path = "{ROOT}"
max_failed = 1.0

[workflow.settings]
turns = {_TURNS}
count = "{folder / "count"}"

[sampling]
max_tokens = 16

[algorithm.advantages]
kind = "group"
credit = "turn"
"""
    return with_sections(TINY, folder / "recipe.toml", section, without=("[sampling]", "max_tokens"))


def called(folder: Path) -> list[str]:
    """The calls of trajectories that are trained on; held-out questions are asked at the start and at the end."""
    return [line for line in (folder / "count").read_text().splitlines() if not line.startswith("h")]


def check(laboratory: Laboratory, run_dir: Path) -> None:
    laboratory.run("check", run_dir).well()


def trained(run_dir: Path, steps: int) -> list[Trajectory]:
    batches = read_batches(run_dir / "ledger.sqlite", 0, steps)
    return [one for batch in batches for group in batch.groups for one in group.trajectories]


def turns_of(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.sampled]


@pytest.fixture(scope="module")
def run_dir(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with its recipe beside it."""
    folder = tmp_path_factory.mktemp("workflows")
    laboratory.trained(folder / "run", f"trainer.steps={STEPS}", recipe=recipe_of(folder))
    return folder / "run"


def test_a_run_trains_on_conversations_that_updates_interrupt(laboratory: Laboratory, run_dir: Path) -> None:
    check(laboratory, run_dir)
    found = assert_the_law(run_dir)
    assert found.steps == STEPS
    found_rewards = {tuple(turn.reward for turn in turns_of(one)) for one in trained(run_dir, STEPS)}
    assert found_rewards == {(0.0, 1.0, 2.0, 3.0)}
    rows = [row for row in exported(laboratory, run_dir) if row["state"] != "in_flight"]
    buffered = sum(len(row["versions"]) for row in rows if row["state"] == "buffered")
    assert found.tokens.trained + found.tokens.wasted + buffered == found.tokens.generated
    unfinished = found.tokens.generated - sum(len(row["versions"]) for row in rows)  # nothing was aborted before
    members = [one for group in read_unfinished(run_dir / "ledger.sqlite") for one in group.members.values()]
    in_flight = sum(segment.sampled_length for member in members for segment in member.segments)
    assert 0 <= unfinished - in_flight <= 16 * len(members), "more than one turn of each that is not on record"
    versions = [turn.versions for one in trained(run_dir, STEPS) for turn in turns_of(one)]
    assert any(one[0] < one[-1] for one in versions), "no update came in the middle of a turn"
    assert len(set(called(run_dir.parent))) == len(called(run_dir.parent))


@pytest.mark.long
def test_a_run_learns_what_its_workflow_rewards(laboratory: Laboratory, tmp_path: Path) -> None:
    """Digits in both turns, of 65 letters; worked out beforehand: 0.17 at the start, above 0.9 after 20 steps."""
    run_dir = tmp_path / "run"
    recipe = recipe_of(tmp_path).read_text().partition("[workflow]")[0]
    section = f"""
[workflow]
function = "tests.workflows.users_own:Counts"
path = "{ROOT}"

[sampling]
max_tokens = 16

[algorithm.advantages]
kind = "group"
credit = "turn"
"""
    (tmp_path / "learns.toml").write_text(recipe + section)
    settings = ("trainer.steps=24", "trainer.learning_rate=1e-2", "rollout.batch_size=4", "trainer.checkpoint_every=24")
    laboratory.trained(run_dir, *settings, recipe=tmp_path / "learns.toml")
    rewards = [step.reward for step in read_metrics(run_dir / "metrics.jsonl")[0]]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.7


def test_killed_processes_cost_no_conversation_and_no_call_comes_twice(laboratory: Laboratory, tmp_path: Path) -> None:
    """One of two engines, which the run outlives; then the conductor, and the run is resumed."""
    run_dir, recipe = tmp_path / "run", recipe_of(tmp_path)
    with laboratory.train(run_dir, "trainer.steps=8", "engine.count=2", recipe=recipe) as command:
        wait_for_step(command, 1)
        os.kill(command.processes('"engine-0"')[0], signal.SIGKILL)
        wait_for_step(command, steps_done(run_dir) + 1)
        command.process.kill()
        command.end()
    rows = exported(laboratory, run_dir)
    assert all(row["group"].endswith(".0") for row in rows), "no prompt was asked twice"
    assert {row["state"] for row in rows} <= {"trained", "buffered", "in_flight"}
    before = called(tmp_path)
    assert len(set(before)) == len(before)
    laboratory.run("train", "--resume", run_dir).well()
    check(laboratory, run_dir)
    assert assert_the_law(run_dir).steps == 8
    assert set(before) < set(called(tmp_path))
    assert len(set(called(tmp_path))) == len(called(tmp_path))
    failed = {row["reason"] for row in exported(laboratory, run_dir) if row["state"] == "failed"}
    assert all("was cut short, and is not made a second time" in reason for reason in failed)


def test_a_model_is_evaluated_by_the_workflow(laboratory: Laboratory, run_dir: Path, tmp_path: Path) -> None:
    assert "the workflow" not in said(run_dir)  # none of its trajectories has failed
    recipe = run_dir.with_name("recipe.toml")
    rows = tmp_path / "rows.jsonl"
    out = laboratory.run(
        "eval", run_dir / "policy" / "v000000", "--task", recipe, "--n", "2", "--rows", rows, "--json"
    ).well()
    assert json.loads(out)["samples"] == 4 * 2  # of each question that the recipe evaluates, two
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    found_turns = [len(re.findall(r"\+[67]=", text)) for row in results for text in row["completions"]]
    assert min(found_turns) == _TURNS - 1  # what the model is told between two of them


def test_a_workflow_in_rounds_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    ended = laboratory.run("train", recipe_of(tmp_path), "engine.batching=rounds", "--dry-run")
    ended.refused('engine.batching = "rounds" and [workflow] do not go together')


def test_a_workflow_that_is_not_there_is_refused_before_the_run(laboratory: Laboratory, tmp_path: Path) -> None:
    module = "tests.workflows.users_own"
    for value, message in (
        ("multiturn", "no built-in workflow is called 'multiturn'; did you mean 'multi_turn'?"),
        (f"{module}:Ask", f"{module!r} has no 'Ask'; did you mean 'Asks'?"),
        (f"{module}:Raises", "workflow.settings.turns"),
    ):
        laboratory.run("train", recipe_of(tmp_path), f"workflow.function={value}", "--dry-run").refused(message)


def test_a_workflow_may_be_given_as_its_class() -> None:
    chosen = load_recipe(TINY, {"workflow": Asks}).workflow
    assert chosen is not None
    assert (chosen.function, chosen.path) == ("tests.workflows.users_own:Asks", str(ROOT))
