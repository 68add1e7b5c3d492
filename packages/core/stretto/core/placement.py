"""Placement of roles on the GPUs of a machine: a pure function of the GPUs and of the memory that each role needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.core.machine import Gpu

_CONTEXT = 512 << 20  # bytes that a process takes on a GPU before its first tensor
_UNKNOWN = 0.9  # part of a GPU of unknown size for the tensors of all roles
_BUSY = 1 / 32  # part of a GPU in use up to which it counts as free: the driver takes some of an idle GPU


@dataclass(frozen=True)
class Need:
    """GPU memory that a role needs. `parts`: bytes on each of its GPUs, by purpose (weights, cache). `gpus`: number of
    GPUs. `apart`: the role shares no GPU with another such role, since NCCL refuses two ranks on one GPU. `smaller`:
    for each purpose, the advice in messages on how to need less."""

    role: str
    parts: Mapping[str, int]
    gpus: int = 1
    apart: bool = False
    smaller: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes needed on each GPU, including the CUDA context of the process."""
        return sum(self.parts.values()) + _CONTEXT


@dataclass(frozen=True)
class Seat:
    """The GPUs assigned to a role. `share`: part of their memory that its tensors may take; 1 if no other role of the
    run shares them."""

    need: Need
    gpus: tuple[Gpu, ...]
    share: float

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(gpu.id for gpu in self.gpus)

    @property
    def room(self) -> float:
        """Part of the GPUs' memory that the role can use: `share`, but at most the part not in use now. Less than 1/32
        in use counts as nothing."""
        used = [1 - gpu.free / gpu.memory for gpu in self.gpus if gpu.memory]
        return min(self.share, 1 - max(used, default=0.0)) if max(used, default=0.0) > _BUSY else self.share

    def __str__(self) -> str:
        named, need = " + ".join(f"GPU {gpu.id}" for gpu in self.gpus), self.need
        there = f" of {gib(self.gpus[0].free)}" if self.gpus[0].free else ""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in need.parts.items())
        return f"{need.role:<12}{named}: {gib(need.bytes)}{there} GiB ({parts})"


def place(there: Sequence[Gpu], needs: Sequence[Need]) -> tuple[Seat, ...]:
    """Assign each role its GPUs and its share of their memory; returns a seat for each need, in the order of `needs`.

    Needs that are `apart` come first, on GPUs of one kind if there are enough. The others follow, the largest first.
    For each, GPUs with enough memory left are preferred, then GPUs with the fewest roles, then GPUs with the most
    memory left. Roles that share a GPU split its memory in proportion to their needs.

    Raises:
        ValueError: there are fewer GPUs than one role needs, or fewer than roles that are `apart`.
    """
    apart = [at for at, need in enumerate(needs) if need.apart]
    if len(apart) > len(there) or any(need.gpus > len(there) for need in needs):
        raise ValueError(f"{len(apart)} roles apart, {len(needs)} in all, on {len(there)} GPUs")
    taken: dict[int, tuple[Gpu, ...]] = {at: (gpu,) for at, gpu in zip(apart, _alike(there, len(apart)), strict=True)}
    left = {gpu.id: gpu.free - sum(needs[at].bytes for at, own in taken.items() if gpu in own) for gpu in there}
    roles = {gpu.id: sum(gpu in own for own in taken.values()) for gpu in there}
    for at in sorted((at for at in range(len(needs)) if at not in taken), key=lambda at: -needs[at].bytes):
        size = needs[at].bytes
        order = sorted(there, key=lambda gpu: (left[gpu.id] < size, roles[gpu.id], -left[gpu.id]))
        taken[at] = tuple(sorted(order[: needs[at].gpus], key=there.index))
        for gpu in taken[at]:
            left[gpu.id] -= size
            roles[gpu.id] += 1
    shares = _shares(needs, taken)
    return tuple(Seat(need, taken[at], shares[at]) for at, need in enumerate(needs))


def _alike(there: Sequence[Gpu], count: int) -> list[Gpu]:
    """`count` GPUs of the same kind (name and memory); the first `count` GPUs if no kind has as many."""
    kinds = defaultdict[tuple[str, int], list[Gpu]](list)
    for gpu in there:
        kinds[gpu.name, gpu.memory].append(gpu)
    return next((own for own in kinds.values() if len(own) >= count), list(there))[:count]


def _shares(needs: Sequence[Need], taken: Mapping[int, Sequence[Gpu]]) -> list[float]:
    """For each need, the part of its GPUs' memory that its tensors may take; 1 if it shares no GPU. Room for the CUDA
    contexts is set aside on GPUs that roles share. `taken`: GPUs by index of the need."""
    on = defaultdict[str, list[int]](list)
    for at, own in taken.items():
        for gpu in own:
            on[gpu.id].append(at)
    found = []
    for at, need in enumerate(needs):
        parts = [1.0]
        for gpu in taken[at]:
            if len(beside := on[gpu.id]) > 1:
                tensors = max(0, gpu.free - len(beside) * _CONTEXT) / gpu.memory if gpu.memory else _UNKNOWN
                parts.append(tensors * need.bytes / sum(needs[other].bytes for other in beside))
        found.append(min(parts))
    return found


def gib(size: int) -> str:
    """Bytes as GiB with one digit after the point."""
    return f"{size / 2**30:.1f}"
