"""Modules of a model: decoder layers, units of sharding, linear layers; saved buffers; activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """List the decoder layers in order, for any transformers model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def sharding_units(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules that FSDP shards and gathers one after the other: embedding, output matrix, and each decoder
    layer. A tied embedding is left out: it stays gathered with the rest of the model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    ends = [] if tied else [module for module in (embedding, head) if module is not None]
    return [*ends, *decoder_layers(model)]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside decoder layers, by name; without the output matrix."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {n: module for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside}


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are saved with the weights, by name, such as the biases by which a router balances its
    experts. Training does not change them."""
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(place, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def checkpoint_activations(model: nn.Module) -> None:
    """Enable activation checkpointing, in place: only each decoder layer's input is kept for the backward pass, which
    recomputes the other activations of the layer (Chen et al., arXiv 1604.06174).

    Gradients stay the same, with about a third more computation. transformers' own switch requires training mode, which
    enables dropout.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
