"""Collectives of a step: their number and bytes, by what they do and the axis whose ranks they join."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.trainer.ranks import Ranks
from stretto_cluster.ranks.collectives import ShardedRanks

_KINDS: Mapping[str, str] = {
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
    "_reduce_scatter_base_": "reduce",
    "allreduce_": "sum",
    "all_reduce": "sum",
    "alltoall_base_": "exchange",
}


class Collectives(TorchDispatchMode):
    """Counts collectives. Bytes are those of the whole tensor that is gathered, summed or exchanged, on one rank.

    Example, of two ranks that gather a matrix of 4 MiB twice: ``collectives.calls["data", "gather"]`` is
    ``[4194304, 4194304]``.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self._axes: dict[str, str] = {}
        if isinstance(ranks, ShardedRanks):
            self._axes[ranks._mesh.get_group().group_name] = "data"
            if ranks.context_group is not None:
                self._axes[ranks.context_group.group_name] = "context"
        if ranks.tensor is not None:
            self._axes[ranks.tensor.get_group().group_name] = "tensor"

    def bytes(self, axis: str, kind: str = "") -> int:
        """All bytes of an axis, or those of one kind."""
        return sum(sum(sizes) for key, sizes in self.calls.items() if key[0] == axis and kind in ("", key[1]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        passive = func._opname.startswith(("wait", "_wrap"))
        if func.namespace in ("c10d", "_c10d_functional") and not passive:
            kind, axis = _KINDS[func._opname], self._axes.get(_group_name(args), "all")
            self.calls[axis, kind].append(whole_bytes(args))
        return func(*args, **(kwargs or {}))


def whole_bytes(arguments: Any) -> int:
    """Bytes of the whole tensor of a collective."""
    return max(one.nbytes for one in tree_leaves(arguments) if isinstance(one, Tensor))


def _group_name(arguments: Any) -> str:
    for one in reversed(arguments):
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return ProcessGroup.unbox(one).group_name
        if isinstance(one, str):
            return one
    raise AssertionError("a collective has a group")
