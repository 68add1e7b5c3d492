"""`stretto dpo`: trains a policy on preference pairs, by a recipe of its own (`extensions.commands.preferences`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stretto.core.machine import gpus
from stretto.launch.assemble.supervised import OnLearning, train_in_process
from stretto.launch.preflight.base import base_folder
from stretto.launch.preflight.checks import check_devices, check_kind, check_vocabulary
from stretto.launch.preflight.devices import seat_of_supervised
from stretto.launch.preflight.paths import check_data_files
from stretto.launch.preflight.questions import encode_demonstrations
from stretto.model.hf.folder import ModelFolder, inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes.spawn import FRESH, Spawner
from stretto.rollout.questions import Pair
from stretto.trainer.config import PreferenceConfig
from stretto.trainer.messages import Preference, Preferences
from stretto_app.extensions.commands.preferences import PreferenceRecipe, load_preferences
from stretto_app.extensions.commands.supervised import refuse_old, train_into
from stretto_workflows.data.dataset import Fields, read_pairs


def dpo(
    recipe_path: Path,
    overrides: Sequence[str],
    out: Path,
    on_learning: OnLearning,
    on_warning: Callable[[str], None] = lambda _: None,
    spawner: Spawner = FRESH,
) -> None:
    """Train the recipe's model on its pairs by DPO, and write the policy to `out` as a Hugging Face folder.

    Args:
        on_learning: called with the progress.
        on_warning: called with each warning.

    Raises:
        UserError: the recipe has a mistake, or `out` exists; nothing was started.
        RoleError: the training failed.
        SystemExit: a signal stopped the training; `out` does not exist.
    """
    recipe = load_preferences(recipe_path, overrides)
    refuse_old(out)
    base, reference, examples = _found(recipe)
    longest, room = max(pair.tokens for pair in examples.pairs), recipe.preferences.micro_batch_tokens
    if longest > room:
        on_warning(
            f"the longest pair has {longest} tokens, more than preferences.micro_batch_tokens = {room}: "
            "it is a micro-batch of its own and takes more memory"
        )
    there = gpus() if torch.cuda.is_available() else ()
    seat = seat_of_supervised("preferences", recipe.preferences, base, longest, there, reference=reference)
    train_into(
        out,
        lambda log: train_in_process(
            "preferences",
            base.path,
            examples,
            PreferenceConfig(**recipe.preferences.model_dump(include=set(PreferenceConfig.model_fields))),
            out,
            log,
            seed=recipe.seed,
            seconds=recipe.preferences.deadline,
            hung=recipe.preferences.hung,
            on_learning=on_learning,
            spawner=spawner,
            seat=seat,
        ),
    )


def _found(recipe: PreferenceRecipe) -> tuple[ModelFolder, ModelFolder, Preferences]:
    """Check the recipe; returns the model folder, that of the reference (the same, if the recipe names none), and the
    pairs as token ids. Weights are not loaded. Raises UserError if a folder, a file or a setting cannot be used."""
    config = recipe.preferences
    check_data_files([("preferences.file", config.file)])
    check_devices({"preferences": config})
    base = inspect_model_folder(base_folder(recipe.model, recipe.seed), "model.path")
    check_kind(base)
    tokenizer = load_tokenizer(base.path, special_tokens_in_messages=recipe.model.special_tokens_in_messages)
    asked = config.reference
    reference = base if asked is None else check_vocabulary(asked, tokenizer, "preferences.reference")
    pairs = read_pairs(Path(config.file), Fields(config.prompt_field, config.chosen_field, config.rejected_field))
    encoded = encode_preferences(pairs, tokenizer, base.context_length)
    return base, reference, Preferences(encoded, asked or str(base.path))


def encode_preferences(pairs: Sequence[Pair], tokenizer: Tokenizer, context: int) -> tuple[Preference, ...]:
    """Encode preference pairs. A prompt with either completion may have at most `context` tokens.

    Raises:
        DataError: a prompt is empty, a pair has more than `context` tokens, or has characters that the tokenizer does
            not know; names every such pair.
        ModelFolderError: there are chats, and the tokenizer has no chat template.
    """
    shown = [replace(p.question, demonstration=answer) for p in pairs for answer in (p.question.answer, p.rejected)]
    both = encode_demonstrations(shown, tokenizer, context)
    return tuple(
        Preference(chosen.prompt_ids, chosen.completion_ids, rejected.completion_ids)
        for chosen, rejected in zip(both[::2], both[1::2], strict=True)
    )
