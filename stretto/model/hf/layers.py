"""The decoder layers of a model: what is repeated, and so what is divided or computed again one piece at a time."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers in order, for any model of transformers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the decoder layers, by name: not the embedding, not the matrix to the vocabulary."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {n: module for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside}


def checkpoint_activations(model: nn.Module) -> None:
    """Keep of each layer only its input for the backward pass, which computes the rest again.

    Same gradients; about a third more computing, and the memory of one layer's activations in place of all of them
    (Chen et al., arXiv 1604.06174). transformers' own switch works in training mode alone, which has dropout.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
