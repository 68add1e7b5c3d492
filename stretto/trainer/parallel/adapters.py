"""A policy with adapters (LoRA, Hu et al., arXiv 2106.09685): it stays as it is, and small matrices beside its linear
layers are trained.

    y = W x + alpha / rank * B A x        A [rank, in] begins random, B [out, rank] zero: the start is the policy

Published are A and alpha / rank * B alone; engines, which have W, add their product. What is saved is the policy that
this comes to, W + alpha / rank * B A, under its plain names: readers of model folders need not know of adapters. peft
makes the layers (`lora.py`); here they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from torch import Tensor, nn

from stretto.trainer.parallel.ranks import Ranks
from stretto.weights.mailbox import LORA_A, LORA_B

#: peft's name of the one adapter.
ADAPTER = "default"


class Adapted(Protocol):
    """A linear layer with an adapter, as peft has it."""

    lora_A: nn.ModuleDict  # noqa: N815
    lora_B: nn.ModuleDict  # noqa: N815
    scaling: dict[str, float]  # alpha / rank


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """The layers that have an adapter, by their plain name; none in a model without adapters."""
    return {name: cast(Adapted, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that it was before it got them."""
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
    """The parameters that the policy has without adapters, under their names there."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A and B of every layer that has them, by the names under which they are published."""
    for name, layer in adapted_layers(model).items():
        for kind, both in ((LORA_A, layer.lora_A), (LORA_B, layer.lora_B)):
            yield name + kind, cast(nn.Linear, both[ADAPTER]).weight


def matrices(layer: Adapted, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A and B, whole; every rank calls it."""
    a, b = (cast(nn.Linear, both[ADAPTER]).weight for both in (layer.lora_A, layer.lora_B))
    return ranks.whole(a.detach()), ranks.whole(b.detach())


def merged(layer: Adapted, weight: Tensor, ranks: Ranks) -> Tensor:
    """W + alpha / rank * B A of a layer whose whole W is given; every rank calls it."""
    a, b = matrices(layer, ranks)
    return weight + layer.scaling[ADAPTER] * (b @ a)
