"""FLOPs of a training step, and FLOPs per second of this machine.

Only the model's matmuls are counted, forward and backward, two FLOPs for each multiply-add. Recomputation and padding
do not count as work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Product = Callable[[Tensor, Tensor], Tensor]


def step_flops(model: PreTrainedModel, own_tokens: int, wanted: int, sequences: Iterable[int]) -> float:
    """FLOPs of one training step. `own_tokens` tokens go through the body, `wanted` through the output matrix; causal
    attention gets sequences of the lengths `sequences`.

    Linear layers 6 per weight and token; attention 6 L^2 per head, its width and layer (two products of half a square
    of L^2 each, forward; twice that backward).
    """
    config = model.config.get_text_config()
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    body = sum(module.weight.numel() for module in model.base_model.modules() if isinstance(module, nn.Linear))
    head = int(model.get_output_embeddings().weight.numel())
    attention = sum(length * length for length in sequences) * int(config.num_attention_heads) * width
    return 6.0 * (body * own_tokens + head * wanted + attention * int(config.num_hidden_layers))


def ceiling(dtype: torch.dtype, seconds: float = 1.0, device: torch.device | str = "cpu") -> float:
    """FLOPs per second of torch's fastest square matmul on the device; on a CPU by MKL or oneDNN."""
    on_gpu = torch.device(device).type == "cuda"
    alone = on_gpu or (dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported())
    kinds: tuple[Product, ...] = (_plain,) if alone else (_plain, _onednn)
    sizes = (4096, 8192) if on_gpu else (1024, 2048)
    share = seconds / len(kinds) / len(sizes)
    return max(_rate(product, dtype, size, share, device) for product in kinds for size in sizes)


def _rate(product: Product, dtype: torch.dtype, size: int, seconds: float, device: torch.device | str) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        float(product(left, right)[0, 0])  # waits for a GPU to be done
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _plain(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.t()


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return product
