"""Adapters (LoRA, Hu et al., arXiv 2106.09685): the policy is frozen, and small matrices beside its linear layers are
trained.

    y = W x + alpha / rank * B A x        A [rank, in] starts random, B [out, rank] zero, so y starts as W x

Only A and alpha / rank * B are published; engines have W and add the product. Saved policies hold
W + alpha / rank * B A under the plain names (the names without adapters), so that readers need not support adapters.
peft creates the layers (`lora.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, cast

from torch import Tensor, nn

from stretto.trainer.parallel.ranks import Ranks
from stretto.weights.mailbox import LORA_A, LORA_B

#: peft's name of the one adapter.
ADAPTER = "default"


class Adapted(Protocol):
    """A peft linear layer with an adapter."""

    lora_A: nn.ModuleDict  # noqa: N815
    lora_B: nn.ModuleDict  # noqa: N815
    scaling: dict[str, float]  # alpha / rank


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Layers with an adapter, by plain name; empty for a model without adapters."""
    return {name: cast(Adapted, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager: disable all adapters of the model, which is the initial policy during the block."""
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
    """Yield the parameters that are not adapters, with their plain names."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of every adapted layer, with the names under which they are published."""
    for name, layer in adapted_layers(model).items():
        for kind, both in ((LORA_A, layer.lora_A), (LORA_B, layer.lora_B)):
            yield name + kind, cast(nn.Linear, both[ADAPTER]).weight


def scaled(layers: Mapping[str, Adapted], name: str, tensor: Tensor) -> Tensor:
    """The tensor to publish under `name`: B of an adapter times its scale, any other parameter unchanged. `layers`: the
    adapted layers by name."""
    layer = layers.get(name.removesuffix(LORA_B)) if name.endswith(LORA_B) else None
    return tensor if layer is None else layer.scaling[ADAPTER] * tensor


def matrices(layer: Adapted, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A and B of a layer, gathered from the ranks; every rank must call it."""
    a, b = (cast(nn.Linear, both[ADAPTER]).weight for both in (layer.lora_A, layer.lora_B))
    return ranks.full_tensor(a.detach()), ranks.full_tensor(b.detach())


def merged(layer: Adapted, weight: Tensor, ranks: Ranks) -> Tensor:
    """W + alpha / rank * B A of a layer with the gathered weight W (`weight`); every rank must call it."""
    a, b = matrices(layer, ranks)
    return weight + layer.scaling[ADAPTER] * (b @ a)
