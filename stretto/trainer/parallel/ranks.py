"""Ranks: the processes that train one policy together. Each holds a part of every parameter (FSDP2) and computes its
share of every minibatch; each sum that counts is one over all of them, so all decide alike.

    batch ─► the same rows and minibatches on every rank ─► its share (`packing.shares`) ─► forward, backward
                                                               gradients are summed, each rank keeps its part

A process alone is one rank of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Ranks(Protocol):
    """What a computation must know of the others. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def second_group(self) -> ProcessGroup | None:
        """Joins the ranks for what they do beside the training, in another thread and in the machine's memory."""
        ...

    def divide(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Leave this rank its part of each parameter of `root`; `layers` are gathered one after the other when needed,
        what is outside of them with `root`. Gradients are summed over the ranks."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, the same to the last bit on each."""
        ...

    def joined(self, own: Tensor) -> tuple[Tensor, int]:
        """The vectors of all ranks, one after the other, and where this rank's begins."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A divided parameter, gathered; any other tensor as it is."""
        ...

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of what this rank has of it, in the machine's memory; divided as before."""
        ...


class SingleRank:
    """One process that has everything."""

    rank, count = 0, 1
    second_group: ProcessGroup | None = None

    def divide(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        pass

    def total(self, values: Tensor) -> Tensor:
        return values

    def joined(self, own: Tensor) -> tuple[Tensor, int]:
        return own, 0

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)


ALONE = SingleRank()


class ShardedRanks:
    """Ranks that are joined by torch's default process group."""

    def __init__(self, device: str) -> None:
        """`device` is where the parameters are: "cpu" or "cuda"; the group must have been made."""
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        group = distributed.group.WORLD
        assert group is not None, "init_process_group() comes first"
        self._mesh = DeviceMesh.from_group(group, device)
        self.second_group: ProcessGroup | None = distributed.new_group(backend="gloo")
        self._second_mesh = DeviceMesh.from_group(self.second_group, "cpu")

    def divide(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        for module in (*layers, root):
            # Never left gathered: a gathered copy would be out of date after the optimizer's step.
            divided = fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other

    def total(self, values: Tensor) -> Tensor:
        values = values.clone()
        distributed.all_reduce(values)
        return values

    def joined(self, own: Tensor) -> tuple[Tensor, int]:
        lengths = own.new_zeros(self.count, dtype=torch.int64)
        lengths[self.rank] = len(own)
        sizes = self.total(lengths).tolist()
        start = sum(sizes[: self.rank])
        everything = own.new_zeros(sum(sizes))
        everything[start : start + len(own)] = own
        return self.total(everything), start

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def copied(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.to("cpu", copy=True)
        part, shape, stride = tensor.to_local().to("cpu", copy=True), tensor.shape, tensor.stride()
        return DTensor.from_local(part, self._second_mesh, tensor.placements, shape=shape, stride=stride)
