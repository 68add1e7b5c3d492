"""Assignment of this machine's GPUs to the roles of a run: memory of ranks and engines, checks, and the GPUs that torch
can use.

A *seat* is the assignment of one role to one or several GPUs (`core.machine`). A role without a seat runs on the CPU.
"""

from __future__ import annotations

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from stretto.core.errors import Problem, RecipeError, nearest
from stretto.core.machine import VISIBLE, Gpu, Need, Seat, gib, gpus, place, too_old, unusable, visible
from stretto.engine.config import EngineConfig
from stretto.launch.preflight.checks import ASSUMED, too_many_ranks
from stretto.launch.preflight.plan import Outline, Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import ModelFolder
from stretto.model.hf.shape import BYTES, ModelShape, shape_of_model
from stretto.trainer.config import OptimizerConfig, TrainerConfig
from stretto.trainer.memory import RankMemory, collective_bytes, rank_memory

_ASSUMED_CUDA = "12.8"  # CUDA version of torch for assumed GPUs, if this machine's torch has no CUDA
_KIND = re.compile(r"\s*(\d{1,4})\s*x\s*(\d{1,5})\s*(?:@\s*([\d.]+))?\s*")
_OF_TRAINER, _KEYS = re.compile(r"trainer\.(\w+)"), OptimizerConfig.model_fields.keys()
_HOPELESS = 1.5  # more than this many times the free memory is refused; an estimate may be off by less
_SMALLER = {
    "weights of the engine": 'engine.dtype = "bfloat16", or tensor parallelism in engine.arguments',
    "cache": "a smaller engine.cache_gib or engine.slots",
    "step": "a smaller engine.slots or engine.max_prefill_tokens",
}


def rank_of(plan: Outline) -> RankMemory:
    """Estimate the memory of one rank of the trainer, with the reference and the critic that the recipe asks for."""
    recipe = plan.recipe
    return rank_memory(
        shape_of_model(plan.base),
        recipe.trainer,
        recipe.trainer.ranks,
        plan.longest_sequence,
        reference=reference_of(plan),
        critic=recipe.algorithm.critic is not None,
    )


def reference_of(plan: Outline) -> ModelShape | None:
    """Shape of the reference policy, if the trainer holds it as a second model; else None."""
    return shape_of_model(plan.reference or plan.base) if plan.recipe.has_reference_model else None


def engine_parts(plan: Outline) -> dict[str, int]:
    """Estimate the bytes of one engine, on all its GPUs together, by part: "weights of the engine", "cache" (KV cache)
    and, for a native engine, "step", its largest one.

    The KV cache is that of all slots at full length, at most `engine.cache_gib`; a server on GPUs takes all of
    `engine.cache_gib` at its start.
    """
    engine, base = plan.recipe.engine, plan.base
    item, native = BYTES[engine.dtype], engine.kind == "native"
    full = engine.slots * plan.longest_sequence * base.layers * 2 * base.kv_heads * base.head_dim * item
    cache = min(full, engine.cache_bytes) if native or engine.on_cpu else engine.cache_bytes
    parts = {"weights of the engine": base.parameters * item * engine.copies, "cache": cache}
    return parts | {"step": engine_step(shape_of_model(base), engine)} if native else parts


def engine_step(shape: ModelShape, config: EngineConfig) -> int:
    """Estimate the bytes of a native engine's largest step: the logits of all slots (in the engine's dtype and in
    float32), and the activations of a prefill in one layer."""
    item = BYTES[config.dtype]
    prefill = config.max_prefill_tokens * (3 * shape.inner + 3 * shape.hidden_size + shape.width + 2 * shape.kv_width)
    return config.slots * shape.vocab_size * (4 + item) + prefill * item


def needs_of(plan: Outline, *, ranks: bool = True) -> list[Need]:
    """List the memory needs of the local ranks and engines whose device is not "cpu", ranks first. The need of a rank
    includes the reference, the critic and adapters; servers that run already (`engine.addresses`) have none.

    `ranks`: False: engines only.
    """
    recipe, needs = plan.recipe, list[Need]()
    if ranks and recipe.trainer.device != "cpu":
        told, several = rank_of(plan), recipe.trainer.ranks > 1
        parts = dict(told.parts)
        if several:
            parts["collectives"] = collective_bytes(recipe.trainer)
        each = partial(Need, parts=parts, apart=several, smaller=told.smaller)
        needs += [each(f"rank {rank}") for rank in range(recipe.trainer.local_ranks)]
    config = recipe.engine
    started = config.kind == "native" or not config.addresses
    if started and config.device != "cpu":
        parts = {name: size // config.gpus for name, size in engine_parts(plan).items()}
        needs += [Need(f"engine-{number}", parts, config.gpus) for number in range(recipe.local_engines)]
    return needs


def seats_of(plan: Outline, there: Sequence[Gpu], *, ranks: bool = True) -> tuple[Seat, ...]:
    """Assign the roles of a run to the GPUs `there`; empty if there are no GPUs, or all roles run on the CPU. `ranks`:
    False: engines only.

    Raises:
        RecipeError: there are fewer GPUs than ranks, or than an engine's server takes; ranks would be on GPUs
            that differ in name or memory; or the roles of a GPU need more than 1.5 times its free memory.
    """
    return seated(plan.recipe, needs_of(plan, ranks=ranks), there, ranks=ranks)


def seated(recipe: Recipe, needs: Sequence[Need], there: Sequence[Gpu], *, ranks: bool) -> tuple[Seat, ...]:
    """Assign `needs` to the GPUs `there`; empty if there are none of these or of those. `ranks`: ranks are among the
    needs. Raises RecipeError for too few GPUs, ranks on unequal GPUs, or a GPU with far too little memory."""
    if not there or not needs:
        return ()
    if problems := list(_too_many(recipe, there, ranks)):
        raise RecipeError(problems)
    seats = place(there, needs)
    problems = [*_differing(seats), *(problem for problem, factor in _overfull(seats) if factor > _HOPELESS)]
    if problems:
        raise RecipeError(problems)
    return seats


def seat_of_supervised(
    role: str,
    config: OptimizerConfig,
    base: ModelFolder,
    longest: int,
    there: Sequence[Gpu],
    *,
    reference: ModelFolder | None = None,
) -> Seat | None:
    """Return the seat of a process that trains on examples, on the GPU with the most free memory. None: the CPU, by its
    settings or since there is no GPU. The process runs before all roles of a run, or without a run.

    Args:
        role: name of the process. The section of its settings has the same name, with "_" for spaces.
        base: the model that it trains.
        longest: number of tokens of the longest example.
        there: the GPUs that it may use.
        reference: a reference model that the process also holds.

    Raises:
        RecipeError: the process needs more than 1.5 times the free memory.
    """
    if config.device == "cpu" or not there:
        return None
    named = config.model_dump(include=set(OptimizerConfig.model_fields))
    frozen = shape_of_model(reference) if reference is not None else None
    told = rank_memory(shape_of_model(base), TrainerConfig(**named), 1, longest, reference=frozen)
    smaller = {part: _in_section(role.replace(" ", "_"), words) for part, words in told.smaller.items()}
    return alone(Need(role, told.parts, smaller=smaller), there)


def _in_section(section: str, words: str) -> str:
    """Rewrite `words`, advice on how a rank needs less memory, for another `section`: only the keys that it has too,
    under its name; "a smaller model" if there are none."""
    found = [one for one in words.split(", or ") if (key := _OF_TRAINER.search(one)) and key[1] in _KEYS]
    return ", or ".join(one.replace("trainer.", f"{section}.") for one in found) or "a smaller model"


def seat_of_warm_start(plan: Plan, there: Sequence[Gpu]) -> Seat | None:
    """Return the seat of the run's warm start, on the GPU with the most free memory; None: the CPU, or there is no warm
    start. Raises RecipeError if it needs more than 1.5 times the free memory."""
    config, shown = plan.recipe.warm_start, plan.demonstrations
    if config is None or not shown:
        return None
    longest = max(len(one.prompt_ids) + len(one.completion_ids) for one in shown)
    return seat_of_supervised("warm start", config, plan.base, longest, there)


def alone(need: Need, there: Sequence[Gpu]) -> Seat:
    """Assign a need to the one of the GPUs `there` with the most free memory. Raises RecipeError if the need is more
    than 1.5 times that memory. There must be a GPU."""
    seats = place(there, [need])
    if problems := [problem for problem, factor in _overfull(seats) if factor > _HOPELESS]:
        raise RecipeError(problems)
    return seats[0]


def _too_many(recipe: Recipe, there: Sequence[Gpu], ranks: bool) -> Iterator[Problem]:
    """Yield a problem if more ranks are to run on this machine than it has GPUs (only if `ranks`, and not on the CPU),
    or if an engine that starts here spans more GPUs than it has. `there`: the GPUs of this machine."""
    if ranks:
        yield from too_many_ranks(recipe.trainer, len(there))
    if recipe.local_engines and not recipe.engine.addresses and recipe.engine.gpus > len(there):
        found = f"a server on {recipe.engine.gpus} GPUs (parallel sizes), and the machine has {len(there)}"
        yield Problem("engine.arguments", found, f"at most {len(there)}")


def _differing(seats: Sequence[Seat]) -> Iterator[Problem]:
    """Yield one problem if ranks are on GPUs that differ in name or memory."""
    kinds = {_kind(seat.gpus[0]): seat for seat in seats if seat.need.apart}
    if len(kinds) > 1:
        found = " and ".join(f"{seat.need.role} on GPU {seat.ids[0]}, {name}" for name, seat in kinds.items())
        remedy = "show GPUs of one kind to the ranks: CUDA_VISIBLE_DEVICES; the slowest would hold all others up"
        yield Problem("trainer.ranks", found, remedy)


def _kind(gpu: Gpu) -> str:
    return gpu.name + (f" of {gib(gpu.memory)} GiB" if gpu.memory else "")


def _overfull(seats: Sequence[Seat]) -> Iterator[tuple[Problem, float]]:
    """Yield (problem, factor) for each GPU whose roles need more than its free memory. `factor`: need divided by free
    memory."""
    for gpu, own in _by_gpu(seats).items():
        needed = sum(seat.need.bytes for seat in own)
        if gpu.free and needed > gpu.free:
            size, name = max(((size, name) for seat in own for name, size in seat.need.parts.items()), default=(0, ""))
            smaller = _SMALLER | {part: words for seat in own for part, words in seat.need.smaller.items()}
            roles = " and ".join(seat.need.role for seat in own)
            found = f"{roles}: {'need' if len(own) > 1 else 'needs'} {gib(needed)} of {gib(gpu.free)} GiB"
            remedy = f"largest: {name}, {gib(size)} GiB; {smaller.get(name, 'a smaller model')}"
            yield Problem(f"GPU {gpu.id}", found, remedy), needed / gpu.free


def notes_of(seats: Sequence[Seat]) -> Iterator[str]:
    """Yield a sentence for each GPU that several roles share, that other programs use, or whose roles may need more
    than its free memory."""
    for gpu, own in _by_gpu(seats).items():
        if len(own) > 1:
            split = ", ".join(f"{seat.need.role} at most {seat.share:.0%}" for seat in own)
            yield f"GPU {gpu.id} is shared: {split} of its memory"
        if gpu.memory and gpu.memory - gpu.free > gpu.memory / 8:
            yield f"GPU {gpu.id}: others use {gib(gpu.memory - gpu.free)} of its {gib(gpu.memory)} GiB"
    yield from (str(problem) for problem, factor in _overfull(seats) if factor <= _HOPELESS)


def placed(plan: Outline, seats: Sequence[Seat]) -> tuple[str, ...]:
    """Return lines for the log: the GPU of the warm start, of each role, and notes about shared, full or slow GPUs;
    empty if all run on the CPU."""
    first = (str(plan.warm_seat),) if isinstance(plan, Plan) and plan.warm_seat is not None else ()
    return (*first, *map(str, seats), *notes_of(seats), *_slow(plan.recipe, seats))


def _slow(recipe: Recipe, seats: Sequence[Seat]) -> Iterator[str]:
    """Yield a warning for trainer and engine if they compute in float32 on a GPU."""
    for name, section in (("rank", recipe.trainer), ("engine", recipe.engine)):
        if section.dtype == "float32" and any(seat.need.role.startswith(name) for seat in seats):
            key = "trainer.dtype" if name == "rank" else "engine.dtype"
            yield f'{key} = "float32" on a GPU: matmuls without tensor cores, many times slower than with "bfloat16"'


def _by_gpu(seats: Sequence[Seat]) -> dict[Gpu, list[Seat]]:
    found = defaultdict[Gpu, list[Seat]](list)
    for seat in seats:
        for gpu in seat.gpus:
            found[gpu].append(seat)
    return found


def seat_of_engine(seats: Sequence[Seat], number: int) -> Seat | None:
    """Return the seat of engine `number`; None: the CPU. Engines beyond the recipe's number take the seats of the first
    ones again, in turn."""
    own = [seat for seat in seats if seat.need.role.startswith("engine-")]
    return own[number % len(own)] if own else None


def usable_gpus(recipe: Recipe, *, dry: bool = False) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine that torch can use; empty if there are none, or torch cannot use them and need
    not. `dry`: return the GPUs that the environment variable ``STRETTO_GPUS`` assumes, if it is set.

    Raises:
        RecipeError: torch is built for GPUs but cannot use this machine's, and neither trainer nor engine is set to the
            CPU; or collectives are bound to a network interface that does not exist.
    """
    if problems := list(missing_interfaces(recipe.trainer, os.environ, [name for _, name in socket.if_nameindex()])):
        raise RecipeError(problems)
    there, usable, cuda = gpus(), torch.cuda.is_available(), torch.version.cuda
    if dry and (assumed := os.environ.get(ASSUMED)):
        there, cuda = visible(assumed_gpus(assumed), os.environ.get(VISIBLE)), cuda or _ASSUMED_CUDA
        usable = not too_old([gpu.driver for gpu in there], cuda)
    if not there or usable:
        return there
    if cuda is not None and "cpu" not in (recipe.trainer.device, recipe.engine.device):
        remedy = 'update the driver, or trainer.device = "cpu" and engine.device = "cpu"'
        raise RecipeError([Problem("[trainer] and [engine] device", unusable(there, cuda), remedy)])
    return ()


def assumed_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse GPUs written as "8x80" or "2x80,1x24@570.86": number of GPUs, GiB of each, and optionally a driver version.
    Raises RecipeError if the text has another form."""
    found = list[Gpu]()
    for word in text.split(","):
        if (told := _KIND.fullmatch(word)) is None or int(told[1]) == 0:
            raise RecipeError([Problem(ASSUMED, repr(text), "number of GPUs and GiB of each, as in 8x80 or 2x80,1x24")])
        size, first = int(told[2]) << 30, len(found)
        numbers = range(first, first + int(told[1]))
        found += [Gpu(str(one), "assumed GPU", size, size, driver=told[3] or "") for one in numbers]
    return tuple(found)


def missing_interfaces(config: TrainerConfig, told: Mapping[str, str], there: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each environment variable that binds the collectives of several ranks to a network interface
    which this machine does not have; none for a single rank.

    Args:
        told: all environment variables; read are GLOO_SOCKET_IFNAME and, if ranks may use GPUs, NCCL_SOCKET_IFNAME.
        there: names of this machine's network interfaces.
    """
    if config.ranks == 1:
        return
    gloo, nccl = told.get("GLOO_SOCKET_IFNAME", ""), told.get("NCCL_SOCKET_IFNAME", "")
    if gloo and not set(gloo.split(",")) & set(there):
        yield _no_interface("GLOO_SOCKET_IFNAME", gloo, there)
    if config.device == "cpu" or not nccl or nccl.startswith("^"):
        return
    exact, names = nccl.startswith("="), nccl.removeprefix("=").split(",")
    if not any(one == name or (not exact and one.startswith(name)) for one in there for name in names):
        yield _no_interface("NCCL_SOCKET_IFNAME", nccl, there)


def _no_interface(key: str, told: str, there: Sequence[str]) -> Problem:
    found = f"{told!r} in the environment, and this machine has {', '.join(there)}"
    return Problem(key, found, nearest(told.lstrip("="), there) or "unset it: the interface is found then")
