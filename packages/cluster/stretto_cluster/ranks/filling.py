"""Models without memory: built on torch's meta device, sharded, and filled from the safetensors files of their folder.

    skeleton ─► sharded (still without memory) ─► each process reads its shard of each tensor

A file is closed after each tensor, so a process holds no more than its shards and one tensor of the folder. A parameter
that transformers merges from several tensors (experts of mixtures) is merged alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.inspection import weight_files
from stretto.model.hf.layers import saved_buffers
from stretto.trainer.adapters import ADAPTER, SEED, adapted_layers
from stretto.trainer.ranks import own

_BASE = ".base_layer."  # of a linear layer under an adapter
_ADAPTERS = ".lora_"
_REMEDY = "copy or download the folder again"


@torch.no_grad()
def fill(model: PreTrainedModel, inside: nn.Module, device: torch.device | str) -> None:
    """Allocate the parameters and buffers of `inside` on `device`, and fill them from the folder of `model` (its
    `name_or_path`). `inside` is a part of `model`, or contains it. Adapters are not filled; parameters that do not
    belong to `model` are set to zero; buffers that are not saved are computed.

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
    held = {name: one for name, one in _plain(model) if id(one) in both}
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
def draw_adapters(model: nn.Module, seed: int = SEED) -> None:
    """Initialise adapters that were added to a model on the meta device, with the same numbers as `adapt`. Each rank
    draws one full A at a time, and keeps the rows of its shard."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for layer in adapted_layers(model).values():
            a, b = (cast(nn.Linear, both[ADAPTER]) for both in (layer.lora_A, layer.lora_B))
            whole = nn.Linear(a.in_features, a.out_features, bias=False).weight
            nn.Linear(b.in_features, b.out_features, bias=False)  # peft makes both, and draws A again
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            own(a.weight).copy_(whole[own_slices(a.weight)])
            own(b.weight).zero_()


def _plain(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are not adapters, and the saved buffers, with their names in the model alone."""
    for name, one in chain(model.named_parameters(), saved_buffers(model)):
        if _ADAPTERS not in name:
            yield name.replace(_BASE, "."), one


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """The slices, one per axis, of the full parameter that `own` returns."""
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


class FolderWeights:
    """Reads the weights in a model's folder by the names of the model's parameters.

    Example::

        FolderWeights(model).read("model.layers.0.mlp.up_proj.weight", (slice(0, 128), slice(None)))  # [128, W]
    """

    def __init__(self, model: PreTrainedModel, folder: Path | None = None) -> None:
        """Find the tensors of each parameter. `folder`: of a model with this config; None: the model's own."""
        self.folder = Path(str(model.name_or_path)) if folder is None else folder
        self._model, self._files = model, weight_files(self.folder)
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        known = dict.fromkeys((name for name, _ in _plain(model)), True)
        self._sources: dict[str, list[tuple[str, str | None]]] = {}  # by parameter: its tensors and merge patterns
        for source in sorted(self._files, key=dot_natural_key):
            name, pattern = self._name_of(source, known)
            self._sources.setdefault(name, []).append((source, pattern))

    @property
    def names(self) -> set[str]:
        """Names of the parameters that the folder holds."""
        return set(self._sources)

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read the slices `part` (one per axis; none: all) of a parameter, in the folder's dtype."""
        (source, pattern), *_ = self._sources[name]
        if pattern is None:
            return self._tensor(source, part)
        merging = deepcopy(next(one for one in self._converters if pattern in one.source_patterns))
        for each, found in self._sources[name]:
            read: Any = partial(self._tensor, each, ())  # read when it is merged
            merging.add_tensor(name, each, str(found), read)
        merged = merging.convert(name, model=self._model, config=self._model.config)[name]
        whole: Tensor = merged[0] if isinstance(merged, list) else merged
        return whole[part].clone()

    def _tensor(self, source: str, part: tuple[slice, ...]) -> Tensor:
        with safe_open(self._files[source], framework="pt") as file:
            tensor: Tensor = file.get_slice(source)[part] if part else file.get_tensor(source)
            return tensor.clone()  # the file's own memory goes with it

    def _name_of(self, source: str, known: dict[str, Any]) -> tuple[str, str | None]:
        """The parameter that the tensor `source` of the folder belongs to by transformers' rules, and the pattern of
        the rule that merges it with others; None if it is not merged."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(source, self._renamings, self._converters, prefix, known)
        if name not in known and source in known:
            return source, None
        return name, pattern
