"""Resolved recipe of a run in its ledger, which a resume is compared with."""

from __future__ import annotations

import tomllib

from stretto.launch.recipe.recipe import Recipe, load_recipe, to_toml, validate
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger

RECIPE = "recipe"  #: the name of the fact in the ledger


def record_recipe(ledger: Ledger, recipe: Recipe) -> None:
    """Write the recipe to the ledger."""
    ledger.put(RECIPE, to_toml(recipe))


def recorded_recipe(folder: RunFolder, text: str | None) -> Recipe:
    """The recipe from its recorded `text`; without one (older format), the recipe of the run folder.

    Raises:
        RecipeError: this version of stretto cannot read it.
    """
    return load_recipe(folder.recipe) if text is None else validate(tomllib.loads(text), f"{folder.ledger}: {RECIPE}")
