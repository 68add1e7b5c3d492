"""Warnings about a recipe's questions, schedule, model and workflow, before its run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.launch.preflight.base import base_folder
from stretto.launch.preflight.questions import place_of
from stretto.launch.recipe.extensions import AgentConfig
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.tokenizer import Tokenizer
from stretto.rollout.config import RolloutConfig
from stretto.rollout.questions import Question, Questions
from stretto.rollout.workflow import WorkflowConfig
from stretto_app.extensions.preflight.trial import try_reward


def first_notes(recipe: Recipe, questions: Questions, tokenizer: Tokenizer) -> list[str]:
    """Return warnings, if any, about the tokenizer's chat template and about workflows that wait for each other."""
    return [*_template_notes(questions.training, tokenizer), *_workflow_notes(recipe, tokenizer)]


def last_notes(recipe: Recipe, questions: Questions, sets: Sequence[Question], *, tried: bool) -> list[str]:
    """Return warnings, if any, about digits, schedule, experts, repeated rows and the reward. `sets`: questions of
    ``[[evaluation.sets]]``. `tried`: the reward was tried when the run began, so it is not tried again. Otherwise
    RewardFunctionError is raised if it cannot be used (see `try_reward`)."""
    completions = recipe.rollout.batch_size * recipe.rollout.group_size
    return [
        *strange_digits(questions),
        *schedule_notes(recipe),
        *router_notes(base_folder(recipe.model, recipe.seed)),
        *repeated(questions, sets),
        *(() if tried else try_reward(recipe.rewards, questions.training, completions=completions)),
    ]


def schedule_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each learning-rate warm-up that is longer than its training."""
    for name, section in (("trainer", recipe.trainer), ("warm_start", recipe.warm_start)):
        if section is not None and section.warmup_steps > section.steps:
            reached = section.learning_rate * section.steps / section.warmup_steps
            yield (
                f"{name}.warmup_steps = {section.warmup_steps} of {name}.steps = {section.steps}: the learning rate "
                f"reaches only {reached:.3g}, not {section.learning_rate:g}"
            )


def router_notes(model: Path) -> Iterator[str]:
    """Yield a warning if the config in the folder `model` asks for a loss that balances its experts. Only the recipe's
    objective is trained, so nothing keeps the experts evenly used."""
    coefficient = json.loads((model / "config.json").read_text(encoding="utf-8")).get("router_aux_loss_coef")
    if isinstance(coefficient, (int, float)) and coefficient:
        yield (
            f"the model's router_aux_loss_coef = {coefficient:g} is not used: the objective of the recipe alone is "
            "trained, and nothing keeps its experts evenly used"
        )


def repeated(questions: Questions, sets: Sequence[Question] = ()) -> list[str]:
    """Return warnings about training questions that are also held out or in the further `sets` (questions of
    ``[[evaluation.sets]]``), and about questions that a later row repeats, with another answer or with the same; empty
    if there are none. Generated questions are exempt, and so are held-out questions and sets that are rows of the
    training file itself."""
    training = [row for row in questions.training if row.place]
    both = {row.place for row in training}  # one file may be given for both
    held_out, further = (
        [row for row in rows if row.place and row.place not in both] for rows in (questions.held_out, sets)
    )
    first = {_asked(row): row for row in reversed(training)}
    leaked, known = (
        [(row, first[_asked(row)]) for row in rows if _asked(row) in first] for rows in (held_out, further)
    )
    again = [*_again(training), *_again(held_out)]
    contrary = [(row, other) for row, other in (*leaked, *again) if row.answer != other.answer]
    same = [(row, other) for row, other in again if row.answer == other.answer]
    return [
        *_warning(leaked, "held-out questions that are also trained on, which biases the held-out accuracy"),
        *_warning(known, "questions of [[evaluation.sets]] that are also trained on, which biases their accuracy"),
        *_warning(contrary, "questions that an earlier row has with another answer"),
        *_warning(same, "questions that an earlier row has with the same answer"),
    ]


def _again(rows: Sequence[Question]) -> list[tuple[Question, Question]]:
    first = {_asked(row): row for row in reversed(rows)}
    return [(row, first[_asked(row)]) for row in rows if first[_asked(row)] is not row]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _warning(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]


def strange_digits(questions: Questions) -> list[str]:
    """Return one warning if gold answers have digits such as ``１２`` (full width), which no completion in plain digits
    equals; else an empty list."""
    found = [(row, strange) for row in (*questions.training, *questions.held_out) if (strange := _strange(row))]
    if not found:
        return []
    row, strange = found[0]
    return [
        f"gold answers with digits other than 0 to 9, which completions in plain digits do not equal: {len(found):,}; "
        f"the first is {place_of(row)}: {strange!r} (U+{ord(strange):04X})"
    ]


def _strange(row: Question) -> str:
    return next((letter for letter in row.answer if not letter.isascii() and letter.isdecimal()), "")


def _workflow_notes(recipe: Recipe, tokenizer: Tokenizer) -> list[str]:
    workflow = recipe.workflow
    if workflow is None:
        return []
    agents, waiting = isinstance(workflow, AgentConfig), _waiting_workflows(recipe.rollout, workflow)
    if not (agents or workflow.function == "tools") or "tools" in tokenizer.chat_template:
        return waiting
    return [*waiting, "the chat template knows no tools: they are described to the model in the system message"]


def _waiting_workflows(rollout: RolloutConfig, workflow: WorkflowConfig | AgentConfig) -> list[str]:
    agents = isinstance(workflow, AgentConfig)
    room = workflow.parallel if isinstance(workflow, AgentConfig) else workflow.workers * workflow.concurrency
    wanted, key = rollout.in_flight_bounds[1] * rollout.group_size, "parallel" if agents else "workers * concurrency"
    groups = "max_in_flight_max" if rollout.max_in_flight == "auto" else "max_in_flight"
    if wanted <= room:
        return []
    return [
        f"rollout.{groups} * group_size is {wanted} trajectories, and {'agents' if agents else 'workflows'} run "
        f"{room} at a time (workflow.{key}); others wait"
    ]


def _template_notes(questions: Sequence[Question], tokenizer: Tokenizer) -> list[str]:
    """Return one warning if the tokenizer has a chat template that plain texts do not use, or lacks one that they
    should; else an empty list."""
    if tokenizer.has_chat_template:
        plain = any(row.place and not row.messages and not row.as_chat for row in questions)
        unused = (
            'the tokenizer has a chat template, which is applied to plain texts only with task.chat_template="auto"'
        )
        return [unused] if plain else []
    chats = [row for row in questions if row.as_chat and not row.messages]
    if not chats:
        return []
    told = any(message["role"] == "system" for row in chats for message in row.as_chat)
    alone = f"as they stand{', without their system prompt' if told else ''}"
    return [f'chat_template is "auto", and the tokenizer has no chat template: the model gets plain texts {alone}']
