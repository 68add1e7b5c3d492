"""`stretto dpo`: a policy learns from pairs of answers. A recipe of its own, with nothing of a run in it:

seed = 1
[model]
path = "~/models/policy"
[preferences]
file = "pairs.jsonl"
beta = 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from stretto.launch.assemble.supervised import OnLearning, refuse_old, train_in_process, train_into
from stretto.launch.preflight.encoding import encode_preferences
from stretto.launch.preflight.plan import base_folder, check_devices, check_kind, check_vocabulary
from stretto.launch.recipe.recipe import parse_recipe, validated
from stretto.launch.recipe.sections import ModelConfig
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.config import PreferenceConfig
from stretto.trainer.roles.supervised import Preferences
from stretto.worlds.data.preferences import Fields, read_pairs


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


def dpo(
    recipe_path: Path,
    overrides: Sequence[str],
    out: Path,
    on_learning: OnLearning,
    on_warning: Callable[[str], None] = lambda _: None,
    starter: Spawner = FRESH,
) -> None:
    """Train the recipe's model on its pairs (DPO); the policy is written to `out` as a Hugging Face folder.

    Raises:
        UserError: something that the recipe names is not what it should be; nothing was started.
        RoleError: the process that trains failed.
        SystemExit: a signal ended it; nothing is left.
    """
    recipe = load_preferences(recipe_path, overrides)
    refuse_old(out)
    model, examples = _found(recipe)
    longest, room = max(pair.tokens for pair in examples.pairs), recipe.preferences.micro_batch_tokens
    if longest > room:
        on_warning(
            f"the longest pair has {longest} tokens, more than preferences.micro_batch_tokens = {room}: "
            "such a one is computed alone and takes more memory than that"
        )
    train_into(
        out,
        lambda log: train_in_process(
            "preferences",
            model,
            examples,
            PreferenceConfig(**recipe.preferences.model_dump(include=set(PreferenceConfig.model_fields))),
            out,
            log,
            seed=recipe.seed,
            seconds=recipe.preferences.deadline,
            hung=recipe.preferences.hung,
            on_learning=on_learning,
            starter=starter,
        ),
    )


def _found(recipe: PreferenceRecipe) -> tuple[Path, Preferences]:
    """The folder of the model, and the pairs as token ids; everything is checked that can be before it is loaded."""
    asked = recipe.preferences
    check_devices({"preferences": asked})
    base = inspect_model_folder(base_folder(recipe))
    check_kind(base)
    tokenizer = load_tokenizer(base.path)
    if asked.reference is not None:
        check_vocabulary(asked.reference, tokenizer, "preferences.reference")
    fields = Fields(asked.prompt_field, asked.chosen_field, asked.rejected_field)
    pairs = read_pairs(Path(asked.file), fields)
    reference = asked.reference or str(base.path)
    return base.path, Preferences(encode_preferences(pairs, tokenizer, base.context_length), reference)
