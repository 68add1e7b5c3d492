"""Ranks: the processes that train one policy together, and their collectives. Here is the one process of a trainer
alone; `stretto_cluster.ranks` has several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stretto.model.layout import DivideRow
from stretto.processes.channel import Failed
from stretto.trainer.messages import RankLost, RanksAwaited, ToTrainer


class Ranks:
    """Collectives of a rank. All ranks must call the same methods in the same order. This class is for a single
    process, which has everything: nothing is exchanged. `stretto_cluster.ranks` is for several.

    Attributes:
        rank, count: number of this rank, and number of ranks.
        share, shares: index of the part of each minibatch that this rank computes, and number of parts.
        device: where the parameters of several ranks are, "cpu" or "cuda".
        second_group: a gloo group for CPU collectives in another thread while training continues.
        context: cuts a row into this rank's part; None if tokens are not divided.
        tensor: mesh of the ranks that divide the matrices of a layer with this rank; None if they are not divided.
    """

    rank, count, share, shares, device = 0, 1, 0, 1, "cpu"
    second_group: ProcessGroup | None = None
    context: DivideRow | None = None
    tensor: DeviceMesh | None = None

    def shard(self, root: nn.Module, model: PreTrainedModel, exact: Iterable[nn.Module] = ()) -> None:
        """Shard the parameters of `root`, a module that contains `model`, over the ranks; gradients are summed over
        them. A model on the meta device is then filled: each rank reads its shard from the model's folder. `exact`:
        submodules of `root` that compute in float32, whatever the dtype of the others.

        Raises:
            RecipeError: the ranks cannot divide the model's matrices, or its heads.
            ModelFolderError: the folder lacks a weight, or holds numbers that are not finite.
        """

    def reduces(self, root: nn.Module, *, last: bool) -> None:
        """Announce the next backward pass. `last`: it is the last before an optimizer step. If the recipe reduces once
        per minibatch, gradients are summed over the ranks only then."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of `values` over the shares, bitwise equal on all ranks. Ranks of one share count once."""
        return values

    def all_gather(self, own: Tensor) -> tuple[Tensor, int]:
        """Concatenate the vectors `own` of all shares, whose lengths may differ; returns the result and the offset of
        this rank's vector."""
        return own, 0

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor on every rank, and return the full one; a tensor that is not sharded is returned
        itself."""
        return tensor

    def copy_to_cpu(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's shard on the CPU, sharded as before."""
        return tensor.to("cpu", copy=True)

    def zeros_on_host(self, tensor: Tensor) -> Tensor:
        """Zeros in host memory with the shape and sharding of `tensor`; page-locked if `tensor` is on a GPU."""
        return zeros_on_host(tensor)

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, on every rank. Uses `second_group`."""
        return list(numbers)

    def all_reduce_number(self, number: int) -> int:
        """The sum of `number` over the ranks. Uses `second_group`."""
        return number

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather on rank 0 a tensor that is sharded on the CPU, and return the full one there; other ranks get it too,
        or `tensor` back. Uses `second_group`."""
        return tensor

    def scatter(self, whole: Tensor | None, tensor: Tensor) -> None:
        """Fill each rank's shard of `tensor` in place from rank 0's full tensor `whole` (None on other ranks); the
        inverse of `gather`."""
        assert whole is not None, "one process has everything"
        tensor.copy_(whole)


ALONE = Ranks()

EXIT_CODE = 1  #: of a rank that ends because another one is lost


class OtherRanks:
    """The other ranks of a trainer: none. `stretto_cluster.ranks.rank_group` starts and watches several."""

    def start(self, tell: Callable[[RanksAwaited | RankLost | Failed], None]) -> Ranks:
        """Start the other ranks, watch them in a thread, and form the process group with them; returns rank 0's
        collectives. `tell` sends messages to the conductor, and is called in that thread: a request for ranks on other
        machines, the loss of a rank, or the error that a rank has sent. After the latter two the process is ended.

        Raises:
            OSError: the address at which ranks should join is not an address of this machine.
            RecipeError: gloo or NCCL finds no network interface to the other ranks.
        """
        return ALONE

    def forward(self, order: ToTrainer) -> None:
        """Send the other ranks the order that rank 0 is about to carry out. Raises ConnectionError if the connection to
        a rank is closed."""

    def explain(self, error: Exception) -> RankLost | Failed | None:
        """The loss of another rank, or the error that it has sent, that caused `error` in rank 0; None if all ranks
        failed with this error, or only rank 0. Waits up to two seconds for the loss to be noticed."""
        return None


def zeros_on_host(like: Tensor) -> Tensor:
    """Zeros in host memory with the shape and dtype of `like`, page-locked if `like` is on a GPU."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def own(parameter: Tensor) -> Tensor:
    """This process's shard of a sharded parameter, not copied; a parameter that is not sharded is returned itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def on_meta_device(module: nn.Module) -> bool:
    """Whether a parameter of the module is on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def by_mesh(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters by the number of dimensions of their device mesh (0 if not sharded); one empty group if there
    are none. torch can process only parameters of one group in one call."""
    groups: dict[int, list[Tensor]] = {}
    for one in parameters:
        groups.setdefault(one.device_mesh.ndim if isinstance(one, DTensor) else 0, []).append(one)
    return list(groups.values()) or [[]]
