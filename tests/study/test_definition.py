"""Promises of a study file.

- Every combination of the grid and the variants is a cell, with one run for each seed; all cells come before the next
  seed; runs are known by their recipes, and the digest of a study by those of its cells, however many seeds it has.
- Every mistake is reported at once, with its place in the study or in the recipe and the nearest right name: unknown
  keys, a grid of nothing, cells that are one run, cells that would train different numbers of trajectories.
- The studies that come with stretto load, and their runs can begin.
"""

import math
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.preflight.plan import make_plan
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto_app.study.command import SHIPPED, find_study
from stretto_app.study.definition import load_study
from tests.launch.running import TINY

GRID = """
[grid]
rollout.max_staleness = [0, 4.0, inf]
algorithm.correction = ["mask", { kind = "truncate", high = 3.0 }]
"""


def written(folder: Path, body: str, recipe: object = TINY) -> Path:
    path = folder / "mine.toml"
    path.write_text(f'recipe = "{recipe}"\n{body}')
    return path


def refused(path: Path, **changes: int) -> list[str]:
    with pytest.raises(RecipeError) as refusal:
        load_study(path, **changes)
    return [str(problem).replace(str(path), "mine") for problem in refusal.value.problems]


def test_every_combination_is_a_cell_and_seeds_go_on_from_the_recipes(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, "seeds = 2\n[settings]\nseed = 7\n" + GRID))
    assert [cell.name for cell in study.cells] == [
        f"max_staleness = {bound}, correction = {correction}"
        for bound in ("0", "4", "inf")
        for correction in ("mask", "truncate high=3")
    ]
    last = study.cells[-1].runs[0].recipe
    assert (last.rollout.max_staleness, last.algorithm.correction) == (math.inf, CORRECTIONS("truncate", high=3.0))
    assert [(run.cell, run.seed) for run in study.runs[4:8]] == [(4, 7), (5, 7), (0, 8), (1, 8)]
    assert len({run.digest for run in study.runs}) == 12


def test_variants_are_multiplied_by_the_grid_and_steps_replace_all(tmp_path: Path) -> None:
    body = '[grid]\ntrainer.minibatches = [1, 2]\n[variants.naive]\nalgorithm.loss = "ppo"\n[variants.decoupled]\n'
    study = load_study(written(tmp_path, body), seeds=1, steps=9)
    assert [cell.name for cell in study.cells][:3] == [
        "naive, minibatches = 1",
        "naive, minibatches = 2",
        "decoupled, minibatches = 1",
    ]
    assert {run.recipe.trainer.steps for run in study.runs} == {9}
    assert [cell.runs[0].recipe.algorithm.loss.kind for cell in study.cells][1:3] == ["ppo", "decoupled_ppo"]


def test_the_digest_is_that_of_the_cells_and_not_of_the_seeds(tmp_path: Path) -> None:
    path = written(tmp_path, GRID)
    assert load_study(path, seeds=1).digest == load_study(path, seeds=3).digest
    assert load_study(path, steps=5).digest != load_study(path).digest


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    body = "seed = 3\n[settings]\nrollout.group_sizes = 4\n[grid]\nrollout.max_stalenes = [0, 4]\n"
    assert refused(written(tmp_path, body)) == [
        "mine: seed: unknown key; did you mean 'seeds'?",
        "mine: rollout.group_sizes: unknown key; did you mean 'group_size'?",
        "mine: rollout.max_stalenes: unknown key; did you mean 'max_staleness'?",
    ]


def test_a_mistake_of_the_recipe_has_its_place_there(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TINY.read_text().replace("group_size = 4", "group_sise = 4"))
    (problem,) = refused(written(tmp_path, GRID, recipe))
    assert problem == f"{recipe}: rollout.group_sise: unknown key; did you mean 'group_size'?"


def test_a_mistake_of_some_cells_names_them(tmp_path: Path) -> None:
    body = '[grid]\nalgorithm.loss = ["decoupled_ppo", "ppo"]\nalgorithm.correction = ["mask", "truncate"]\n'
    (problem,) = refused(written(tmp_path, body))
    assert "(loss = ppo, correction = truncate): " in problem


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "mine: grid: nothing varies; give [grid] a list of values, or [variants]"),
        ("[grid]\nseed = []\n", "mine: grid.seed: an empty list; give the values to compare"),
        ("[grid]\nseed = 3\n", "mine: grid.seed: 3; give a list of values; one for all is in [settings]"),
        ("[grid]\nseed = [1, 1]\n", "mine: grid.seed: 1 is listed twice; give each value once"),
        (
            "[variants.a]\nseed = 1\n[variants.b]\n",
            "mine: grid: 'a' and 'b' are the same runs, or differ in their seeds alone; leave out one of them; `seeds` "
            "says how many seeds a cell has",
        ),
        (
            "[grid]\nseed = [1, 2]\n",
            "mine: grid: 'seed = 1' and 'seed = 2' are the same runs, or differ in their seeds alone; leave out one of "
            "them; `seeds` says how many seeds a cell has",
        ),
        (
            "[grid]\nrollout.batch_size = [2, 4]\n",
            "mine: grid: 'batch_size = 2' would train 48 trajectories and 'batch_size = 4' 96; set trainer.steps "
            "beside batch_size and group_size in [variants], so that every cell trains as many",
        ),
        *(
            (
                f"[grid]\nevaluation.{key} = [4, 8]\n",
                f"mine: evaluation.{key}: differs between cells, and accuracies over other questions or seeds are not "
                "compared; set it in [settings]",
            )
            for key in ("prompts", "samples", "seed")
        ),
        (
            "[settings]\nevaluation.patience = 2\nevaluation.every = 1\n[grid]\nrollout.max_staleness = [1, 2]\n",
            "mine: evaluation.patience: ends runs at different steps, and every run of a study trains the same number "
            "of trajectories; set it to 0 in [settings]",
        ),
        (
            "[settings]\nevaluation.goal = 0.5\nevaluation.every = 1\n[grid]\nrollout.max_staleness = [1, 2]\n",
            "mine: evaluation.goal: ends runs at different steps, and every run of a study trains the same number "
            "of trajectories; set it to 0 in [settings]",
        ),
    ],
)
def test_a_comparison_of_nothing_or_of_unequals_is_refused(body: str, problem: str, tmp_path: Path) -> None:
    assert refused(written(tmp_path, body)) == [problem]


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    (problem,) = refused(written(tmp_path, GRID, "nowhere.toml"))
    assert problem.startswith(f"{tmp_path / 'nowhere.toml'}: no such file")


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.toml")))
def test_a_study_that_comes_with_stretto_loads_by_its_name_and_its_runs_can_begin(name: str) -> None:
    """Prompts fit beside the longest completions, in every cell."""
    recipes = [cell.runs[0].recipe for cell in load_study(find_study(name), seeds=1).cells]
    kinds = {recipe.sampling.model_dump_json() + recipe.task.model_dump_json(): recipe for recipe in recipes}
    assert kinds
    for recipe in kinds.values():
        few = recipe.task.model_copy(update={"prompts": 300, "demonstrations": 300})
        assert make_plan(recipe.model_copy(update={"task": few})).training


def test_close_values_have_labels_of_their_own(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, "[grid]\ntrainer.learning_rate = [1.0000001e-3, 1.0000002e-3, 2e-3]\n"))
    names = ["0.0010000001", "0.0010000002", "0.002"]
    assert [cell.name for cell in study.cells] == [f"learning_rate = {name}" for name in names]


def test_an_unknown_name_has_a_near_one() -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'staleness'\?; or give the file of a study"):
        find_study("stalenes")


def test_a_folder_with_the_name_of_a_study_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("staleness", "mine"):
        (tmp_path / name).mkdir()
    assert find_study("staleness") == SHIPPED / "staleness.toml"
    with pytest.raises(RecipeError, match=r"mine: is a folder; .*; or give the file of a study"):
        find_study("mine")
