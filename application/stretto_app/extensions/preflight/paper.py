"""Check of a recipe on a machine without the model's weights: its folder has only a config.json here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stretto.core.errors import DataError, Mistakes, Problem, UserError
from stretto.core.records import Prompt
from stretto.launch.preflight.base import base_folder
from stretto.launch.preflight.checks import (
    check_dividable,
    check_engine_keys,
    check_in_flight,
    check_muon,
    check_of_servers,
    check_reward_function,
    check_top_k,
    check_trainable,
    longest_prompt_allowed,
    medium_of,
)
from stretto.launch.preflight.paths import check_data_files, data_files
from stretto.launch.preflight.plan import Outline, encoded_within_limits, longest_of, longest_sequence
from stretto.launch.preflight.questions import encode_demonstrations, sift
from stretto.launch.recipe.recipe import Recipe
from stretto.model.attention_support import refuse_unsupported, refuse_untrainable
from stretto.model.hf.folder import ModelFolder
from stretto.model.hf.inspection import has_weights
from stretto.model.hf.skeleton import outlined
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rollout.questions import Question
from stretto_app.extensions.preflight.notes import repeated, router_notes
from stretto_app.extensions.preflight.trial import try_parts, try_reward

_NO_GPUS = 0


def is_on_paper(recipe: Recipe) -> bool:
    """Whether the recipe's model folder has a config.json but no weights. False for a model that is built."""
    path = Path(recipe.model.path) if recipe.model.path is not None else None
    return path is not None and (path / "config.json").is_file() and not has_weights(path)


def outline(recipe: Recipe) -> Outline:
    """Check everything of a recipe that does not depend on weights, devices, interpreters and servers, and return what
    is known of it. `notes` of the result name the skipped checks.

    Without a tokenizer, a prompt counts as many tokens as its text has bytes, which is an upper bound.

    Raises:
        RecipeError, ModelFolderError, DataError, RewardFunctionError: has every problem of recipe, model, data or
            reward.
    """
    mistakes = Mistakes(UserError)
    with mistakes:
        told = try_parts(recipe, outlets=False)
    with mistakes:
        check_engine_keys(recipe, here=False)
    with mistakes:
        check_reward_function(recipe.rewards)
    with mistakes:
        check_in_flight(recipe.rollout)
    with mistakes:
        medium_of(recipe)
    with mistakes:
        base, reference, longest = _model(recipe)
    with mistakes:
        check_data_files(data_files(recipe))
    mistakes.done()
    sifted = sift(recipe.rewards, recipe.task.questions(recipe.seed))
    questions, held_out = sifted.questions, list(sifted.questions.held_out)[: recipe.evaluation.prompts]
    if recipe.warm_start is not None and not questions.demonstrations:
        remedy = "add them to the data, or remove the section"
        raise DataError([Problem("[warm_start]", "the task has no demonstrations", remedy)])
    if recipe.warm_start is not None:
        check_muon(recipe.warm_start, base.path)
    tokenizer = load_tokenizer(base.path) if (base.path / "tokenizer.json").is_file() else None
    if tokenizer is None:
        training, asked = _as_bytes(questions.training), _as_bytes(held_out)
        notes: tuple[str | None, ...] = ()
    else:
        within = encoded_within_limits(recipe, questions, tokenizer, longest)
        training, asked = (one.prompts for one in within)
        check_of_servers("check_window", recipe, base, longest_sequence(recipe, base, longest_of((*training, *asked))))
        notes = tuple(one.note for one in within)
    shown = questions.demonstrations if recipe.warm_start is not None else ()
    if tokenizer is not None:
        encode_demonstrations(shown, tokenizer, base.context_length)
    return Outline(
        recipe=recipe,
        base=base,
        reference=reference,
        sampling=recipe.sampling.record(tokenizer.eos_token_ids if tokenizer is not None else base.eos_token_ids),
        training=training,
        held_out=asked,
        demonstrations=shown,
        kept_apart=len(questions.held_out),
        notes=(
            *told,
            *_not_checked(recipe, base, tokenizer, (*training, *asked), longest),
            *router_notes(base.path),
            *filter(None, notes),
            *sifted.warnings,
            *repeated(questions),
            *try_reward(
                recipe.rewards,
                questions.training,
                completions=recipe.rollout.batch_size * recipe.rollout.group_size,
            ),
        ),
    )


def _model(recipe: Recipe) -> tuple[ModelFolder, ModelFolder | None, int]:
    """Check the model of the recipe, by its config.json and without its weights; returns its facts, those of a
    reference model or None, and the longest allowed prompt in tokens. Raises ModelFolderError or RecipeError for the
    first problem."""
    base, config = outlined(base_folder(recipe.model, recipe.seed))
    refuse_unsupported(config)
    refuse_untrainable(config)
    check_of_servers("check_model", recipe, base)
    check_trainable(recipe.trainer, base.path, _NO_GPUS)
    reference = _reference(recipe)
    longest = longest_prompt_allowed(recipe, base)
    check_top_k(recipe, base)
    return base, reference, longest


def _reference(recipe: Recipe) -> ModelFolder | None:
    """Check the model of ``algorithm.reference.path`` and return its facts; None without a path or a config.json.
    Raises RecipeError or ModelFolderError."""
    asked = recipe.algorithm.reference
    if asked is None or asked.path is None or not (Path(asked.path) / "config.json").is_file():
        return None
    check_dividable(recipe.trainer, Path(asked.path), "algorithm.reference.path")
    return outlined(Path(asked.path))[0]


def _not_checked(
    recipe: Recipe, base: ModelFolder, tokenizer: Tokenizer | None, prompts: tuple[Prompt, ...], longest: int
) -> list[str]:
    found = [f"not checked: the weights, which {base.path} does not hold; its config.json says how many there are"]
    if tokenizer is None:
        fits = "" if max(len(prompt.token_ids) for prompt in prompts) <= longest else f", and whether {longest} hold it"
        found.append(f"not checked: the tokens of prompts and the end token, without a tokenizer.json{fits}")
    if recipe.engine.python is not None:
        found.append(f"not checked: engine.python, {recipe.engine.python} on the machine of the run")
    if recipe.engine.addresses:
        found.append(f"not checked: {len(recipe.engine.addresses)} servers of engine.addresses, which were not asked")
    found.append("not checked: devices, ports and memory of the machines of the run; these numbers are of this machine")
    return found


def _as_bytes(questions: Iterable[Question]) -> tuple[Prompt, ...]:
    """Make prompts without a tokenizer: each byte of the text counts as one token."""
    texts = [(one, "".join(message["content"] for message in one.messages) or one.text) for one in questions]
    return tuple(Prompt(one.id, tuple(text.encode()), one.text, one.answer) for one, text in texts)
