"""Mistakes of values that are given beside a recipe name the override, and none that stands in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.recipe.recipe import load_recipe
from tests.launch.test_recipe import SMALL, merged, message, write


def test_a_mistake_of_an_override_is_named_by_the_override(tmp_path: Path) -> None:
    path = write(tmp_path, merged("[engine]\nslot = 3\n"))
    overrides = ["trainer.step=3", "task.held_out=0", "trainer.steps=7", "engine={ slots = 0 }"]
    told = message(path, overrides).splitlines()
    assert sorted(line.partition("; ")[0] for line in told) == [
        f"{path}: engine.slot: unknown key",
        "override engine.slots: 0",
        "override task.held_out: 0",
        "override trainer.step: unknown key",
    ]
    with pytest.raises(RecipeError, match=r"^override trainer\.step: unknown key; did you mean 'steps'\?$"):
        load_recipe(write(tmp_path, SMALL), {"trainer": {"step": 3}})


def test_a_mistake_of_several_keys_names_the_override_of_one_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    told = message(path, ["trainer.steps=7", "trainer.minibatches=1000"])
    assert told.startswith(f"{path} with override trainer.minibatches: trainer.minibatches = 1000 is more than")
    told = message(path, ["rollout.max_staleness=auto", "rollout.staleness_min=9"])
    assert told.startswith(f"{path}: rollout with override rollout.staleness_min: staleness_min = 9 is more than")
