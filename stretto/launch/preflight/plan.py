"""Everything that can be known before a process starts: the policy, the prompts, the memory. Mistakes end here."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from stretto.core.errors import DataError, ModelFolderError, Problem, RecipeError, RewardFunctionError, RoleError
from stretto.core.machine import cache_folder
from stretto.core.records import Prompt, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.capacity import longest_row_of
from stretto.launch.preflight.encoding import encode_demonstrations, encode_prompts
from stretto.launch.preflight.gold import sift
from stretto.launch.preflight.repeats import repeated
from stretto.launch.preflight.trainable import check_trainable
from stretto.launch.preflight.trial import try_reward
from stretto.launch.recipe.recipe import Recipe
from stretto.launch.recipe.sections import ModelConfig
from stretto.model.attention_support import refuse_unsupported, refuse_untrainable
from stretto.model.hf.build import build_policy
from stretto.model.hf.fitting import check_fit
from stretto.model.hf.folder import ModelFolder, inspect_model_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.loading import PLACE, load_reward
from stretto.rewards.service.pool import check_reward
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.messages import Demonstration
from stretto.worlds.data.task import Question

_LARGEST_PORT = 65_535
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
    notes: tuple[str, ...] = ()  # what the data has to say
    rows: Mapping[tuple[str, str], str] = field(default_factory=dict)  # further fields, for a reward that takes them
    kept_apart: int = 0  # questions that are held out, of which evaluation.prompts are asked

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.token_ids) for prompt in (*self.training, *self.held_out))


def make_plan(recipe: Recipe, *, begun: bool = False) -> Plan:
    """Find, read and check everything that the recipe names. Starts nothing.

    Args:
        begun: the policy that reinforcement starts from is there already; the plan has no demonstrations.

    Raises:
        ModelFolderError, DataError, RewardFunctionError: with every problem of that part.
    """
    _check_reward(recipe.rewards)
    _check_ports(recipe.engine)
    check_devices({"engine": recipe.engine, "trainer": recipe.trainer, "warm_start": recipe.warm_start})
    base = inspect_model_folder(base_folder(recipe))
    check_kind(base)
    check_trainable(recipe.trainer, base.path, torch.cuda.device_count())
    tokenizer = load_tokenizer(base.path)
    room = _room(recipe, base)
    _check_top_k(recipe, base)
    _check_reference(recipe, tokenizer)
    sifted = sift(recipe.rewards, recipe.task.questions(recipe.seed))
    questions = sifted.questions
    held_out = list(questions.held_out)[: recipe.evaluation.prompts]
    warms_up = recipe.warm_start is not None and not begun
    if warms_up and not questions.demonstrations:
        remedy = "add them to the data, or remove the section"
        raise DataError([Problem("[warm_start]", "the task has no demonstrations", remedy)])
    shown = questions.demonstrations if warms_up else ()
    prompts = encode_prompts([*questions.training, *held_out], tokenizer, room)
    return Plan(
        recipe=recipe,
        base=base,
        tokenizer=tokenizer,
        sampling=recipe.sampling.record(tokenizer.eos_token_ids),
        training=prompts[: len(questions.training)],
        held_out=prompts[len(questions.training) :],
        demonstrations=encode_demonstrations(shown, tokenizer, base.context_length),
        rows=_further_fields(recipe, (*questions.training, *held_out)),
        kept_apart=len(questions.held_out),
        notes=(
            *_unused_template(questions.training, tokenizer),
            *sifted.warnings,
            *repeated(questions),
            *try_reward(recipe.rewards, questions.training),
        ),
    )


def _further_fields(recipe: Recipe, questions: Sequence[Question]) -> dict[tuple[str, str], str]:
    """Of each row what a reward of the user's own may take, by prompt and gold answer.

    Raises:
        DataError: two rows share these and differ in a further field: a reward could not tell them apart.
    """
    found: dict[tuple[str, str], str] = {}
    if recipe.rewards.function in BUILT_IN:
        return found
    for row in questions:
        if row.fields and found.setdefault((row.text, row.answer), row.fields) != row.fields:
            problem = "has the prompt and the gold answer of another row, and other further fields"
            raise DataError([Problem(row.place, problem, "a reward is told the fields of a row by these two")])
    return found


def _unused_template(questions: Sequence[Question], tokenizer: Tokenizer) -> list[str]:
    plain = [row for row in questions if row.place and not row.messages and not row.as_chat]
    if not plain or not tokenizer.has_chat_template:
        return []
    return ['the tokenizer has a chat template; prompts that are texts are asked by it with task.chat_template="auto"']


def _room(recipe: Recipe, base: ModelFolder) -> int:
    """Tokens that a prompt may have."""
    answer = recipe.sampling.max_tokens
    if answer >= base.context_length:
        found = f"sampling.max_tokens = {answer}, and the model's context has {base.context_length} tokens"
        raise ModelFolderError([Problem(str(base.path), found, "choose fewer tokens or a longer context")])
    longest = longest_row_of(base, recipe.engine)
    if answer >= longest:
        found = (
            f"sampling.max_tokens = {answer}, and engine.cache_gib = {recipe.engine.cache_gib:g} holds {longest} tokens"
        )
        remedy = "choose fewer tokens, or more memory for keys and values"
        raise RecipeError([Problem("engine.cache_gib", f"{found} of one answer with its prompt", remedy)])
    return min(base.context_length, longest) - answer


def _check_top_k(recipe: Recipe, base: ModelFolder) -> None:
    if recipe.sampling.top_k > base.vocab_size:
        found = f"sampling.top_k = {recipe.sampling.top_k}, and the model's vocabulary has {base.vocab_size} tokens"
        raise ModelFolderError([Problem(str(base.path), found, "choose fewer, or 0 for all")])


def _check_reference(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """The reference policy, if there is one of its own, gives the same tokens the same names."""
    reference = recipe.algorithm.reference
    if reference is None or reference.path is None:
        return
    check_vocabulary(reference.path, tokenizer, "algorithm.reference.path")


def check_vocabulary(reference: str, tokenizer: Tokenizer, key: str) -> None:
    """The model in the folder `reference`, which `key` of a recipe names, can stand beside the policy."""
    folder = inspect_model_folder(reference)
    check_kind(folder)
    other = load_tokenizer(folder.path)
    if other.vocabulary != tokenizer.vocabulary:
        found = f"its vocabulary ({len(other.vocabulary)} tokens) is not the policy's ({len(tokenizer.vocabulary)})"
        remedy = f"{key} needs a model with the policy's tokenizer; without it the start is taken"
        raise ModelFolderError([Problem(reference, found, remedy)])


def _check_reward(config: RewardsConfig) -> None:
    """A reward of the user's own is imported in a process that can be killed: its module may hang, or exit. So is one
    that depends on the machine."""
    if config.function in BUILT_IN and not BUILT_IN[config.function].configured:
        return
    if ":" not in config.function and config.function not in BUILT_IN:
        load_reward(config.function)
    try:
        asyncio.run(check_reward(config))
    except RoleError as error:
        raise RewardFunctionError([Problem(PLACE, str(error), "its module must be importable")]) from None


def _check_ports(config: EngineConfig) -> None:
    """Every port that an engine will listen on is free."""
    if config.transport == "unix":
        return
    ports = range(config.base_port, config.base_port + config.count)
    if ports[-1] > _LARGEST_PORT:
        found = f"{config.base_port}, and {config.count} engines need as many ports"
        raise RecipeError([Problem("engine.base_port", found, f"ports end at {_LARGEST_PORT}")])
    taken = [port for port in ports if not is_free(port)]
    if taken:
        raise RecipeError(Problem("engine.base_port", f"port {port} is in use", "choose free ports") for port in taken)


def check_devices(sections: Mapping[str, EngineConfig | OptimizerConfig | None]) -> None:
    """Whoever shall work on a GPU has one."""
    wanted = [name for name, section in sections.items() if section is not None and section.device == "cuda"]
    if wanted and not torch.cuda.is_available():
        found, remedy = "'cuda', and torch finds no GPU that it can use", "'auto' takes one if there is one"
        raise RecipeError(Problem(f"{name}.device", found, remedy) for name in wanted)


def check_kind(base: ModelFolder) -> None:
    """Engine and trainer can compute the model, as far as its config tells."""
    config = check_fit(base)
    refuse_unsupported(config)
    refuse_untrainable(config)


def is_free(port: int) -> bool:
    """Can a server listen on this port of the loopback interface now?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Startable(Protocol):
    """A recipe that says where its policy comes from."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def seed(self) -> int: ...


def base_folder(recipe: Startable) -> Path:
    """The folder of the policy before any training; a model that is to be built is built once and cached."""
    if recipe.model.path is not None:
        return Path(recipe.model.path)
    assert recipe.model.build is not None, "validated: either a path or a build"
    folder = cache_folder() / "models" / digest(recipe.model.build.model_dump_json(), recipe.seed)
    if not folder.exists():
        check_cache()
        build_policy(recipe.model.build, folder, recipe.seed)
    return folder


def check_cache() -> None:
    """Something can be written there.

    Raises:
        RecipeError: it cannot.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        found = f"the cache of built models and warm starts cannot be written: {error}"
        raise RecipeError([Problem(str(folder), found, "set STRETTO_CACHE to a folder of your own")]) from None


def digest(*parts: object) -> str:
    """A short name that depends on all parts."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=10).hexdigest()


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
    """Trainer: weights, and of what is trained of them gradients and Adam's two moments; a copy of all but gradients
    while a checkpoint is written; a reference and a critic if there are any; for each rank one micro-batch's
    activations, and once the whole policy, which it reads before it keeps its part. Engine: weights and cache."""
    recipe, base = plan.recipe, plan.base
    width = {"float32": 4, "bfloat16": 2, "float16": 2}
    longest = plan.longest_prompt + plan.sampling.max_tokens
    tokens = max(recipe.trainer.micro_batch_tokens, longest)
    # About 40 numbers of the model's width are kept per token and layer for the backward pass.
    activations = tokens * base.layers * base.hidden_size * 40 * 4
    adapters, reference = recipe.trainer.lora is not None, recipe.algorithm.reference
    one = 4 if adapters else 16 + 12  # adapters are a hundredth of it
    second = reference is not None and not (adapters and reference.path is None)
    policies = one + (4 if second else 0) + (one if recipe.algorithm.critic else 0)
    ranks = recipe.trainer.ranks
    whole = base.parameters * 4 * (ranks - 1)
    trainer = base.parameters * policies + whole + ranks * (activations + _PROCESS_BYTES)
    item = width[recipe.engine.dtype]
    full = recipe.engine.slots * longest * base.layers * 2 * base.kv_heads * base.head_dim * item
    engine = base.parameters * item + min(full, int(recipe.engine.cache_gib * 2**30)) + _PROCESS_BYTES
    others = _PROCESS_BYTES + recipe.rewards.workers * (40 << 20) + 2 * base.parameters * 4
    return MemoryEstimate(trainer, recipe.engine.count * engine, others, available_memory())


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes that the run folder will come to at most, and what its disk has left."""

    ledger: int
    policies: int
    checkpoints: int
    available: int

    @property
    def total(self) -> int:
        return self.ledger + self.policies + self.checkpoints

    def __str__(self) -> str:
        parts = (("ledger", self.ledger), ("policies", self.policies), ("checkpoints", self.checkpoints))
        shown = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in (*parts, ("all", self.total)))
        return f"{shown} at most; available {self.available / 2**30:.2f} GiB"


def estimate_disk(plan: Plan, folder: Path) -> DiskEstimate:
    """Ledger: tokens of the longest answers; 16 bytes each (id, log-probability, version) and 200 a row. Policies in
    float32; checkpoints with Adam's two moments, of a critic too, and one more while it is written."""
    recipe, weights = plan.recipe, plan.base.parameters * 4
    trainer, store, rollout = recipe.trainer, recipe.store, recipe.rollout
    kept = trainer.steps + 1 if trainer.keep_versions == "all" else trainer.keep_versions + 1
    steps = trainer.steps if store.keep_payloads != "none" else trainer.checkpoint_every * (store.keep_checkpoints + 1)
    answers = steps * rollout.batch_size * rollout.group_size
    rows = trainer.steps * rollout.batch_size * rollout.group_size * 200
    return DiskEstimate(
        ledger=answers * plan.sampling.max_tokens * 16 + rows,
        policies=kept * weights,
        checkpoints=(store.keep_checkpoints + 1) * 3 * weights * (2 if recipe.algorithm.critic else 1),
        available=shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free,
    )


def available_memory() -> int:
    """Bytes that can be had without swapping (MemAvailable of the kernel)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def warnings(plan: Plan) -> Sequence[str]:
    """What will work, but perhaps not as hoped."""
    recipe, notes = plan.recipe, list(plan.notes)
    cores = len(os.sched_getaffinity(0))
    threads = recipe.engine.count * recipe.engine.threads + recipe.trainer.ranks * recipe.trainer.threads
    if threads > cores and recipe.rollout.max_staleness > 0:
        notes.append(f"engines and trainer use {threads} threads on {cores} cores: they will slow each other down")
    longest = plan.longest_prompt + plan.sampling.max_tokens
    if longest > recipe.trainer.micro_batch_tokens:
        notes.append(
            f"an answer with its prompt may have {longest} tokens, more than trainer.micro_batch_tokens = "
            f"{recipe.trainer.micro_batch_tokens}: such a one is computed alone and takes more memory than that"
        )
    memory = estimate_memory(plan)
    if memory.total > memory.available:
        notes.append(f"the run may not fit into memory: {memory}")
    if recipe.rollout.batch_size > len(plan.training):
        notes.append(f"a batch of {recipe.rollout.batch_size} groups repeats prompts: there are {len(plan.training)}")
    return notes
