"""Models without memory: built on torch's meta device, sharded, and filled from the safetensors files of their folder.

    skeleton ─► sharded (still without memory) ─► each process reads its shard of each tensor

A file is closed after each tensor, so a process holds no more than its shards and one tensor of the folder. A parameter
that transformers merges from several tensors (experts of mixtures) is merged alone.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.folder import FolderWeights, plain_weights
from stretto.trainer.adapters import ADAPTER, SEED, adapted_layers
from stretto.trainer.ranks import own

_REMEDY = "copy or download the folder again"


@torch.no_grad()
def fill(model: PreTrainedModel, inside: nn.Module, device: torch.device | str) -> None:
    """Allocate the parameters and buffers of `inside` on `device`, and fill them from the folder of `model` (its
    `name_or_path`). `inside` is a part of `model`, or contains it. Adapters are allocated and not filled; parameters
    that do not belong to `model` are set to zero; buffers that are not saved are computed.

    Raises:
        ModelFolderError: the folder lacks a weight, or holds numbers that are not finite.
    """
    inside.to_empty(device=device)
    of_model = {id(parameter) for parameter in model.parameters()}
    wanted = {id(parameter): parameter for parameter in inside.parameters()}
    for added in (one for key, one in wanted.items() if key not in of_model):
        own(added).zero_()
    _compute_buffers(model, inside)
    both = wanted.keys() | {id(buffer) for buffer in inside.buffers()}
    held = {name: one for name, one in plain_weights(model) if id(one) in both}
    source, problems = FolderWeights(model), list[Problem]()
    if missing := sorted(held.keys() - source.names):
        found = f"lacks the weight {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise ModelFolderError([Problem(str(source.folder), found, _REMEDY)])
    for name, parameter in held.items():
        if (part := own(parameter)).numel():
            part.copy_(source.read(name, own_slices(parameter)))
            if not bool(part.isfinite().all()):
                problems.append(Problem(str(source.folder), f"{name} holds numbers that are not finite", _REMEDY))
    if problems:
        raise ModelFolderError(problems[:1])


@torch.no_grad()
def draw_adapters(model: nn.Module) -> None:
    """Initialise adapters that were added to a model on the meta device, with the same numbers as `adapt`. Each rank
    draws one full A at a time, and keeps the rows of its shard. B is zero."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        for layer in adapted_layers(model).values():
            a, b = (cast(nn.Linear, both[ADAPTER]) for both in (layer.lora_A, layer.lora_B))
            whole = nn.Linear(a.in_features, a.out_features, bias=False).weight
            nn.Linear(b.in_features, b.out_features, bias=False)  # peft makes both, and draws A again
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            own(a.weight).copy_(whole[own_slices(a.weight)])
            own(b.weight).zero_()


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Slices, one per axis, of the full parameter that select this process's shard of it (`own`); all of an undivided
    one."""
    if not isinstance(parameter, DTensor):
        return (slice(None),) * parameter.ndim
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def _compute_buffers(model: PreTrainedModel, inside: nn.Module) -> None:
    """Compute the buffers (rotary frequencies, scales) in the same way as transformers when it loads a model. Saved
    buffers are read afterwards."""
    for module in inside.modules():
        if any(buffer is not None for buffer in module._buffers.values()):
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
            model._init_weights(module)
