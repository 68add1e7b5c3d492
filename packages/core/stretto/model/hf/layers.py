"""The decoder layers of a model: the units of sharding and of activation checkpointing."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, of any model of transformers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the decoder layers, by name, without embedding and output matrix."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {n: module for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside}


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the input of each layer for the backward pass, which recomputes the rest.

    Gradients stay the same; the step computes about a third more, and holds the activations of one layer instead of all
    (Chen et al., arXiv 1604.06174). transformers' own switch needs training mode, which has dropout.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
