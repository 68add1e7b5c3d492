"""What people take along for many machines: the keys of `[cluster]` and `[weights]`, and the commands that join. What
cannot be is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.commands.train import check
from stretto.launch.recipe.recipe import load_recipe
from tests.launch.test_paper import LARGE, RECIPES, assert_is_a_command, commands_in, containers, script


def test_the_recipe_for_two_machines_is_checked_with_a_config_alone(capsys: pytest.CaptureFixture[str]) -> None:
    check(RECIPES / "ray_2x8.toml", [f"model.path={LARGE}"])
    assert "nothing was started" in capsys.readouterr().out
    recipe = load_recipe(RECIPES / "ray_2x8.toml")
    assert recipe.trainer.ranks + recipe.engine.count == 2 * 8
    assert recipe.cluster.placer == "ray"
    assert recipe.weights.medium == "http"


@pytest.mark.parametrize(("text", "count"), [("ray_2x8.toml", 2), ("slurm.sbatch", 4)])
def test_the_commands_are_commands_of_stretto(text: str, count: int) -> None:
    found = list(commands_in((RECIPES / text).read_text()))
    assert len(found) == count
    for words in found:
        assert_is_a_command(words)


def test_the_overrides_of_the_script_are_keys_of_its_recipe(tmp_path: Path) -> None:
    (start,) = [words for words in commands_in(script()) if words[0] == "train" and "--resume" not in words]
    overrides = [word for word in start[1:] if "=" in word]
    recipe = load_recipe(RECIPES / "ray_2x8.toml", overrides)
    assert (recipe.trainer.ranks, recipe.cluster.placer, recipe.cluster.listen) == (8, "given", "0.0.0.0:7420")
    assert recipe.deadlines.stop < 300  # seconds from Slurm's signal to the end


def test_the_engines_on_kubernetes_join() -> None:
    container = containers()["Deployment"]
    assert container["command"] == ["stretto"]
    assert_is_a_command(container["args"])


def test_engines_that_are_given_need_an_address_where_they_join() -> None:
    tiny = RECIPES.parent / "tests" / "launch" / "recipes" / "tiny.toml"
    with pytest.raises(RecipeError, match='placer = "given" needs listen = "HOST:PORT"'):
        load_recipe(tiny, ["cluster.placer=given"])
    assert load_recipe(tiny, ["cluster.placer=given", "cluster.listen=0.0.0.0:0"]).cluster.placer == "given"


def test_a_medium_that_a_run_does_not_carry_is_refused_with_a_config_alone() -> None:
    with pytest.raises(RecipeError, match='"broadcast", and machines may join'):
        check(RECIPES / "ray_2x8.toml", [f"model.path={LARGE}", "weights.medium=broadcast"])
