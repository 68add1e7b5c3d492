"""Sharding of a model over ranks; a model on the meta device is filled afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stretto.model.hf.filling import fill, own, without_memory
from stretto.trainer.parallel.lora import draw_adapters
from stretto.trainer.parallel.ranks import Ranks
from stretto.trainer.parallel.tensor import divide_matrices, refuse_undividable


def shard(root: nn.Module, model: PreTrainedModel, ranks: Ranks, exact: Iterable[nn.Module] = ()) -> None:
    """Shard the parameters of `root`, a module that contains `model`, over the ranks. A model on the meta device is
    then filled: each rank reads its shard from the model's folder.

    `exact`: submodules of `root` that compute in float32, whatever the dtype of the other modules.

    Raises:
        RecipeError: the ranks cannot divide the model's matrices, or its heads.
        ModelFolderError: the folder lacks a weight, or holds numbers that are not finite.
    """
    refuse_undividable(model, ranks.tensor.size() if ranks.tensor else 1, ranks.context.size() if ranks.context else 1)
    if ranks.tensor is not None:
        divide_matrices(model, ranks.tensor)
    ranks.fully_shard(root, model, exact)
    if without_memory(root):
        fill(model, root, ranks.device)
        draw_adapters(model)


def by_mesh(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters by the number of dimensions of their device mesh (0 if not sharded). torch can process only
    parameters of one group in one call."""
    groups: dict[int, list[Tensor]] = {}
    for one in parameters:
        groups.setdefault(one.device_mesh.ndim if isinstance(one, DTensor) else 0, []).append(one)
    return list(groups.values()) or [[]]


@torch.no_grad()
def clip(parameters: Sequence[Tensor], most: float) -> float:
    """Clip the gradients of `parameters` in place to a global norm of at most `most`, over all parameters and ranks;
    returns the norm before clipping."""
    groups = by_mesh(parameters)
    if len(groups) == 1:
        return float(_whole(nn.utils.clip_grad_norm_(parameters, most)))
    gradients = [[one.grad for one in group if one.grad is not None] for group in groups]
    norms = [_whole(nn.utils.get_total_norm(group)) for group in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    torch._foreach_mul_([own(gradient) for group in gradients for gradient in group], factor)
    return float(norm)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
