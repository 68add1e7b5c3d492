"""LoRA (Hu et al., arXiv 2106.09685) through peft: the policy stays as it is, and small matrices beside its linear
layers are trained.

    y = W x + alpha / rank * B A x        A [rank, in] begins random, B [out, rank] zero: the start is the policy

What is published and saved is the policy that this comes to, W + alpha / rank * B A, under its plain names: engines and
readers of model folders need not know of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import peft
import torch
from peft.tuners.lora import Linear
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.model.layers import linear_layers
from stretto.trainer.config import LoraConfig
from stretto.trainer.ranks import Ranks

_NAME = "default"  # peft's name of the one adapter
_SEED = 20_210_617  # A is the same on every rank, and in every trainer that begins anew


def adapt(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model, and give the linear layers that `config` names an adapter each."""
    wanted = {name for name in linear_layers(model) if config.targets(name)}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        peft.inject_adapter_in_model(_peft_config(config, wanted), model)


def adapted_layers(model: nn.Module) -> dict[str, Linear]:
    """The layers that have an adapter, by the plain name of their weight; none in a model without adapters."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that it was before `adapt`."""
    layers = adapted_layers(model).values()
    scalings = [layer.scaling[_NAME] for layer in layers]
    for layer in layers:
        layer.scaling[_NAME] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[_NAME] = scaling


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the policy has without adapters, under their names there."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def merged(layer: Linear, weight: Tensor, ranks: Ranks) -> Tensor:
    """W + alpha / rank * B A of a layer whose whole W is given; every rank calls it."""
    scaling: float = layer.scaling[_NAME]
    return weight + scaling * (_matrix(layer.lora_B, ranks) @ _matrix(layer.lora_A, ranks))


def save_adapters(model: nn.Module, config: LoraConfig, ranks: Ranks, folder: Path) -> None:
    """Write the adapters alone as peft writes them; every rank calls it, the first one writes."""
    layers = {name.removesuffix(".weight"): layer for name, layer in adapted_layers(model).items()}
    tensors = {
        f"base_model.model.{name}.{kind}.weight": _matrix(matrices, ranks).cpu()
        for name, layer in layers.items()
        for kind, matrices in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }
    if ranks.rank == 0:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        _peft_config(config, set(layers)).save_pretrained(str(folder))


def _matrix(matrices: nn.ModuleDict, ranks: Ranks) -> Tensor:
    """A or B, whole."""
    return ranks.whole(cast(nn.Linear, matrices[_NAME]).weight.detach())


def _peft_config(config: LoraConfig, names: set[str]) -> peft.LoraConfig:
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=sorted(names), task_type="CAUSAL_LM")
