"""Agents in whole runs: programs that speak HTTP make trajectories that are trained on to the token, and keep every
law; after a kill of the conductor they are started again, and are told once more what they had been told."""

import json
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError, WorkflowError
from stretto.launch.recipe.extensions import AgentConfig
from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.store.ledger.reading import read_batches
from stretto_app.extensions.agents import check_agents
from stretto_gateway.checks import check_agent
from stretto_report.reading.inspection import inspect_run
from tests.gateway.serving import build_chat_model
from tests.launch.running import ROOT, TINY, Laboratory, assert_the_law, wait_for_step, wait_until, with_sections

_PROGRAM = ROOT / "tests" / "gateway" / "agents_own.py"
_BUILD = ("[model.build]", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "context", "alphabet")


def recipe_of(folder: Path) -> Path:
    """Two turns of sixteen tokens and less for each trajectory, by a program of Python."""
    model = build_chat_model(folder / "model")
    section = f"""
[model]
path = "{model}"

[workflow]
kind = "agent"
command = ["{sys.executable}", "{_PROGRAM}", "{folder / "notes"}"]
parallel = 4

[sampling]
max_tokens = 16
"""
    without = (*_BUILD, "initializer_range", "demonstrations", "[sampling]", "max_tokens")
    return with_sections(TINY, folder / "recipe.toml", section, without=without)


def test_a_killed_run_starts_its_agents_again_and_answers_from_record(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, recipe = tmp_path / "run", recipe_of(tmp_path)
    few = ("trainer.steps=6", "rollout.batch_size=1", "rollout.max_in_flight=3", "evaluation.prompts=1")
    in_turn = ("rollout.group_size=2", "workflow.parallel=2")  # while the first group is trained on, the next begins
    with laboratory.train(run_dir, *few, *in_turn, recipe=recipe) as command:
        wait_for_step(command, 1)
        address = inspect_run(run_dir).gateway
        assert address is not None
        with urllib.request.urlopen(f"{address}/health", timeout=30) as reply:
            assert json.load(reply)["model"] == "policy"
        (tmp_path / "wait").touch()  # from now on no agent ends
        before = (tmp_path / "notes").read_text()
        wait_until(lambda: (tmp_path / "notes").read_text().count("\n") > before.count("\n") + 1, "two answers")
        command.process.kill()
        command.end()
    (tmp_path / "wait").unlink()
    assert inspect_run(run_dir).gateway is None
    laboratory.run("train", "--resume", run_dir).well()
    laboratory.run("check", run_dir).well()
    assert assert_the_law(run_dir).steps == 6
    batches = read_batches(run_dir / "ledger.sqlite", 0, 6)
    for trajectory in [one for batch in batches for group in batch.groups for one in group.trajectories]:
        assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True]
        assert trajectory.session
    told = defaultdict(list)
    for line in (tmp_path / "notes").read_text().splitlines():
        session, first = json.loads(line)
        if not session.startswith("h"):  # held-out questions are asked at the start and at the end
            told[session].append(first)
    # Of those that were in flight when the conductor was killed, each was told the same again.
    assert all(len(set(first)) == 1 for first in told.values())
    assert any(len(first) > 1 for first in told.values())


def test_a_model_is_evaluated_by_its_agent(laboratory: Laboratory, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    assert json.loads(laboratory.run("eval", tmp_path / "model", "--task", recipe, "--json").well())["samples"] == 4
    assert (tmp_path / "notes").read_text().count("\n") == 4


def test_the_file_descriptors_of_agents_are_counted_before_the_run(laboratory: Laboratory, tmp_path: Path) -> None:
    recipe, poor = recipe_of(tmp_path), ("descriptors", "351")
    with laboratory.train(tmp_path / "run", "workflow.parallel=100", recipe=recipe, poor=poor) as command:
        # Of the conductor, an engine, the trainer, a reward worker, 8 groups in flight, and 100 agents with 3 each.
        needed = 32 + 6 + 4 + 2 + 8 + 300
        command.end().refused(f"351 may be open at once, and the run needs {needed}", f"ulimit -n {needed}")


def test_a_program_beside_the_recipe_runs_there_and_any_other_where_stretto_was_started(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    recipe = recipe_of(tmp_path)
    beside = load_recipe(recipe, ["workflow.command=['python', 'agent.py']"]).workflow
    other = load_recipe(recipe, [f"workflow.command=['sh', '-c', '{'long words ' * 99}', '{_PROGRAM}']"]).workflow
    assert beside is not None
    assert other is not None
    assert (beside.path, other.path) == (str(tmp_path), None)
    (tmp_path / "agent.py").chmod(0o755)
    tokenizer = load_tokenizer(tmp_path / "model")
    check_agent(AgentConfig(kind="agent", command=("./agent.py",), path=str(tmp_path)), tokenizer, "model")
    with pytest.raises(WorkflowError, match="is no program that can be started"):  # a shell would not find it either
        check_agent(AgentConfig(kind="agent", command=("agent.py",), path=str(tmp_path)), tokenizer, "model")


@pytest.mark.parametrize("key", ["two words", "Schlüssel", "secret\n"])
def test_a_key_that_no_client_can_send_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    recipe = load_recipe(recipe_of(tmp_path))
    tokenizer = load_tokenizer(tmp_path / "model")
    monkeypatch.setenv("STRETTO_API_KEY", "one-word")
    check_agents(recipe, tokenizer)
    monkeypatch.setenv("STRETTO_API_KEY", key)
    with pytest.raises(RecipeError, match="STRETTO_API_KEY: cannot be sent"):
        check_agents(recipe, tokenizer)


def test_an_agent_that_cannot_be_started_is_refused_before_the_run(laboratory: Laboratory, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    for override, message in (
        ("workflow.command=['/no/such/agent']", "is no program that can be started"),
        ("workflow.function='module'", "has a command and a function"),
        ("workflow.parallell=3", "did you mean 'parallel'?"),
        ("gateway.host='0.0.0.0'", "lets other machines open sessions without a key"),
        ("workflow.kind='agents'", "did you mean 'agent'?"),
    ):
        laboratory.run("train", recipe, override, "--dry-run").refused(message)
    missing = ("workflow.command=[]", "workflow.function='json:nope'")
    laboratory.run("train", recipe, *missing, "--dry-run").refused("'json' has no 'nope'")
