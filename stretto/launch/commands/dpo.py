"""`stretto dpo`: a policy learns from pairs of completions; `launch.recipe.preferences` is its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.launch.assemble.supervised import OnLearning, refuse_old, train_in_process, train_into
from stretto.launch.preflight.encoding import encode_preferences
from stretto.launch.preflight.plan import base_folder, check_devices, check_kind, check_vocabulary
from stretto.launch.recipe.preferences import PreferenceRecipe, load_preferences
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.config import PreferenceConfig
from stretto.trainer.messages import Preferences
from stretto.worlds.data.preferences import Fields, read_pairs


def dpo(
    recipe_path: Path,
    overrides: Sequence[str],
    out: Path,
    on_learning: OnLearning,
    on_warning: Callable[[str], None] = lambda _: None,
    spawner: Spawner = FRESH,
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
            spawner=spawner,
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
