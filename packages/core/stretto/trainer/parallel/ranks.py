"""Ranks: the processes that train one policy together. Each holds a shard of every parameter (FSDP2) and computes its
share of every minibatch. Sums that decide something are all-reduced, so all ranks decide alike.

    batch ─► the same samples and minibatches on every rank ─► its share (`packing.shares`) ─► forward, backward
                                                                          gradients are reduced and scattered
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stretto.model.hf.layers import sharding_units
from stretto.model.packed.logprobs import SCORE, score_as_method
from stretto.trainer.config import TrainerConfig


class Ranks(Protocol):
    """Collectives of a rank. All ranks must call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def second_group(self) -> ProcessGroup | None:
        """A gloo group for CPU collectives in another thread, beside training."""
        ...

    @property
    def device(self) -> str:
        """Where parameters are, "cpu" or "cuda"."""
        ...

    def fully_shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module]) -> None:
        """Shard the parameters of `root`, a module around `model`, with FSDP2 (`sharding_units`); gradients are summed
        over ranks. `exact`: units that compute in float32."""
        ...

    def reduces(self, root: nn.Module, *, last: bool) -> None:
        """Say whether the next backward pass is the last one before a step: gradients may be summed then only."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks, bitwise equal on all of them."""
        ...

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        """The vectors of all ranks concatenated, and the offset of this rank's; lengths may differ."""
        ...

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; others are returned unchanged."""
        ...

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's shard on the CPU, sharded as before."""
        ...

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, by the second group."""
        ...

    def all_reduce_number(self, number: int) -> int:
        """Sum over the ranks, by the second group."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor sharded on the CPU, on rank 0, by the second group; other ranks get their shard
        back."""
        ...

    def scatter(self, whole: Tensor | None, tensor: Tensor) -> None:
        """Fill each rank's shard of `tensor` from rank 0's `whole`; the reverse of `gather`."""
        ...


class SingleRank:
    """The collectives of a process that trains alone."""

    rank, count, device = 0, 1, "cpu"
    second_group: ProcessGroup | None = None

    def fully_shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module]) -> None:
        pass

    def reduces(self, root: nn.Module, *, last: bool) -> None:
        pass

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        return own, 0

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def all_reduce_number(self, number: int) -> int:
        return number

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def scatter(self, whole: Tensor | None, tensor: Tensor) -> None:
        assert whole is not None, "one process has everything"
        tensor.copy_(whole)


ALONE = SingleRank()


class ShardedRanks:
    """The ranks of torch's default process group."""

    def __init__(self, device: str, config: TrainerConfig | None = None, beside: str = "gloo") -> None:
        """`device`: where the parameters are, "cpu" or "cuda"; `config`: the dtypes of gathers and sums, by default
        float32; `beside`: backend of the second group. The process group must exist."""
        config = config or TrainerConfig()
        self.device, self._each = device, config.reduce_every == "micro_batch"
        self._numbers = MixedPrecisionPolicy(
            param_dtype=None if config.dtype == "float32" else getattr(torch, config.dtype),
            reduce_dtype=getattr(torch, config.reduce_dtype),
        )
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        group = distributed.group.WORLD
        assert group is not None, "init_process_group() comes first"
        self._mesh = DeviceMesh.from_group(group, device)
        self.second_group: ProcessGroup | None = distributed.new_group(backend=beside)
        self._second_mesh = DeviceMesh.from_group(self.second_group, "cpu")

    def fully_shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module]) -> None:
        inside, apart = set(root.modules()), list(exact)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for module in (*(unit for unit in sharding_units(model) if unit in inside), *apart, root):
            # Never left gathered: a gathered copy would be out of date after the optimizer's step.
            numbers = MixedPrecisionPolicy() if module in apart else self._numbers
            sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=numbers)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other
            if module is embedding:
                sharded.set_unshard_in_backward(False)  # its gradient does not need it
            elif module is head:
                score_as_method(head)
                register_fsdp_forward_method(head, SCORE)

    def reduces(self, root: nn.Module, *, last: bool) -> None:
        if not self._each:
            cast(FSDPModule, root).set_requires_gradient_sync(last)

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

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        sent = torch.tensor(numbers, dtype=torch.int64)
        distributed.broadcast(sent, 0, group=self.second_group)
        return [int(number) for number in sent]

    def all_reduce_number(self, number: int) -> int:
        numbers = torch.tensor([number], dtype=torch.int64)
        distributed.all_reduce(numbers, group=self.second_group)
        return int(numbers)

    def gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        own = tensor.to_local().contiguous()
        if self.rank > 0:
            if own.numel():
                distributed.send(own, 0, group=self.second_group)
            return tensor
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank, rows in enumerate(whole.chunk(self.count)):  # as FSDP2 divides; the last ranks may have none
            rows.copy_(own) if rank == 0 else distributed.recv(rows, rank, group=self.second_group)
        return whole

    def scatter(self, whole: Tensor | None, tensor: Tensor) -> None:
        if not isinstance(tensor, DTensor):
            received = torch.empty(tensor.shape, dtype=tensor.dtype) if whole is None else whole
            distributed.broadcast(received, 0, group=self.second_group)
            tensor.copy_(received)
            return
        own = tensor.to_local()
        if whole is None:
            received = torch.empty(own.shape, dtype=own.dtype)
            if own.numel():
                distributed.recv(received, 0, group=self.second_group)
            own.copy_(received)
            return
        for rank, rows in enumerate(whole.chunk(self.count)):
            own.copy_(rows) if rank == 0 else distributed.send(rows.contiguous(), rank, group=self.second_group)
