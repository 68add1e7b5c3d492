"""Decoder layers of a training step with one fused forward each (`stretto_kernels.steps.layer`), and the attention
between its two parts.

Axes: T token, S sequence, H query head, K key head, D head width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.model.attention_support import check_attention
from stretto.model.hf.layers import decoder_layers
from stretto.model.layout import Ints, Packing, pack
from stretto.model.packed.attention import attend_tokens, bucketed
from stretto_kernels.rule import Rule
from stretto_kernels.short import LONGEST, short_attention
from stretto_kernels.steps.layer import fuse, fusible

_PROBED = (5, 3)  # lengths of the sequences on which a layer is compared


def fuse_layers(model: PreTrainedModel) -> int:
    """Give the fused forward to the decoder layers that it fits, in place; returns their number. That is 0 without
    compiled loops (CPU) or Triton kernels (GPU), for dtypes other than float32, and for a model with attention windows,
    a soft cap or no rotary embedding."""
    if not fusible(model) or check_attention(model).windows != {None}:
        return 0
    return fuse(model, decoder_layers(model), attend, pack(_PROBED, model.device))


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float) -> Tensor:
    """Compute the causal attention within the sequences of a packed row: query [T, H, D], key and value [T, K, D];
    returns [T, H, D]. `scaling`: factor of the scores. On a GPU by `attend_tokens`; on a CPU by a compiled loop if all
    sequences are short and 8 divides D, else bucket by bucket."""
    if query.is_cuda:
        return attend_tokens(query, key, value, packing, Rule(scaling=scaling))
    if packing.longest <= LONGEST and query.shape[2] % 8 == 0:
        return short_attention(query, key, value, places_of(packing), packing.longest, scaling)
    return bucketed(query, key, value, packing, Rule(scaling=scaling))


def places_of(packing: Packing) -> Ints:
    """Return a table [S, 4]: for each sequence the index in the row of its first own token and of the first token of
    its shared prefix, the number of shared tokens, and the sequence's length with them."""
    starts = packing.starts
    shared = packing.position_ids[0, starts]
    sources = packing.token_of_cell[packing.cell_of_token[starts] - shared]
    lengths = torch.tensor(packing.lengths)
    return cast(Ints, torch.stack([starts, sources, shared, lengths], 1).numpy())
