"""Files of a saved model: adapters in peft's format or a whole model, and the optimizer state.

adapter_model.safetensors, adapter_config.json     adapters
policy/                                            a whole model, as transformers reads it
optimizer.safetensors                              AdamW's moments and steps
gradient.safetensors                               the accumulated gradient, if it was written
shape.json                                         the `Shape`, and the folder of the base model
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgspec
import peft
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.core.errors import StoreError
from stretto.model.hf.folder import FolderWeights
from stretto.model.hf.inspection import BrokenHeader
from stretto.trainer.adapters import ADAPTER, adapted_layers, adapter_parameters
from stretto.weights.mailbox import LORA_A, LORA_B
from stretto_tinker.wire.bodies import Lora

ADAPTERS, OPTIMIZER, SHAPE, POLICY = "adapter_model.safetensors", "optimizer.safetensors", "shape.json", "policy"
GRADIENT = "gradient.safetensors"
_PEFT = "base_model.model."
#: LoRA alpha: the scale of adapters is alpha / rank, as in Tinker's own service.
ALPHA = 32


class Shape(msgspec.Struct, frozen=True):
    """Trained part of a model: LoRA adapters, or all weights (`lora` None). `seed`: of the adapters' initial values."""

    lora: Lora | None
    seed: int = 0


def write_shape(folder: Path, shape: Shape, base: Path) -> None:
    """Write the shape of a model, and `base`, the folder of its base model, to ``shape.json`` in `folder`."""
    (folder / SHAPE).write_bytes(msgspec.json.encode({"base": str(base), "shape": shape}))


def read_shape(folder: Path, base: Path) -> Shape:
    """Read the shape of a saved model. `base`: folder that its base model must have.

    Raises:
        StoreError: its base model is not `base`, or the file is missing or damaged.
    """
    try:
        found = json.loads((folder / SHAPE).read_bytes())
        if found["base"] != str(base):
            raise StoreError(f"{folder.name} is of another base model, {found['base']}")
        return msgspec.convert(found["shape"], Shape)
    except (OSError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise StoreError(f"{folder.name} is not whole: {error}") from None


def write_adapters(folder: Path, model: PreTrainedModel, rank: int, base: Path) -> None:
    """Write the adapters of a model, all of this `rank`, in peft's format. `base`: folder of the base model. Raises
    OSError if a file cannot be written."""
    tensors = {}
    for name, tensor in adapter_parameters(model):
        for kind, told in ((LORA_A, ".lora_A"), (LORA_B, ".lora_B")):
            if name.endswith(kind):
                tensors[f"{_PEFT}{name.removesuffix(kind)}{told}.weight"] = tensor.detach().cpu().contiguous()
    _save(tensors, folder / ADAPTERS)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        target_modules=sorted(adapted_layers(model)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    config.save_pretrained(str(folder))


@torch.no_grad()
def read_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Load the adapters in `folder`, which `write_adapters` wrote, into a model with adapters.

    Raises:
        StoreError: the file is missing or damaged, or its tensors have other names or shapes; nothing is loaded then.
    """
    ours: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model).items():
        for kind, both in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            ours[f"{_PEFT}{name}.{kind}.weight"] = cast(nn.Linear, both[ADAPTER]).weight
    try:
        found = load_file(folder / ADAPTERS)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{folder.name} is not whole: {error}") from None
    differing = [name for name, one in ours.items() if name not in found or found[name].shape != one.shape]
    if wrong := differing or sorted(found.keys() - ours.keys()):
        raise StoreError(f"{folder.name} is of a model of another shape, by {wrong[0]}")
    for name, one in ours.items():
        one.copy_(found[name])


@torch.no_grad()
def read_policy(folder: Path, model: PreTrainedModel) -> None:
    """Load the weights of a whole model, which are in the folder `POLICY`, into a model. They have the names of a
    folder of transformers, in which an expert of a mixture has tensors of its own.

    Raises:
        StoreError: files are missing or damaged, or their tensors have other names or shapes; the model may hold a part
            of them then.
    """
    try:
        source = FolderWeights(model, folder / POLICY)
        for name, one in model.named_parameters():
            found = source.read(name, ()) if name in source.names else None
            if found is None or found.shape != one.shape:
                raise StoreError(f"{folder.name} is of a model of another shape, by {name}")
            one.copy_(found)
    except (OSError, SafetensorError, BrokenHeader) as error:
        raise StoreError(f"{folder.name} is not whole: {error}") from None


def write_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of AdamW; the file has no tensors before the first step. Raises OSError if it cannot be
    written."""
    tensors = {
        f"{kind}.{name}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in _trained(model)
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    _save(tensors, folder / OPTIMIZER)


def read_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state of AdamW that `write_optimizer` wrote; the present state is dropped first. Weights without one in
    the file have none then.

    Raises:
        StoreError: the file is missing or damaged, or belongs to another model.
    """
    optimizer.state.clear()
    try:
        with safe_open(folder / OPTIMIZER, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{folder.name} has no optimizer that is whole: {error}") from None
    for name, parameter in _trained(model):
        state = {
            kind: found[f"{kind}.{name}"] for kind in ("step", "exp_avg", "exp_avg_sq") if f"{kind}.{name}" in found
        }
        if state and (len(state) != 3 or state["exp_avg"].shape != parameter.shape):
            raise StoreError(f"{folder.name}: the optimizer is of another model, by {name}")
        if state:
            optimizer.state[parameter] = {kind: value.to(parameter.device) for kind, value in state.items()}


def write_gradient(folder: Path, model: nn.Module) -> None:
    """Write the accumulated gradient of a model; the file has no tensors if there is none. Raises OSError if it cannot
    be written."""
    named = ((name, parameter.grad) for name, parameter in _trained(model))
    _save({name: grad.cpu().contiguous() for name, grad in named if grad is not None}, folder / GRADIENT)


def read_gradient(folder: Path, model: nn.Module) -> None:
    """Set the gradient of a model to the one that `write_gradient` wrote. Without its file, the present one stays.

    Raises:
        StoreError: the file is damaged, or belongs to another model.
    """
    file, trained = folder / GRADIENT, dict(_trained(model))
    if not file.exists():
        return
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{folder.name} has no gradient that is whole: {error}") from None
    if wrong := [name for name, one in found.items() if name not in trained or trained[name].shape != one.shape]:
        raise StoreError(f"{folder.name}: the gradient is of another model, by {wrong[0]}")
    for name, parameter in trained.items():
        parameter.grad = found[name].to(parameter.device) if name in found else None


def _trained(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the type with which safetensors reports errors of the system
        raise OSError(f"{file.name} cannot be written: {error}") from error
