"""The recipe of `stretto dpo`, with nothing of a run in it:

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

from stretto.launch.recipe.recipe import parse_recipe, validated
from stretto.launch.recipe.sections import ModelConfig
from stretto.trainer.config import PreferenceConfig


class PreferencesConfig(PreferenceConfig):
    """`[preferences]`: the pairs, the policy to stay close to, and how it is learnt."""

    file: str = Field(description="JSONL file, relative to the recipe's folder")
    prompt_field: str = Field("prompt", description="key of the prompt")
    chosen_field: str = Field("chosen", description="key of the better answer")
    rejected_field: str = Field("rejected", description="key of the worse answer")
    reference: str | None = Field(None, description="Hugging Face folder; none: the model that is trained, as it was")
    deadline: float = Field(86_400.0, gt=0, description="seconds that the whole may take")
    hung: float = Field(10.0, gt=0, description="seconds for its process to give a sign of life; it is killed then")


class PreferenceRecipe(BaseModel, extra="forbid", frozen=True):
    """What `stretto dpo` reads."""

    seed: int = Field(1, ge=0, lt=2**63, description="of everything that is drawn")
    model: ModelConfig
    preferences: PreferencesConfig


def load_preferences(path: Path, overrides: Sequence[str] = ()) -> PreferenceRecipe:
    """Read a recipe file, apply ``section.key=value`` overrides, validate; paths become absolute.

    Raises:
        RecipeError: the file cannot be read or parsed, or some of its keys are not what they should be (all of them).
    """
    return validated(parse_recipe(path, overrides), str(path), PreferenceRecipe)
