"""Float32 products on the processor through oneDNN.

torch's default float32 product is MKL, which leaves AVX-512 unused on some processors: oneDNN is 2.1 times as fast in
the forward pass and for the gradient of the input, 1.3 to 2 times for the gradient of the weight (64 to 768 wide, 2,048
tokens, one core). Both compute in float32; their results differ by rounding only.

`use_onednn` replaces the class of a model's linear layers and of nothing else, so that parameters, names and saved
files stay what they were.

Axes: T token, K input width, N output width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

#: Below this many multiplications a product is too small to be worth oneDNN's longer call. One token times a large
#: weight is worth it: that reads the weight from memory at 1.5 times MKL's pace.
FEWEST_MULTIPLICATIONS = 3 << 18


def product(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """left · rightᵀ + bias, [M, N]; either may be a transposed view."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], ""))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return product(x_TK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_TN = grad_TN.contiguous()
        grad_x = product(grad_TN, weight_NK.t().contiguous()) if needs_x else None
        grad_weight = _weight_gradient(grad_TN, x_TK) if needs_weight else None
        return grad_x, grad_weight, grad_TN.sum(0) if needs_bias else None


def _weight_gradient(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """gradᵀ · x, [N, K]. oneDNN is quicker when the right operand is the wider one."""
    if grad_TN.shape[1] <= x_TK.shape[1]:
        return product(grad_TN.t(), x_TK.t())
    return product(x_TK.t(), grad_TN.t()).t()


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies by oneDNN in float32 on the processor, and like `nn.Linear` everywhere else."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.numel() // self.in_features
        plain = x.device.type != "cpu" or x.dtype != torch.float32 or self.weight.dtype != torch.float32
        small = tokens * self.weight.numel() < FEWEST_MULTIPLICATIONS
        if plain or small or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if not torch.is_grad_enabled():  # spares the bookkeeping of autograd, which counts in a decode step
            return product(x, self.weight, self.bias)
        y = _Linear.apply(x.reshape(tokens, self.in_features), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)


def use_onednn(model: nn.Module) -> int:
    """Let every plain `nn.Linear` of the model multiply by oneDNN; returns how many (0 where torch has no oneDNN)."""
    if not torch.backends.mkldnn.is_available():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    return len(layers)
