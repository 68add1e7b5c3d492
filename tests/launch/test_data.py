"""A recipe with sources: what is wrong is named with its source, prompts keep within their limit by the chosen policy,
and a run has its data and their order on record, which a resume may not change.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RecipeError, RunFolderError, UserError
from stretto.launch.commands.data_record import DATA, DataRecord
from stretto.launch.commands.train import prepare
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.recipe import load_recipe, to_toml
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.rollout.prompts import PromptSource
from stretto.store.export import read_trajectories
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import read_metrics, read_sets
from stretto_app.extensions.commands.plan import job_of
from stretto_report.audit.check import check_run
from tests.launch.running import Laboratory

pytestmark = pytest.mark.usefixtures("untried")

BUILD = BuildConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate_size=16, context_length=32)
RECIPE = """
[model]
path = "policy"
[task]
kind = "dataset"
[[task.sources]]
data = "short.jsonl"
weight = 1.0
held_out = 1
[[task.sources]]
data = "long.csv"
prompt_field = "question"
weight = 2.0
[sampling]
max_tokens = 8
[rollout]
batch_size = 2
group_size = 2
max_staleness = 0
[trainer]
steps = 3
learning_rate = 1e-4
[evaluation]
prompts = 1
"""

SET = """
[[evaluation.sets]]
name = "sums"
source = { data = "short.jsonl" }
prompts = 2
samples = 3
every = 3
"""


def sealed(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    build_policy(BUILD, tmp_path / "policy", seed=1)
    short = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(4)]
    (tmp_path / "short.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in short))
    (tmp_path / "long.csv").write_text("question,answer\n" + "".join(f"{n}+{n}+{n}+1={n},{n}\n" for n in range(8)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def told(recipe: Path, text: str) -> list[str]:
    recipe.write_text(text)
    with pytest.raises(UserError) as caught:
        make_plan(load_recipe(recipe))
    return str(caught.value).splitlines()


def planned(recipe: Path, *overrides: str) -> Plan:
    return make_plan(load_recipe(recipe, overrides))


def test_sources_are_found_beside_the_recipe_and_keep_their_names_and_weights(recipe: Path) -> None:
    plan = planned(recipe)
    assert plan.sources == (PromptSource("short", 3, 1.0), PromptSource("long", 8, 2.0))
    assert [prompt.id for prompt in plan.held_out] == ["short:4"]
    assert plan.origins[3] == (f"{recipe.parent}/long.csv:2", "long")


def test_a_recipe_with_sources_reads_back_as_itself(recipe: Path) -> None:
    whole = load_recipe(recipe)
    recipe.write_text(to_toml(whole))
    assert load_recipe(recipe) == whole


def test_the_name_of_a_hub_dataset_is_no_path(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("long.csv", "openai/gsm8k"))
    sources: Any = load_recipe(recipe).model_dump()["task"]["sources"]
    assert [source["data"] for source in sources] == [f"{recipe.parent}/short.jsonl", "openai/gsm8k"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("weight = 2.0", "wieght = 2.0", "task.sources.1.wieght: unknown key; did you mean 'weight'?"),
        ("weight = 2.0", "", "source 'long' has no weight and others have one"),
        ("weight = 2.0", "weight = 0.0", "task.sources.1.weight: 0.0; input should be greater than 0"),
        ('data = "long.csv"', "", "task.sources.1.data: missing"),
        ('kind = "dataset"', 'kind = "dataset"\nlong_prompts = "drop_"', "task.long_prompts: 'drop_'"),
        ('data = "long.csv"', 'kind = "gym"', "allowed: 'rows', 'reasoning_gym'"),
        (
            'kind = "dataset"',
            'kind = "dataset"\ncurriculum = { easy = 0.5, hard = 0.5 }',
            "task.curriculum: hard = 0.5",
        ),
    ],
)
def test_a_mistake_of_a_source_is_named_with_its_place(recipe: Path, old: str, new: str, expected: str) -> None:
    (line,) = told(recipe, RECIPE.replace(old, new))
    assert line.startswith(f"{recipe}: ")
    assert expected in line


def test_the_mistakes_of_the_task_and_of_further_evaluations_come_together(recipe: Path) -> None:
    (recipe.parent / "long.csv").write_text("question,answer\n,4\n")
    (recipe.parent / "far.jsonl").write_text('{"prompt": 4}\n')
    lines = told(recipe, RECIPE + SET.replace("short.jsonl", "far.jsonl"))
    places = [f"{recipe.parent}/long.csv:2", *[f"{recipe.parent}/far.jsonl:1"] * 2]  # no answer, and a number as prompt
    assert [line.split(": ")[0] for line in lines] == places


def test_prompts_beyond_the_limit_are_refused_with_their_places(recipe: Path) -> None:
    lines = told(recipe, RECIPE.replace('kind = "dataset"', 'kind = "dataset"\nmax_prompt_tokens = 5'))
    assert len(lines) == 8
    assert lines[0].startswith(f"{recipe.parent}/long.csv:2: a prompt of 9 tokens; at most 5 fit")


def test_prompts_beyond_the_limit_are_left_out_and_counted(recipe: Path) -> None:
    rows = recipe.parent / "long.csv"
    rows.write_text(rows.read_text() + "1=,1\n2=,2\n")
    plan = planned(recipe, "task.max_prompt_tokens=5", "task.long_prompts=drop")
    assert plan.sources == (PromptSource("short", 3, 1.0), PromptSource("long", 2, 2.0))
    assert plan.notes[0] == (
        f"8 of 13 prompts (for training) are longer than 5 tokens; the first is {rows}:2: they are left out"
    )


def test_a_plan_knows_of_no_prompt_that_the_run_leaves_out(recipe: Path) -> None:
    """The longest that is left has 4 tokens; completions have 8."""
    limits = ["task.max_prompt_tokens=5", "task.long_prompts=drop"]
    rows = recipe.parent / "long.csv"
    rows.write_text(rows.read_text() + "1=,1\n2=,2\n")
    longest = max(len(prompt.token_ids) for prompt in planned(recipe, *limits).training)
    assert job_of(recipe, limits, "constant:tokens=8", lambda text: None).longest == longest + 8 <= 13


def test_where_no_prompt_is_left_the_filter_and_its_count_are_told(recipe: Path) -> None:
    limit = 'kind = "dataset"\nmax_prompt_tokens = 1\nlong_prompts = "drop"'
    (line,) = told(recipe, RECIPE.replace('kind = "dataset"', limit))
    assert "11 of 11 prompts (for training) are longer than 1 tokens" in line
    assert "none is left" in line
    (line,) = told(recipe, RECIPE.replace('kind = "dataset"', limit.replace("= 1\n", "= 4\n")))
    assert "no question of source 'long' is left, which has a weight" in line


def test_prompts_beyond_the_limit_lose_their_first_tokens(recipe: Path) -> None:
    plan = planned(recipe, "task.max_prompt_tokens=3", "task.long_prompts=truncate")
    assert [len(prompt.token_ids) for prompt in plan.training] == [3] * 11
    assert plan.tokenizer.decode(plan.training[3].token_ids) == "1=0"
    assert plan.training[3].text == "0+0+0+1=0"


def test_a_run_has_its_data_on_record_and_asks_them_in_their_order(recipe: Path, laboratory: Laboratory) -> None:
    run = recipe.parent / "run"
    recipe.write_text(f"{RECIPE}samples = 2\nkeep_best = true\n{SET}")
    laboratory.trained(run, "trainer.steps=5", recipe=recipe)  # 10 groups, and an epoch has 3 + 6
    with closing(Ledger(run / "ledger.sqlite", StoreConfig())) as ledger:
        found = ledger.get(DATA, DataRecord)
    assert found == DataRecord.of(planned(recipe, "trainer.steps=5"))
    assert check_run(run).kept
    (lines,) = read_sets(run / "metrics.jsonl").values()
    assert [(line.name, line.step, line.prompts, line.samples) for line in lines] == [
        ("sums", step, 2, 6) for step in (0, 3, 5)
    ]
    assert [line.samples for line in read_metrics(run / "metrics.jsonl")[1]] == [2, 2]
    best = json.loads((run / "best.json").read_text())
    assert sealed(run / "policy" / "best") == sealed(run / "policy" / f"v{best['step']:06d}")
    sources = [row.source for row in read_trajectories(run) if row.group.startswith("0.")]
    assert (sources.count("short"), sources.count("long")) == (6, 12)  # two completions of each prompt


def test_a_resume_with_other_data_or_weights_is_refused(recipe: Path) -> None:
    run = recipe.parent / "run"
    prepare(recipe, [], run, resume=False).folder.release()
    for old, new, expected in [
        ("weight = 2.0", "weight = 3.0", "the sources, their weights or the curriculum are not those of the run"),
        ("prompts = 1\n", f"prompts = 1\nbest_of = 'sum'\n{SET}", "best_of = 'sum' is no set; did you mean 'sums'?"),
        ("prompts = 1\n", f"prompts = 1\n{SET}{SET}", "two sets have one name: sums, sums"),
        (
            "prompts = 1\n",
            f"prompts = 1\n{SET.replace('every', 'evry')}",
            "evaluation.sets.0.evry: unknown key; did you",
        ),
        ('kind = "dataset"', 'kind = "dataset"\ncurriculum = {}', "task.curriculum"),
        ("held_out = 1", "held_out = 2", "the training questions are not those of the run"),
    ]:
        recipe.write_text(RECIPE.replace(old, new))
        with pytest.raises((RunFolderError, RecipeError), match=expected):
            prepare(recipe, [], run, resume=True)
    (run / "questions.jsonl").unlink()  # as if it had been killed before
    (recipe.parent / "short.jsonl").rename(recipe.parent / "moved.jsonl")
    recipe.write_text(RECIPE.replace('data = "short.jsonl"', 'data = "moved.jsonl"\nname = "short"'))
    prepare(recipe, [], run, resume=True).folder.release()
    assert check_run(run).kept


def test_a_recipe_of_another_task_has_one_source_without_a_name(recipe: Path) -> None:
    task = '[task]\nkind = "arithmetic"\nprompts = 5\nheld_out = 5\n'
    recipe.write_text(f'[model]\npath = "policy"\n{task}[trainer]\n[sampling]\nmax_tokens = 4\n')
    assert planned(recipe).sources == (PromptSource("", 5, None),)
