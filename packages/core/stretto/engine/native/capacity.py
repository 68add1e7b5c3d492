"""The longest prompt plus completion that the context and the KV cache can hold."""

from __future__ import annotations

import torch

from stretto.engine.config import EngineConfig
from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.hf.inspection import ModelFolder


def longest_row(layout: CacheLayout, cache_bytes: int) -> int:
    """Largest number of tokens (prompt plus completion) of one row in a cache of `cache_bytes`, at most the context
    length; 0 if not even the shortest slot fits.

    A row takes a whole slot, whose length is a power of two or the context length.

    Example: memory for 700 tokens and a context of 4,096: a row may have 512, since the next slot has 1,024.
    """
    held, context = cache_bytes // layout.bytes_per_token, layout.context_length
    slots = (context, *(1 << power for power in range(context.bit_length())))
    return max((tokens for tokens in slots if layout.slot(tokens) <= held), default=0)


def longest_row_of(folder: ModelFolder, config: EngineConfig) -> int:
    """As `longest_row`, for a model folder that is not loaded."""
    layout = CacheLayout(
        layers=folder.layers,
        kv_heads=folder.kv_heads,
        head_dim=folder.head_dim,
        context_length=folder.context_length,
        dtype=getattr(torch, config.dtype),
        device=torch.device("cpu"),  # bytes per token are the same on any device
    )
    return longest_row(layout, config.cache_bytes)
