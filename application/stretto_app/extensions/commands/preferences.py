"""The recipe of `stretto dpo`:

seed = 1
[model]
path = "~/models/policy"
[preferences]
file = "pairs.jsonl"
beta = 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from stretto.core.errors import Problem, RecipeError
from stretto.launch.recipe.recipe import parse_recipe, validated
from stretto.launch.recipe.sections import ModelConfig
from stretto.trainer.config import PreferenceConfig


class PreferencesConfig(PreferenceConfig):
    """Section ``[preferences]`` of a recipe of `stretto dpo`: the pairs, the reference policy and the optimizer."""

    file: str = Field(description="JSONL file, relative to the recipe's folder")
    prompt_field: str = Field("prompt", description="key of the prompt")
    chosen_field: str = Field("chosen", description="key of the better completion")
    rejected_field: str = Field("rejected", description="key of the worse completion")
    reference: str | None = Field(None, description="Hugging Face folder; none: the model before training")
    deadline: float = Field(86_400.0, gt=0, description="seconds for the whole command")
    hung: float = Field(10.0, gt=0, description="seconds without a heartbeat after which the process is killed")


class PreferenceRecipe(BaseModel, extra="forbid", frozen=True):
    """The recipe of `stretto dpo`."""

    seed: int = Field(1, ge=0, lt=2**63, description="seed of all random draws")
    model: ModelConfig
    preferences: PreferencesConfig


def load_preferences(path: Path, overrides: Sequence[str] = ()) -> PreferenceRecipe:
    """Read a recipe of `stretto dpo`, apply ``section.key=value`` overrides, and validate it. Paths become absolute.

    Raises:
        RecipeError: the file cannot be read or parsed, or has wrong keys; names every wrong key.
    """
    tree = parse_recipe(path, overrides)
    if "preferences" not in tree and "task" in tree:
        remedy = "this is a recipe of `stretto train`; one of `stretto dpo` has [model] and [preferences] alone"
        raise RecipeError([Problem(f"{path}: preferences", "missing", remedy)])
    return validated(tree, str(path), PreferenceRecipe, overrides)
