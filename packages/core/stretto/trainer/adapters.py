"""Adapters (LoRA, Hu et al., arXiv 2106.09685): the policy is frozen, and small matrices beside its linear layers are
trained.

    y = W x + alpha / rank * B A x        A [rank, in] starts random, B [out, rank] zero, so y starts as W x

Only A and alpha / rank * B are published; engines have W and add the product. Saved policies hold
W + alpha / rank * B A under the plain names (the names without adapters), so that readers need not support adapters.
peft creates the layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.model.hf.layers import linear_layers
from stretto.trainer.config import LoraConfig
from stretto.trainer.ranks import Ranks
from stretto.weights.mailbox import LORA_A, LORA_B

#: peft's name of the one adapter.
ADAPTER = "default"
SEED = 20_210_617  # A is the same on every rank and after every restart


class _Adapted(Protocol):
    """A peft linear layer with an adapter."""

    lora_A: nn.ModuleDict  # noqa: N815
    lora_B: nn.ModuleDict  # noqa: N815
    scaling: dict[str, float]  # alpha / rank


def adapted_layers(model: nn.Module) -> dict[str, _Adapted]:
    """Layers with an adapter, by plain name (as in the model without adapters); empty for a model without adapters."""
    return {name: cast(_Adapted, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager: disable all adapters of the model, which is the initial policy during the block. Does nothing to
    a model without adapters."""
    layers = adapted_layers(model).values()
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are not adapters, as (plain name, parameter)."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of every adapted layer, as (name under which it is published, parameter); B without its scale."""
    for name, layer in adapted_layers(model).items():
        for kind, both in ((LORA_A, layer.lora_A), (LORA_B, layer.lora_B)):
            yield name + kind, cast(nn.Linear, both[ADAPTER]).weight


def scaled(layers: Mapping[str, _Adapted], name: str, tensor: Tensor) -> Tensor:
    """The tensor to publish under `name`: B of an adapter times its scale, any other parameter unchanged. `layers`: the
    adapted layers by name."""
    layer = layers.get(name.removesuffix(LORA_B)) if name.endswith(LORA_B) else None
    return tensor if layer is None else layer.scaling[ADAPTER] * tensor


def matrices(layer: _Adapted, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A and B of a layer, gathered from the ranks; every rank must call it."""
    a, b = (cast(nn.Linear, both[ADAPTER]).weight for both in (layer.lora_A, layer.lora_B))
    return ranks.full_tensor(a.detach()), ranks.full_tensor(b.detach())


def merged(layer: _Adapted, weight: Tensor, ranks: Ranks) -> Tensor:
    """W + alpha / rank * B A of a layer with the gathered weight W (`weight`); every rank must call it."""
    a, b = matrices(layer, ranks)
    return weight + layer.scaling[ADAPTER] * (b @ a)


def adapt(model: PreTrainedModel, config: LoraConfig, *, seed: int = SEED, head: bool = False) -> None:
    """Freeze the model in place, and add an adapter to each linear layer that `config` names. `head`: also to the
    output matrix. `seed`: of the random A; torch's own random state is unchanged."""
    wanted = [name for name in linear_layers(model) if config.targets(name)]
    if head:
        wanted += [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        # An embedding tied to the output matrix gets no adapter: only the output matrix does.
        warnings.filterwarnings("ignore", message=".*ensure_weight_tying")
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(config, [f"model.{name}" for name in wanted]), _Unnamed(model))


class _Unnamed(nn.Module):
    """A wrapper that hides a model's config from peft: for some families of mixtures of experts, which it knows by the
    config, peft would adapt the experts in place of the dense and shared layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def gather_adapters(
    model: nn.Module, config: LoraConfig, ranks: Ranks, inside: str = "adapter"
) -> Callable[[Path], None]:
    """Gather the adapters from the ranks; every rank must call it. Returns a function for one rank to call: it writes
    the adapters in peft's format into the folder `inside` of the policy folder that it is given."""
    layers = {name: matrices(layer, ranks) for name, layer in adapted_layers(model).items()}

    def write(policy: Path) -> None:
        tensors = {
            f"base_model.model.{name}.{kind}.weight": matrix.cpu()
            for name, both in layers.items()
            for kind, matrix in zip(("lora_A", "lora_B"), both, strict=True)
        }
        (folder := policy / inside).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        _peft_config(config, layers).save_pretrained(str(folder))

    return write


def _peft_config(config: LoraConfig, names: Iterable[str]) -> peft.LoraConfig:
    """peft's config for adapters on the layers with these names."""
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=sorted(names), task_type="CAUSAL_LM")
