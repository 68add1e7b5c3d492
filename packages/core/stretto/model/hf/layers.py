"""Parts of a model: the units of sharding and activation checkpointing."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, for any transformers model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def sharding_units(model: PreTrainedModel) -> list[nn.Module]:
    """Modules whose parameters are gathered one after the other: the embedding, each decoder layer, the output matrix.
    Tied matrices are one parameter, which stays gathered with the rest of the model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    ends = [] if tied else [module for module in (embedding, head) if module is not None]
    return [*ends, *decoder_layers(model)]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers inside the decoder layers, by name; not the embedding or output matrix."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {n: module for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside}


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only each layer's input for the backward pass, which recomputes the rest.

    Same gradients, about a third more compute, activations of one layer at a time (Chen et al., arXiv 1604.06174).
    transformers' own switch requires training mode, which enables dropout.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
