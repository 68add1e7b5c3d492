"""Arithmetic: how much a training step needs, and how much of it this machine can do in a second.

Counted are the products of the model alone, forward and backward, a multiplication and an addition each; what is
computed again, padded or filled up does not count as work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def step_flops(model: PreTrainedModel, own_tokens: int, wanted: int, sequences: Iterable[int]) -> float:
    """Of one training step: `own_tokens` go through the body, `wanted` through the output matrix, and causal attention
    sees sequences of these lengths.

    Linear layers 6 per weight and token; attention 6 L^2 per head, its width and layer (two products of half a square
    of L^2 each, forward; twice that backward).
    """
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    body = sum(module.weight.numel() for module in model.base_model.modules() if isinstance(module, nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    attention = sum(length * length for length in sequences) * config.num_attention_heads * width
    return 6.0 * (body * own_tokens + head * wanted + attention * config.num_hidden_layers)


def ceiling(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Operations per second of the fastest square product that torch offers here, by MKL or by oneDNN."""
    return max(_rate(product, dtype, size, seconds / 4) for product in (_plain, _onednn) for size in (1024, 2048))


def _rate(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, size: int, seconds: float) -> float:
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    product(left, right)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        product(left, right)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _plain(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.t()


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return product
