"""Sharding of a model that is trained, evaluated or both, and the filling of one without memory."""

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
    """Share `root`, a module around `model`, out to the ranks. A model without memory is then filled: each rank reads
    its part from the model's folder.

    `exact`: parts of `root` that compute in float32, whatever the ranks compute in.

    Raises:
        RecipeError: the ranks cannot divide its matrices, or exchange its heads for tokens.
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
    """The parameters in groups that torch computes in one call: those of the same ranks."""
    groups: dict[int, list[Tensor]] = {}
    for one in parameters:
        groups.setdefault(one.device_mesh.ndim if isinstance(one, DTensor) else 0, []).append(one)
    return list(groups.values()) or [[]]


@torch.no_grad()
def clip(parameters: Sequence[Tensor], most: float) -> float:
    """Clip the gradients by their norm over all parameters and ranks; returns the norm before."""
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
