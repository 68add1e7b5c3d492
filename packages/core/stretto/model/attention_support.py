"""Check that the packed path (trainer) and the cached path (engine) support the attention of a model.

    supported  causal attention, over all earlier tokens or over a sliding window; scores capped by a tanh
    refused    sinks, biases, latent keys and values, keys shared between layers, bidirectional or linear layers;
               rotary frequencies that depend on the longest position of a call: log-probabilities would then depend
               on the rest of the batch

The config does not show which arguments the module passes to its attention function. So the module is run on a single
token with an attention function that records its arguments. A window that is in the config but is not passed to the
attention function is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem

_RECORDING = "stretto_recording"
_COMPUTED = ("full_attention", "sliding_attention")
_REMEDY = "the packed and the cached path do not compute this; use a remote engine for this model"
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # None where there is none
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")  # None or 1 where there is none

#: Attention arguments of transformers that neither path supports.
UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


@dataclass(frozen=True)
class _Requested:
    """Arguments that one layer passes to its attention function. `window`: tokens that a query sees, its own included;
    None: all. `unsupported`: names of those arguments that neither path computes."""

    layer: int
    window: int | None
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    unsupported: tuple[str, ...]


@dataclass(frozen=True)
class Attention:
    """The attention of a model, whose layers differ only by their window, as `check_attention` finds it. `windows`: the
    windows in use, in tokens, None for full attention.

    Example: ``Attention(layers=26, kv_heads=4, head_dim=256, windows={1024, None})``
    """

    layers: int
    kv_heads: int
    head_dim: int
    windows: frozenset[int | None]


def check_attention(model: PreTrainedModel) -> Attention:
    """Find the attention of a model by running it on one token. A model made by `skeleton` must have its weights.
    Raises ModelFolderError, which lists the unsupported kinds of attention that the config shows; if it shows none,
    those that the run has found."""
    config = model.config.get_text_config()
    refuse_unsupported(config)
    requested = _requested(model)
    found = _mistakes(config, requested)
    if found:
        raise ModelFolderError(Problem(type(model).__name__, what, _REMEDY) for what in found)
    windows = frozenset(layer.window for layer in requested)
    return Attention(len(requested), requested[0].kv_heads, requested[0].head_dim, windows)


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse unsupported attention that can be seen in the config; `check_attention` finds what cannot. Raises
    ModelFolderError, which lists layers whose attention is neither full nor sliding, latent or shared keys, and rotary
    frequencies that change from call to call."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(_COMPUTED))
    found = [f"layers of the kind {kind!r}" for kind in kinds]
    if getattr(text, "kv_lora_rank", None):
        found.append("latent keys and values")
    if getattr(text, "num_kv_shared_layers", None):
        found.append("keys and values shared between layers")
    changing = sorted(kind for kind in _rope_kinds(text) if "dynamic" in kind or kind == "longrope")
    found += [f"rotary frequencies of the kind {kind!r}, which follow the longest position" for kind in changing]
    if found:
        raise ModelFolderError(Problem(f"config.json ({text.model_type})", what, _REMEDY) for what in found)


def refuse_untrainable(config: PreTrainedConfig) -> None:
    """Refuse a model that, by its config, changes the logits after the output matrix. Engines can serve such a model,
    but the trainer computes log-probabilities directly from the output matrix. `packed.logprobs.check_policy` finds
    changes that the config does not show. Raises ModelFolderError, which lists soft caps and scales of the logits."""
    text = config.get_text_config()
    caps = [(name, value) for name in _CAPS if (value := getattr(text, name, None)) is not None]
    scales = [(name, value) for name in _SCALES if (value := getattr(text, name, None)) not in (None, 1)]
    if caps or scales:
        place, remedy = f"config.json ({text.model_type})", "choose a model whose logits are linear"
        told = "changes the logits after the output matrix, which no trainer here computes"
        raise ModelFolderError(Problem(place, f"{name} = {value} {told}", remedy) for name, value in (*caps, *scales))


def windows(config: PreTrainedConfig) -> frozenset[int]:
    """Return the sliding windows, in tokens, of a model's layers by its config; empty if all have full attention."""
    text = config.get_text_config()
    found = (_window(text, layer) for layer in range(text.num_hidden_layers))
    return frozenset(window for window in found if window is not None)


def _rope_kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of rotary frequencies in the config, which may have one for all layers or one per kind of layer."""
    told = getattr(config, "rope_parameters", None) or {}
    each = [told, *(inner for inner in told.values() if isinstance(inner, dict))]
    return {str(kind) for rope in each if (kind := rope.get("rope_type"))}


def _mistakes(config: PreTrainedConfig, requested: list[_Requested]) -> list[str]:
    """List in words what is unsupported in the recorded calls: arguments, attention to later tokens, several calls in a
    layer, differing shapes, a window of the config that is not passed on, or no call at all. Empty if all is
    supported."""
    if not requested:
        return ["attention that transformers does not let be replaced"]
    found = [f"attention with {name}" for name in sorted({name for layer in requested for name in layer.unsupported})]
    if len({(layer.kv_heads, width) for layer in requested for width in (layer.head_dim, layer.value_dim)}) > 1:
        found.append("keys and values of different shapes")
    if len({layer.layer for layer in requested}) < len(requested):
        found.append("several attention calls in a layer")
    if not all(layer.causal for layer in requested):
        found.append("attention to later tokens")
    if lost := [layer.layer for layer in requested if layer.window is None and _window(config, layer.layer)]:
        found.append(f"a sliding window that layer {lost[0]} does not hand to its attention function")
    return found


def _window(config: PreTrainedConfig, layer: int) -> int | None:
    """Return the window of layer number `layer` by the config, in tokens; None for full attention or a window not
    shorter than the context."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or window >= config.max_position_embeddings or (kinds and kinds[layer] != "sliding_attention"):
        return None
    return window


@torch.no_grad()
def _requested(model: PreTrainedModel) -> list[_Requested]:
    """Run a forward pass over one token, and return the arguments of each attention call; empty if the module does not
    use transformers' attention functions."""
    own, requested = model.config._attn_implementation, list[_Requested]()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model.set_attn_implementation(_RECORDING)
    try:
        model(token, position_ids=token, use_cache=False, stretto_request=requested.append)
    finally:
        model.set_attn_implementation(own)
    return requested


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretto_request: Callable[[_Requested], None] | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Hand the arguments of this call to `stretto_request`; returns the query in place of an output, of which only the
    shape matters. Raises ModelFolderError if the module does not pass `stretto_request` on."""
    if stretto_request is None:
        found = "attention that does not hand its arguments on"
        raise ModelFolderError([Problem(type(module).__name__, found, _REMEDY)])
    unsupported = [name for name in UNSUPPORTED if rest.get(name) is not None]
    stretto_request(
        _Requested(
            layer=cast(int, module.layer_idx),
            window=sliding_window,
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            causal=getattr(module, "is_causal", True) is not False,
            unsupported=(*unsupported, *(["a mask of its own"] if attention_mask is not None else [])),
        )
    )
    return query.transpose(1, 2), None


AttentionInterface.register(_RECORDING, _recording_attention)
