"""Sharding of a model that is trained, evaluated or both, and the filling of one without memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from stretto.model.hf.filling import fill, without_memory
from stretto.trainer.parallel.lora import draw_adapters
from stretto.trainer.parallel.ranks import Ranks


def shard(root: nn.Module, model: PreTrainedModel, ranks: Ranks, exact: Iterable[nn.Module] = ()) -> None:
    """Share `root`, a module around `model`, out to the ranks. A model without memory is then filled: each rank reads
    its part from the model's folder.

    `exact`: parts of `root` that compute in float32, whatever the ranks compute in.

    Raises:
        ModelFolderError: the folder lacks a weight, or holds numbers that are not finite.
    """
    ranks.fully_shard(root, model, exact)
    if without_memory(root):
        fill(model, root, ranks.device)
        draw_adapters(model)
