"""Layouts for a number of devices, ordered by estimated cost. Layouts that exceed the memory are left out."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator

from stretto.core.errors import Problem, RecipeError, several
from stretto_foresight.planner.costs import Costs, Job, Layout, Memory
from stretto_foresight.planner.machine import MachineProfile

_TENSOR = (1, 2, 4, 8)
_SIXTEENTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # shares of the devices that train, in sixteenths
_FINE = 16  # up to this number of splits, every one is tried
_MICRO_BATCHES = (1, 2, 4)  # multiples of the recipe's micro_batch_tokens that are tried
_MOST_DEVICES = 1 << 16
_SMALLER = "devices with more memory, or shorter completions (sampling.max_tokens)"


def own_layout(job: Job) -> Layout:
    """Return the layout of the recipe itself. `engine.gpus` gives the devices of an engine."""
    return Layout(job.engine.count, job.trainer.ranks, job.engine.gpus)


def fitting_own_layout(job: Job, machine: MachineProfile) -> Layout:
    """Return the layout of the recipe itself if it fits the memory. Raises RecipeError if it exceeds the memory; the
    message says by how much, and which settings would fit."""
    layout = own_layout(job)
    memory = Costs(job, machine, layout).memory()
    if memory.missing > 0:
        settings = _settings_that_fit(job, lambda changed: Costs(changed, machine, layout).fits)
        trains = memory.trainer >= memory.generation
        place = f"trainer.ranks = {layout.ranks}" if trains else f"engine.count = {layout.engines}"
        remedies = settings or [_SMALLER, "give --gpus N for the layouts of N devices"]
        raise RecipeError([Problem(place, f"the layout lacks the memory: {_lack(memory)}", _any_of(remedies))])
    return layout


def candidates(job: Job, machine: MachineProfile, devices: int) -> list[Costs]:
    """Return the costs of the tried layouts of `devices` devices that fit the memory, lowest estimate first; a layout
    may occur several times, with other micro-batch sizes. Raises RecipeError if none fits (the message says by how
    much, and what would fit), a batch is too small for any rank, or there are too few devices to generate and to
    train."""
    found = list(_all(job, machine, devices))
    fitting = [one for one in found if one.fits]
    if not fitting:
        raise RecipeError([_too_large(job, machine, devices, found)])
    return sorted(fitting, key=lambda one: one.estimate)


def _all(job: Job, machine: MachineProfile, devices: int) -> Iterator[Costs]:
    for layout in _layouts(job, devices, machine):
        for times in _MICRO_BATCHES:
            tokens = job.trainer.micro_batch_tokens * times
            if times > 1 and tokens > job.completions * job.lengths.mean / layout.ranks:
                continue
            yield candidate(job, machine, layout, job.rollout.max_staleness, tokens)


def candidate(job: Job, machine: MachineProfile, layout: Layout, staleness: float | str, tokens: int) -> Costs:
    """Return the costs of the job with this layout, staleness bound (`staleness`, in versions) and micro-batch size
    (`tokens`). The changed job has as many groups in flight as the bound and the engines' slots allow. A bound "auto"
    stays adaptive in the simulation."""
    slots = max(1, layout.engines * job.engine.slots // job.rollout.group_size)
    most = job.rollout.staleness_bounds[1] if isinstance(staleness, str) else staleness
    allowed = slots if math.isinf(most) else min(slots, int(most + 1) * job.rollout.batch_size)
    planned = job.with_settings(
        {"max_staleness": staleness, "max_in_flight": allowed},
        {"count": layout.engines},
        {"ranks": layout.ranks, "micro_batch_tokens": tokens},
    )
    return Costs(planned, machine, layout)


def _layouts(job: Job, devices: int, machine: MachineProfile) -> Iterator[Layout]:
    for tensor in _TENSOR:
        if tensor <= machine.node_devices and _divides(job, tensor):
            for ranks in _splits(job, devices, tensor):
                yield Layout((devices - ranks) // tensor, ranks, tensor)


def _splits(job: Job, devices: int, tensor: int) -> list[int]:
    """Return the numbers of ranks to try, ascending: of those that leave whole engines of `tensor` devices, all if they
    are 16 at most, else those next to certain shares of the devices. Empty if no number leaves an engine and gives each
    rank work."""
    together, most = job.trainer.together, _most_ranks(job)
    possible = [
        ranks for ranks in range(together, min(most, devices - tensor) + 1, together) if (devices - ranks) % tensor == 0
    ]
    if len(possible) <= _FINE:
        return possible
    shares = {devices * part // 16 for part in _SIXTEENTHS}
    if most < min(shares):  # a small batch gives work to few of many ranks
        shares = {1 << power for power in range(most.bit_length())} | {most}
    return sorted({possible[max(0, bisect_right(possible, share) - 1)] for share in shares})


def _most_ranks(job: Job) -> int:
    return job.completions // job.trainer.minibatches * job.trainer.together


def _divides(job: Job, tensor: int) -> bool:
    """Whether an engine can have `tensor` devices. Servers split by whole heads, and replicate KV heads if there are
    fewer than devices; the native engine has one device."""
    kv_heads = job.shape.kv_heads
    shared = job.shape.heads % tensor == 0 and max(tensor, kv_heads) % min(tensor, kv_heads) == 0
    return tensor == 1 or (shared and job.engine.kind != "native")


def _too_large(job: Job, machine: MachineProfile, devices: int, found: list[Costs]) -> Problem:
    place = f"--gpus {devices}"
    if not found and not _most_ranks(job):
        said = f"{job.completions} completions a step cannot be shared out to {job.trainer.minibatches} minibatches"
        return Problem(place, said, f"trainer.minibatches can be {job.completions} at most")
    if not found:
        said = f"too few devices to generate and to train with {several(job.trainer.together, 'rank')}"
        return Problem(place, said, f"{job.trainer.together + 1} are needed at least")
    least = min((one.memory() for one in found), key=lambda memory: memory.missing)
    return Problem(place, f"no layout has the memory: {_lack(least)}", _any_of(_remedies(job, machine, devices)))


def _lack(memory: Memory) -> str:
    trains = memory.trainer >= memory.generation
    side, needed = ("training", memory.trainer) if trains else ("generation", memory.generation)
    return (
        f"{side} needs {needed:.1f} GiB of a device, of which {memory.available:.1f} GiB can be used: "
        f"{memory.missing:.1f} GiB too much"
    )


def _any_of(remedies: list[str]) -> str:
    return "what would make it fit: " + ", or ".join(remedies)


def _settings_that_fit(job: Job, fits: Callable[[Job], bool]) -> list[str]:
    settings: list[tuple[str, dict[str, object]]] = [
        ("trainer.activation_checkpointing=true", {"activation_checkpointing": True}),
        (f"trainer.micro_batch_tokens={job.longest}", {"micro_batch_tokens": job.longest}),
    ]
    return [words for words, change in settings if fits(job.with_settings({}, {}, change))]


def _remedies(job: Job, machine: MachineProfile, devices: int) -> list[str]:
    remedies = _settings_that_fit(job, lambda changed: _fits(changed, machine, devices))
    saving = job.with_settings({}, {}, {"activation_checkpointing": True})
    more = devices * 2
    while more <= _MOST_DEVICES and not _fits(saving, machine, more):
        more *= 2
    if more <= _MOST_DEVICES:
        already = job.trainer.activation_checkpointing
        remedies.append(f"--gpus {more}" if already else f"--gpus {more} with activation checkpointing")
    return remedies or [_SMALLER]


def _fits(job: Job, machine: MachineProfile, devices: int) -> bool:
    return any(one.fits for one in _all(job, machine, devices))
