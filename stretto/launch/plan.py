"""Everything that can be known before a process starts: the policy, the prompts, the memory. Mistakes end here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import DataError, ModelFolderError, Problem
from stretto.core.records import Prompt, Sampling
from stretto.launch.recipe import Recipe
from stretto.model.build import build_policy
from stretto.model.folder import ModelFolder, inspect_model_folder
from stretto.model.tokenizer import Tokenizer, load_tokenizer
from stretto.rewards.loading import load_reward
from stretto.rollout.task import Question, Questions
from stretto.trainer.supervised import Demonstration

_SHOWN = 20
_PROCESS_BYTES = 350 << 20  # an interpreter with torch and transformers, before any model


@dataclass(frozen=True)
class Plan:
    """A recipe whose parts have been found, read and measured."""

    recipe: Recipe
    base: ModelFolder
    tokenizer: Tokenizer
    sampling: Sampling
    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    demonstrations: tuple[Demonstration, ...]

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.token_ids) for prompt in (*self.training, *self.held_out))


def make_plan(recipe: Recipe) -> Plan:
    """Find, read and check everything that the recipe names. Starts nothing.

    Raises:
        ModelFolderError, DataError, RewardFunctionError: with every problem of that part.
    """
    load_reward(recipe.rewards.function)
    base = inspect_model_folder(base_folder(recipe))
    tokenizer = load_tokenizer(base.path)
    questions = recipe.task.questions(recipe.seed)
    held_out = list(questions.held_out)[: recipe.evaluation.prompts]
    plan = Plan(
        recipe=recipe,
        base=base,
        tokenizer=tokenizer,
        sampling=recipe.sampling.record(tokenizer.eos_token_ids),
        training=encode_prompts(questions.training, tokenizer),
        held_out=encode_prompts(held_out, tokenizer),
        demonstrations=_demonstrations(recipe, questions, tokenizer),
    )
    _check_lengths(plan)
    return plan


def base_folder(recipe: Recipe) -> Path:
    """The folder of the policy before any training; a model that is to be built is built once and cached."""
    if recipe.model.path is not None:
        return Path(recipe.model.path)
    assert recipe.model.build is not None, "validated: either a path or a build"
    folder = cache_folder() / "models" / digest(recipe.model.build.model_dump_json(), recipe.seed)
    if not folder.exists():
        build_policy(recipe.model.build, folder, recipe.seed)
    return folder


def cache_folder() -> Path:
    """Where built models and warm starts are kept between runs: ``$STRETTO_CACHE``, else the user's cache."""
    root = os.environ.get("STRETTO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"


def digest(*parts: object) -> str:
    """A short name that depends on all parts."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=10).hexdigest()


def encode_prompts(questions: Iterable[Question], tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Questions as token ids, by the chat template where the question is a chat."""
    return tuple(
        Prompt(
            id=question.id,
            token_ids=tokenizer.encode_chat(question.messages)
            if question.messages
            else tokenizer.encode(question.text),
            text=question.text,
            answer=question.answer,
        )
        for question in questions
    )


def _demonstrations(recipe: Recipe, questions: Questions, tokenizer: Tokenizer) -> tuple[Demonstration, ...]:
    if recipe.warm_start is None:
        return ()
    if not questions.demonstrations:
        raise DataError(
            [Problem("[warm_start]", "the task has no demonstrations", "add them to the data, or remove the section")]
        )
    prompts = encode_prompts(questions.demonstrations, tokenizer)
    end = tokenizer.eos_token_ids[:1]
    return tuple(
        Demonstration(prompt_ids=prompt.token_ids, answer_ids=tokenizer.encode(question.demonstration or "") + end)
        for prompt, question in zip(prompts, questions.demonstrations, strict=True)
    )


def _check_lengths(plan: Plan) -> None:
    context, answer = plan.base.context_length, plan.sampling.max_tokens
    if answer >= context:
        found = f"sampling.max_tokens = {answer}, and the model's context has {context} tokens"
        raise ModelFolderError([Problem(str(plan.base.path), found, "choose fewer tokens or a longer context")])
    room = context - answer
    place = getattr(plan.recipe.task, "file", "the task")
    problems = [
        Problem(
            f"{place}:{prompt.id}",
            f"a prompt of {len(prompt.token_ids)} tokens",
            f"at most {room} fit: context {context} - sampling.max_tokens {answer}"
            if prompt.token_ids
            else "a prompt needs at least one token",
        )
        for prompt in (*plan.training, *plan.held_out)
        if not 0 < len(prompt.token_ids) <= room
    ]
    if problems:
        more = [Problem(str(place), f"{len(problems) - _SHOWN} more prompts like these")] * (len(problems) > _SHOWN)
        raise DataError([*problems[:_SHOWN], *more])


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that each part of the run will need, and what the machine has left."""

    trainer: int
    engines: int
    others: int
    available: int

    @property
    def total(self) -> int:
        return self.trainer + self.engines + self.others

    def __str__(self) -> str:
        parts = (("trainer", self.trainer), ("engines", self.engines), ("others", self.others), ("all", self.total))
        shown = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts)
        return f"{shown}; available {self.available / 2**30:.2f} GiB"


def estimate_memory(plan: Plan) -> MemoryEstimate:
    """Trainer: weights, gradients, Adam's two moments, one micro-batch's activations. Engine: weights and cache."""
    recipe, base = plan.recipe, plan.base
    width = {"float32": 4, "bfloat16": 2, "float16": 2}
    longest = plan.longest_prompt + plan.sampling.max_tokens
    tokens = max(recipe.trainer.micro_batch_tokens, longest)
    # About 40 numbers of the model's width are kept per token and layer for the backward pass.
    activations = tokens * base.layers * base.hidden_size * 40 * 4
    trainer = base.parameters * 16 + activations + _PROCESS_BYTES
    cache = recipe.engine.slots * longest * base.layers * 2 * base.kv_heads * base.head_dim
    engine = (base.parameters + cache) * width[recipe.engine.dtype] + _PROCESS_BYTES
    others = _PROCESS_BYTES + recipe.rewards.workers * (40 << 20) + 2 * base.parameters * 4
    return MemoryEstimate(trainer, recipe.engine.count * engine, others, available_memory())


def available_memory() -> int:
    """Bytes that can be had without swapping (MemAvailable of the kernel)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def warnings(plan: Plan) -> Sequence[str]:
    """What will work, but perhaps not as hoped."""
    recipe, notes = plan.recipe, []
    cores = len(os.sched_getaffinity(0))
    threads = recipe.engine.count * recipe.engine.threads + recipe.trainer.threads
    if threads > cores and recipe.rollout.max_staleness > 0:
        notes.append(f"engines and trainer use {threads} threads on {cores} cores: they will slow each other down")
    memory = estimate_memory(plan)
    if memory.total > memory.available:
        notes.append(f"the run may not fit into memory: {memory}")
    if recipe.rollout.batch_size > len(plan.training):
        notes.append(f"a batch of {recipe.rollout.batch_size} groups repeats prompts: there are {len(plan.training)}")
    return notes
