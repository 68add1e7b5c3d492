"""The resolved recipe of a run, in its ledger: what a resume is held to, whatever the file in the run folder says."""

from __future__ import annotations

import tomllib

from stretto.launch.recipe.recipe import Recipe, load_recipe, to_toml, validate
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger

RECIPE = "recipe"  #: its name in the ledger


def record_recipe(ledger: Ledger, recipe: Recipe) -> None:
    """Put the recipe that the run continues with on record."""
    ledger.put(RECIPE, to_toml(recipe))


def recorded_recipe(folder: RunFolder, text: str | None) -> Recipe:
    """The recipe on record, whose text is `text`; that of the run folder where none is (an older format).

    Raises:
        RecipeError: this version of stretto cannot read it.
    """
    return load_recipe(folder.recipe) if text is None else validate(tomllib.loads(text), f"{folder.ledger}: {RECIPE}")
