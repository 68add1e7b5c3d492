"""A recipe with several rewards, some of them for some sources.

Promises: each is measured by its name, in metrics, samples, the summary of the run and its export; a source has the
rewards that name it and those for all; mistakes (an unknown source, a source without a reward, a function that is not
there) end the start with their places; gold answers are read by the rewards of their source alone; a recipe with them
reads back as itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import UserError
from stretto.launch.preflight.plan import make_plan
from stretto.launch.preflight.trial import try_reward
from stretto.launch.recipe.functions import with_named_reward
from stretto.launch.recipe.overrides import Overrides
from stretto.launch.recipe.recipe import load_recipe, to_toml
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.rewards.config import RewardPart, RewardsConfig
from stretto.rewards.service.wire import Row
from stretto.store.export import read_trajectories
from stretto.store.inspection import inspect_run
from stretto.store.series.metrics import read_metrics
from stretto.worlds.data.task import Question
from tests.launch.rewards_for_tests import length, slow
from tests.launch.running import Laboratory

BUILD = BuildConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate_size=16, context_length=32)
RECIPE = """
[model]
path = "policy"
[task]
kind = "dataset"
[[task.sources]]
data = "sums.jsonl"
held_out = 1
[[task.sources]]
data = "words.jsonl"
[sampling]
max_tokens = 8
[rollout]
batch_size = 2
group_size = 2
max_staleness = 0
[trainer]
steps = 2
learning_rate = 1e-4
[evaluation]
prompts = 1
"""
REWARDS = """
[[rewards.functions]]
name = "number"
function = "last_number"
sources = ["sums"]
[[rewards.functions]]
name = "word"
function = "exact_match"
sources = ["words"]
[[rewards.functions]]
function = "own_rewards:shortness"
weight = 0.5
"""
MODULE = """
def shortness(prompt, completion, answer):
    return 1 / (1 + len(completion))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    build_policy(BUILD, tmp_path / "policy", seed=1)
    sums = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(5)]
    words = [{"prompt": f"{n}=", "answer": "+" * n} for n in range(1, 5)]  # no numbers
    for name, rows in (("sums", sums), ("words", words)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "recipe.toml").write_text(RECIPE + REWARDS)
    return tmp_path / "recipe.toml"


def test_every_reward_is_measured_by_its_name(recipe: Path, laboratory: Laboratory) -> None:
    run = recipe.parent / "run"
    laboratory.trained(run, recipe=recipe)
    steps, evaluations = read_metrics(run / "metrics.jsonl")
    assert [set(line.rewards) for line in evaluations] == [{"number", "shortness"}] * 2  # a sum is held out
    assert {name for step in steps for name in step.rewards} == {"number", "word", "shortness"}
    for step in steps:
        assert 0 < (step.rewards["shortness"] or 0) <= 1
        assert step.reward <= 1.5
    assert inspect_run(run).rewards == steps[-1].rewards
    trained = [row for row in read_trajectories(run) if row.state == "trained"]
    assert len(trained) == 8
    for row in trained:
        own = "number" if row.source == "sums" else "word"
        assert set(row.rewards) == {own, "shortness"}
        assert row.reward == pytest.approx(row.rewards[own] + 0.5 * row.rewards["shortness"])
        assert row.verdict == ("right" if row.rewards[own] == 1 else "wrong")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == pytest.approx(
        0.5 * sample["rewards"]["shortness"] + sample["rewards"].get("number", 0) + sample["rewards"].get("word", 0)
    )
    assert len(sample["rewards"]) == 2


def test_the_module_is_found_beside_the_recipe_and_questions_know_their_source(recipe: Path) -> None:
    whole = load_recipe(recipe)
    assert whole.rewards.path == str(recipe.parent)
    plan = make_plan(whole)
    assert plan.rows["1+1=", "2"] == Row("", "sums")
    assert plan.rows["1=", "+"] == Row("", "words")
    assert len(plan.training) == 8  # exact_match has no reader, and last_number does not read the words
    assert not plan.notes
    recipe.write_text(to_toml(whole))
    assert load_recipe(recipe) == whole


def test_a_gold_answer_is_read_by_the_rewards_of_its_source(recipe: Path) -> None:
    recipe.write_text(RECIPE + REWARDS.replace('sources = ["sums"]', ""))
    plan = make_plan(load_recipe(recipe))
    assert plan.notes[0] == "4 questions are left out: their gold answers cannot be read"
    assert [prompt.text for prompt in plan.training] == [f"{n}+1=" for n in range(4)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('["words"]', '["word"]', "rewards.functions.1.sources: no source is called 'word'; did you mean 'words'?"),
        ('["words"]', '["sums"]', ""),
        ("exact_match", "exact", "no built-in reward is called 'exact'; did you mean 'exact_match'?"),
        (":shortness", ":short", "rewards.functions.2.function: 'own_rewards' has no 'short'; did you mean"),
        ("weight = 0.5", "wieght = 0.5", "rewards.functions.2.wieght: unknown key; did you mean 'weight'?"),
        ("weight = 0.5", "weight = nan", "rewards.functions.2.weight"),
        ('name = "word"', 'name = "number"', "two of the functions are called 'number'"),
    ],
)
def test_a_mistake_is_named_with_its_place(recipe: Path, old: str, new: str, expected: str) -> None:
    recipe.write_text(RECIPE + REWARDS.replace(old, new))
    if not expected:  # the reward for all sources is that of the words
        make_plan(load_recipe(recipe))
        return
    with pytest.raises(UserError) as caught:
        make_plan(load_recipe(recipe))
    assert expected in str(caught.value)


@pytest.mark.parametrize("given", [["rewards.function=math"], {"rewards": {"function": "math"}}])
def test_an_override_of_the_one_takes_the_others_away(recipe: Path, given: Overrides) -> None:
    single = load_recipe(recipe, given).rewards
    assert ([part.function for part in single.parts], single.functions) == (["math"], ())
    recipe.write_text(RECIPE + '[rewards]\nfunction = "math"\n')
    several = load_recipe(recipe, ["rewards.functions=[{function='exact_match'}, {function='last_number', weight=2}]"])
    assert [(part.title, part.weight) for part in several.rewards.parts] == [("exact_match", 1.0), ("last_number", 2.0)]
    recipe.write_text(RECIPE + REWARDS + '[rewards]\nfunction = "math"\n')
    with pytest.raises(UserError, match=r"give either function \('math'\) or functions"):
        load_recipe(recipe)


def test_a_source_without_a_reward_is_refused(recipe: Path) -> None:
    recipe.write_text(RECIPE + REWARDS.partition('[[rewards.functions]]\nname = "word"')[0])
    with pytest.raises(UserError, match=r"rewards\.functions: none judges the completions of source 'words'"):
        make_plan(load_recipe(recipe))


def test_a_task_without_sources_has_none_to_name(recipe: Path) -> None:
    task = f'[task]\nkind = "jsonl"\nfile = "{recipe.parent}/sums.jsonl"\nheld_out = 1\n[sampling]'
    before, _, after = RECIPE.partition("[task]")
    recipe.write_text(before + task + after.partition("[sampling]")[2] + REWARDS)
    with pytest.raises(UserError, match="no source is called 'sums'; allowed: none: the task has no sources"):
        make_plan(load_recipe(recipe))


def test_only_the_first_reward_of_a_source_has_to_find_its_gold_answers_right() -> None:
    rows = [
        Question(id=str(n), text=f"{n}=", answer=f"{n}+0={n} #### {n}", place=f"rows.jsonl:{n}") for n in range(1, 4)
    ]
    number, text = RewardPart(function="last_number"), RewardPart(function="final_answer")
    assert try_reward(RewardsConfig(functions=(number, text)), rows) == []
    with pytest.raises(UserError, match="'final_answer' finds 3 of the first 3 gold answers wrong"):
        try_reward(RewardsConfig(functions=(text, number)), rows)


def test_functions_of_python_get_their_names() -> None:
    listed: list[dict[str, Any]] = [{"function": length, "weight": 0.5}, {"function": "math"}, {"function": slow}]
    config = RewardsConfig.model_validate(with_named_reward({"functions": listed}))
    module = "tests.launch.rewards_for_tests"
    assert [part.function for part in config.parts] == [f"{module}:length", "math", f"{module}:slow"]
    assert config.path == str(Path(__file__).parents[2])
    assert config.title == "length + math + slow"
    assert config.parts[0].weight == 0.5
