"""Estimates of the memory and disk space that a run needs, and warnings about unfavourable settings."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.core.errors import Problem, RecipeError, several
from stretto.core.machine import available_memory
from stretto.core.machine import cores as available_cores
from stretto.engine.config import capabilities_of
from stretto.launch.preflight.devices import engine_parts, rank_of
from stretto.launch.preflight.plan import Outline, Plan
from stretto.rollout.workflow import WorkflowConfig
from stretto.store.run_folder import BRANCHES
from stretto.trainer.memory import RankMemory

_PROCESS_BYTES = 350 << 20  # an interpreter with torch and transformers, before any model

_HOPELESS = 2.0  # more than this many times the available memory is refused; an estimate may be off by less
#: What a run with too little memory may change.
LESS_MEMORY = "a smaller model, fewer engines or engine.slots, a smaller engine.cache_gib or trainer.lora need less"
_LESS_DISK = {
    "ledger": 'store.keep_payloads = "none" or a smaller sampling.max_tokens',
    "policies": "fewer trainer.keep_versions",
    "checkpoints": "fewer store.keep_checkpoints",
    "tokens": "a smaller logging.tokens_gib",
}


@dataclass(frozen=True)
class _MemoryEstimate:
    """Bytes of host memory that the roles of a run need on this machine, and bytes available. `rank`: memory of each
    rank, on its GPU, or on the CPU, where `trainer` includes it."""

    trainer: int
    engines: int
    others: int
    available: int
    rank: RankMemory

    @property
    def total(self) -> int:
        return self.trainer + self.engines + self.others

    def __str__(self) -> str:
        parts = (("trainer", self.trainer), ("engines", self.engines), ("others", self.others), ("all", self.total))
        shown = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts)
        return f"{shown}; available {self.available / 2**30:.2f} GiB; each rank {self.rank}"


def step_and_run(plan: Outline) -> tuple[str, str]:
    """Return two sentences about sizes: of one training step, and of the whole run."""
    recipe = plan.recipe
    prompts, each, steps = recipe.rollout.batch_size, recipe.rollout.group_size, recipe.trainer.steps
    sequences, updates = prompts * each, recipe.trainer.minibatches
    what = "completions" if recipe.workflow is None else "conversations"
    step = f"{several(prompts, 'prompt')} × {each} {what} = {several(sequences, 'sequence')}"
    step += f", trained in {several(updates, 'optimizer step')}"
    step += f" of about {sequences / updates:,.0f}; {several(sequences * plan.longest_sequence, 'token')} at most"
    epochs = steps * prompts / max(1, len(plan.training))
    run = f"{several(steps, 'step')}: {several(steps * prompts, 'prompt')} ({epochs:.2g} epochs), "
    run += f"{several(steps * sequences, 'sequence')}, {several(steps * updates, 'optimizer step')}"
    return step, f"{run}, {several(steps * sequences * plan.longest_sequence, 'token')} at most"


def estimate_memory(plan: Outline) -> _MemoryEstimate:
    """Estimate the host memory that a run needs on this machine.

    Trainer, for each local rank: a process, the estimate of `trainer.memory` (on a GPU only its part in host memory),
    and a copy of weights and moments while a checkpoint is written. Engine: a process, the processes of its server if
    it has one, and unless it is on a GPU weights and KV cache. Others: the conductor, reward workers, workflow workers,
    and published weights.
    """
    recipe, base, trained, rank = plan.recipe, plan.base, plan.recipe.trainer, rank_of(plan)
    copied = 3 * rank.parts["gradients"] * (2 if recipe.algorithm.critic else 1)  # trained weights, two moments
    here = 0 if _on_gpu(plan, "rank", trained.device) else rank.total
    trainer = trained.local_ranks * (_PROCESS_BYTES + copied + rank.host + here)
    engine = _PROCESS_BYTES
    if not _on_gpu(plan, "engine", recipe.engine.device):
        engine += sum(engine_parts(plan).values())
    if recipe.engine.addresses:  # the servers run already, perhaps on other machines
        engine = _PROCESS_BYTES
    elif recipe.engine.kind != "native":
        engine += capabilities_of(recipe.engine.kind).process_bytes
    of_workflows = recipe.workflow.workers if isinstance(recipe.workflow, WorkflowConfig) else 0
    versions = 3 * base.parameters * 4  # two in the mailbox, and a copy that is being written
    others = _PROCESS_BYTES + (recipe.rewards.workers + of_workflows) * (40 << 20) + versions
    return _MemoryEstimate(trainer, recipe.local_engines * engine, others, available_memory(), rank)


def _on_gpu(plan: Outline, role: str, device: str) -> bool:
    seated = any(seat.need.role.startswith(role) for seat in plan.seats)
    return seated or device == "cuda" or (device == "auto" and torch.cuda.is_available())


def check_memory(plan: Plan) -> list[str]:
    """Check that the run needs at most twice the available memory. Always returns an empty list, as a check without
    warnings. Nothing is checked if roles are on GPUs.

    Raises:
        RecipeError: it needs more.
    """
    memory = estimate_memory(plan)
    # Without nvidia-smi, GPUs are not known here, and no seats are assigned.
    if memory.total > _HOPELESS * memory.available and not (plan.seats or torch.cuda.is_available()):
        raise RecipeError([Problem("memory", f"the run needs {memory}", LESS_MEMORY)])
    return []


@dataclass(frozen=True)
class _DiskEstimate:
    """Upper bound in bytes of the run folder by part, bytes available on its disk, and bytes that a resumed run has
    already written there."""

    ledger: int
    policies: int
    checkpoints: int
    tokens: int
    available: int
    written: int = 0

    @property
    def total(self) -> int:
        return self.ledger + self.policies + self.checkpoints + self.tokens

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(_LESS_DISK, key=lambda name: int(getattr(self, name)))

    def __str__(self) -> str:
        parts = [*((name, getattr(self, name)) for name in _LESS_DISK), ("all", self.total)]
        shown = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts)
        return f"{shown} at most; available {self.available / 2**30:.2f} GiB"


def estimate_disk(plan: Outline, folder: Path) -> _DiskEstimate:
    """Estimate the largest size of a run folder.

    Ledger: 16 bytes per token (id, log-probability, version), with all completions at their length limit, and 200 bytes
    per row. Per-token data: 13 bytes per token, at most `logging.tokens_gib`. Policies: in the dtype in which they are
    written. Checkpoints: float32 weights and Adam's two moments, also of a critic; one more while it is written.
    `folder`: where the run folder will be, or the folder of a run to be resumed.
    """
    recipe, weights = plan.recipe, plan.base.parameters * 4
    trainer, store, rollout = recipe.trainer, recipe.store, recipe.rollout
    kept = trainer.steps + 1 if trainer.keep_versions == "all" else trainer.keep_versions + 1
    steps = trainer.steps if store.keep_payloads != "none" else trainer.checkpoint_every * (store.keep_checkpoints + 1)
    completions = steps * rollout.batch_size * rollout.group_size
    trained = trainer.steps * rollout.batch_size * rollout.group_size
    resumed = (folder / "ledger.sqlite").exists()
    return _DiskEstimate(
        ledger=completions * plan.sampling.max_tokens * 16 + trained * 200,
        policies=kept * plan.base.parameters * _width(trainer.save_dtype, plan.base.dtype),
        checkpoints=(store.keep_checkpoints + 1) * 3 * weights * (2 if recipe.algorithm.critic else 1),
        tokens=recipe.logging.most_bytes(trained * plan.sampling.max_tokens),
        available=shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free,
        written=_written(folder) if resumed else 0,
    )


def _written(folder: Path) -> int:
    """Return the bytes of the files in a run folder, without branches of replays, which are no part of the estimate."""
    found = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != BRANCHES]
        for name in files:
            with suppress(FileNotFoundError):  # a temporary file that its writer has renamed meanwhile
                found += os.stat(os.path.join(place, name)).st_size
    return found


def _width(wanted: str, own: str) -> int:
    """Return the bytes per number in saved policies: 2 for bfloat16 and float16, otherwise 4. `wanted`:
    `trainer.save_dtype`; `own`: dtype of the model folder, used for "model"."""
    return 2 if (own if wanted == "model" else wanted) in ("bfloat16", "float16") else 4


def warnings(plan: Outline, folder: Path) -> list[str]:
    """Return warnings about settings that work but may be slow or need much memory or disk space, after the notes of
    the plan. `folder`: where the run folder will be, or the folder of a run to be resumed."""
    recipe, notes = plan.recipe, list(plan.notes)
    cores = available_cores()
    served = 0 if recipe.engine.addresses else recipe.local_engines
    threads = served * recipe.engine.threads + recipe.trainer.local_ranks * recipe.trainer.threads
    if threads > cores and recipe.rollout.staleness_bounds[1] > 0:
        used = f"{several(threads, 'thread')} on {several(cores, 'core')}"
        notes.append(f"engines and trainer use {used}: they will slow each other down")
    if (longest := plan.longest_sequence) > recipe.trainer.micro_batch_tokens:
        notes.append(
            f"a prompt with its completion may have {longest} tokens, more than trainer.micro_batch_tokens = "
            f"{recipe.trainer.micro_batch_tokens}: it is then a micro-batch of its own and takes more memory"
        )
    memory = estimate_memory(plan)
    if memory.total > memory.available:
        sizes = f"{memory.total / 2**30:.2f} GiB, available {memory.available / 2**30:.2f} GiB"
        notes.append(f"the run may not fit into memory: {sizes}; {LESS_MEMORY}")
    disk = estimate_disk(plan, folder)
    if disk.total - disk.written > disk.available:
        sizes = f"up to {disk.total / 2**30:.2f} GiB, available {disk.available / 2**30:.2f} GiB"
        least = f"most of it {disk.largest}: {_LESS_DISK[disk.largest]} shrinks it"
        notes.append(f"the run may not fit on the disk of {folder}: {sizes}; {least}")
    if recipe.rollout.batch_size > len(plan.training):
        notes.append(
            f"a batch of {recipe.rollout.batch_size} groups repeats prompts: the task has {len(plan.training)}"
        )
    return notes
