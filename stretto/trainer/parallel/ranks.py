"""Ranks: the processes that train one policy together. Each holds a shard of every parameter (FSDP2) and computes its
share of every minibatch. Sums that decide something are all-reduced, so that all ranks decide alike.

    batch ─► the same samples and minibatches on every rank ─► its share (`packing.shares`) ─► forward, backward
                                                                          gradients are reduced and scattered
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
    """The collectives of a rank. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def second_group(self) -> ProcessGroup | None:
        """A gloo group for collectives beside the training: in another thread, on CPU tensors."""
        ...

    def fully_shard(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Shard the parameters of `root`, gathered layer by layer in the forward; gradients are summed over ranks."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over the ranks, the same to the last bit on each."""
        ...

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        """The vectors of all ranks, one after the other, and where this rank's begins; lengths may differ."""
        ...

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A sharded tensor, gathered; any other as it is."""
        ...

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's shard on the CPU, sharded as before."""
        ...


class SingleRank:
    """One process that trains alone."""

    rank, count = 0, 1
    second_group: ProcessGroup | None = None

    def fully_shard(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        pass

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        return own, 0

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)


ALONE = SingleRank()


class ShardedRanks:
    """The ranks of torch's default process group."""

    def __init__(self, device: str) -> None:
        """`device` is where the parameters are: "cpu" or "cuda"; the group must have been made."""
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        group = distributed.group.WORLD
        assert group is not None, "init_process_group() comes first"
        self._mesh = DeviceMesh.from_group(group, device)
        self.second_group: ProcessGroup | None = distributed.new_group(backend="gloo")
        self._second_mesh = DeviceMesh.from_group(self.second_group, "cpu")

    def fully_shard(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        for module in (*layers, root):
            # Never left gathered: a gathered copy would be out of date after the optimizer's step.
            sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other

    def all_reduce(self, values: Tensor) -> Tensor:
        values = values.clone()
        distributed.all_reduce(values)
        return values

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        lengths = own.new_zeros(self.count, dtype=torch.int64)
        lengths[self.rank] = len(own)
        sizes = self.all_reduce(lengths).tolist()
        start = sum(sizes[: self.rank])
        everything = own.new_zeros(sum(sizes))
        everything[start : start + len(own)] = own
        return self.all_reduce(everything), start

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.to("cpu", copy=True)
        part, shape, stride = tensor.to_local().to("cpu", copy=True), tensor.shape, tensor.stride()
        return DTensor.from_local(part, self._second_mesh, tensor.placements, shape=shape, stride=stride)
