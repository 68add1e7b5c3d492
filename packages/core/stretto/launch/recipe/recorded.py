"""The recipe of a run as recorded in its ledger; a resumed run is compared with it."""

from __future__ import annotations

import tomllib

from stretto.launch.recipe.recipe import Recipe, load_recipe, to_toml, validate
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger

RECIPE = "recipe"  #: name of the ledger's fact with the recipe as TOML


def record_recipe(ledger: Ledger, recipe: Recipe) -> None:
    """Store the recipe, with the values of all keys, in the ledger."""
    ledger.put(RECIPE, to_toml(recipe))


def recorded_recipe(folder: RunFolder, text: str | None) -> Recipe:
    """Parse the recorded `text` of a run's recipe. None (an older format): read ``recipe.toml`` of the run folder.

    Raises:
        RecipeError: this version of stretto does not accept the recipe.
    """
    return load_recipe(folder.recipe) if text is None else validate(tomllib.loads(text), f"{folder.ledger}: {RECIPE}")
