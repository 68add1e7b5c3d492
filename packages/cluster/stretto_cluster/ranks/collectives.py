"""Ranks: the processes that train one policy together. Each rank holds a shard of every parameter (FSDP2) and computes
its share of every minibatch. Sums on which decisions depend are all-reduced, so all ranks decide alike. They connect to
rank 0's TCPStore, then form torch's process group.

    batch ─► the same samples and minibatches on every rank ─► its share (`minibatch.shares`) ─► forward, backward
                                                                             gradients are reduced and scattered

Ranks that divide the tokens of a row (`context_parallel`, C ranks) or the matrices of a layer (`tensor_parallel`, T
ranks) compute one share together, and get the same log-probabilities and losses. Rank (d C + c) T + t has share d,
tokens c, matrices t. Collectives run in three kinds of groups:

    FSDP        ranks with the same t: gather parameters, sum gradients over d and c
    tensor      ranks with the same d and c: sums inside a layer
    context     ranks with the same d and t: all-to-all between tokens and heads, and the log-probabilities of a row
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroup,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import use_interface_of
from stretto.model.hf.layers import sharding_units
from stretto.model.packed.logprobs import SCORE, score_as_method
from stretto.trainer.config import TrainerConfig
from stretto.trainer.ranks import Ranks, on_meta_device, zeros_on_host
from stretto.trainer.ranks import own as own_part
from stretto_cluster.ranks.filling import draw_adapters, fill, own_slices
from stretto_cluster.ranks.matrices import divide_matrices, refuse_undividable
from stretto_cluster.ranks.tokens import RankPart

_SHARDED, _TENSOR = "sharded", "tensor"


class ShardedRanks(Ranks):
    """`Ranks` of several processes: collectives of torch's default process group and of groups made from it."""

    def __init__(self, device: str, config: TrainerConfig, beside: str = "gloo") -> None:
        """Create the process groups, on every rank; torch's default group must exist. `device`: where the parameters
        are, "cpu" or "cuda". `config`: dtypes of gathers and sums, and the divisions of tokens and matrices. `beside`:
        backend of a second group, for tensors on the CPU."""
        self.device, self._each = device, config.reduce_every == "micro_batch"
        self._numbers = MixedPrecisionPolicy(
            param_dtype=None if config.dtype == "float32" else getattr(torch, config.dtype),
            reduce_dtype=getattr(torch, config.reduce_dtype),
        )
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        group = distributed.group.WORLD
        assert group is not None, "init_process_group() comes first"
        tensor, context = config.tensor_parallel, config.context_parallel
        self.shares, self.share = self.count // (tensor * context), self.rank // (tensor * context)
        places = torch.arange(self.count).view(self.shares, context, tensor)
        self.context_group = None if context == 1 else _own_group(places.transpose(1, 2).reshape(-1, context))
        self.context = partial(RankPart.of, group=self.context_group) if self.context_group is not None else None
        same = self.shares == self.count
        self._among_shares = group if same else _own_group(places.flatten(1).T)
        self.second_group = distributed.new_group(backend=beside)
        self.tensor = None
        if tensor == 1:
            self._mesh = DeviceMesh.from_group(group, device)
            self._second_meshes = {1: DeviceMesh.from_group(self.second_group, "cpu")}
        else:
            grid = places.flatten(0, 1)  # [FSDP, tensor]
            mesh, second = _grid_mesh(grid, device, None), _grid_mesh(grid, "cpu", beside)
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice to flatten
            self._mesh, self.tensor = mesh[_SHARDED], mesh[_TENSOR]
            self._second_meshes = {1: second[_SHARDED], 2: second}

    def shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module] = ()) -> None:
        """Shard `root`, which contains `model`, as `Ranks.shard`: divide the matrices of each layer, shard with FSDP2,
        and fill a model on the meta device. `exact`: submodules that compute in float32. Raises RecipeError if the
        ranks cannot divide the model, and ModelFolderError if its folder lacks a weight or has damaged ones."""
        tensor, context = (
            self.tensor.size() if self.tensor else 1,
            self.context_group.size() if self.context_group else 1,
        )
        refuse_undividable(model, tensor, context)
        if self.tensor is not None:
            divide_matrices(model, self.tensor)
        self._fully_shard(root, model, exact)
        if on_meta_device(root):
            fill(model, root, self.device)
            draw_adapters(model)

    def _fully_shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module]) -> None:
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
        distributed.all_reduce(values, group=self._among_shares)
        return values

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        lengths = own.new_zeros(self.shares, dtype=torch.int64)
        lengths[self.share] = len(own)
        sizes = self.all_reduce(lengths).tolist()
        start = sum(sizes[: self.share])
        everything = own.new_zeros(sum(sizes))
        everything[start : start + len(own)] = own
        return self.all_reduce(everything), start

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        return self._on_host(own_part(tensor).to("cpu", copy=True), tensor)

    def zeros_on_host(self, tensor: Tensor) -> Tensor:
        return self._on_host(zeros_on_host(own_part(tensor)), tensor)

    def _on_host(self, part: Tensor, tensor: Tensor) -> Tensor:
        """A tensor with the shape and sharding of `tensor`, whose shard on this rank is `part`, in host memory."""
        if not isinstance(tensor, DTensor):
            return part
        mesh, shape, stride = self._second_meshes[tensor.device_mesh.ndim], tensor.shape, tensor.stride()
        return DTensor.from_local(part, mesh, tensor.placements, shape=shape, stride=stride)

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        sent = torch.tensor(numbers, dtype=torch.int64)
        distributed.broadcast(sent, 0, group=self.second_group)
        return [int(number) for number in sent]

    def all_reduce_number(self, number: int) -> int:
        numbers = torch.tensor([number], dtype=torch.int64)
        distributed.all_reduce(numbers, group=self.second_group)
        return int(numbers)

    def gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or self.tensor is not None:
            return self.full_tensor(tensor)
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
        if not isinstance(tensor, DTensor) or self.tensor is not None:
            received = torch.empty(tensor.shape, dtype=tensor.dtype) if whole is None else whole
            distributed.broadcast(received, 0, group=self.second_group)
            own_part(tensor).copy_(received[own_slices(tensor)])
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


def _own_group(groups: Tensor, backend: str | None = None) -> ProcessGroup:
    """Create a process group for each row of ranks; returns the group of this rank. All ranks must call it with the
    same rows. `backend` None: torch's default."""
    own, rank = None, distributed.get_rank()
    for row in groups.tolist():
        made = distributed.new_group(row, backend=backend)
        own = made if rank in row else own
    assert isinstance(own, ProcessGroup), "every rank is in one of the groups"
    return own


def _grid_mesh(grid: Tensor, device: str, backend: str | None) -> DeviceMesh:
    """Create the process groups of the rows and columns of `grid` (ranks, [FSDP, tensor]); returns a mesh of them with
    the dimensions `_SHARDED` and `_TENSOR`. All ranks must call it. `device`: "cpu" or "cuda". `backend`: of the
    groups; None: that of the default group."""
    groups = [_own_group(grid.T, backend), _own_group(grid, backend)]
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=(_SHARDED, _TENSOR))


LOOPBACK = "127.0.0.1"

#: Timeout of a collective, in seconds. Rank 0 notices a dead or hanging rank much earlier, by its exit or heartbeat.
PATIENCE = 1800.0


def open_store(count: int) -> TCPStore:
    """Open rank 0's TCPStore for `count` ranks on a free loopback port. Any process that can connect may use it."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    return TCPStore(LOOPBACK, port, count, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def reach_store(port: int, count: int) -> TCPStore:
    """Connect another rank to rank 0's store of `count` ranks, through `port` of the rank's own loopback interface."""
    return TCPStore(LOOPBACK, port, count, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


def join(
    store: TCPStore,
    rank: int,
    count: int,
    device: str,
    here: str = LOOPBACK,
    gpu: int = 0,
    seconds: float = PATIENCE,
    config: TrainerConfig | None = None,
) -> ShardedRanks:
    """Join torch's process group as `rank` of `count`; waits for the other ranks. Sets the process's GPU and network
    interface.

    Args:
        device: "cpu", "cuda" or "auto".
        here: address of this machine that other ranks can reach.
        gpu: index of the rank's GPU on its machine.
        seconds: timeout of a collective.
        config: dtypes of gathers and sums, and the divisions of tokens and matrices; None: float32, no divisions.

    Raises:
        RecipeError: gloo or NCCL finds no network interface to the other ranks.
    """
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(gpu)
    use_interface_of(here)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    try:
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=seconds)
        )
        ranks = ShardedRanks(kind, config or TrainerConfig())
        if kind == "cuda":  # NCCL looks for its way at the first collective
            ranks.all_reduce(torch.zeros(1, device=kind))
    except RuntimeError as error:
        if problem := _no_way(str(error), rank):
            raise RecipeError([problem]) from error
        raise
    return ranks


def _no_way(told: str, rank: int) -> Problem | None:
    """The user's mistake behind the error text `told` of gloo or NCCL, if it is about network interfaces; else None."""
    if "interface" not in told and "Unable to find address" not in told:
        return None
    key = "NCCL_SOCKET_IFNAME" if "NCCL" in told else "GLOO_SOCKET_IFNAME"
    there = ", ".join(name for _, name in socket.if_nameindex())
    found = f"{os.environ.get(key, '')!r} of rank {rank} on {socket.gethostname()} leads to no other rank"
    return Problem(key, found, f"one of {there}, or unset it: the interface is found then")
