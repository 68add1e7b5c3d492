"""Linear layers that use the fastest measured kernel (`stretto.model.kernels.choice`).

`use_onednn` only replaces the class of a model's linear layers; parameters, names and saved files stay the same. For
trainers, oneDNN's float32 products are differentiable; on some CPUs forward and backward passes are up to twice as fast
as with MKL.

Axes: T token, K input width, N output width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.model.kernels.choice import GENERATION, SHARED, Kernel, KernelChoice, Name, Shape, choose, prepare, product

#: Chooses a kernel for each weight shape; same arguments as `stretto.model.kernels.choice.choose`.
Chooser = Callable[[Sequence[Shape], torch.dtype, Sequence[Name]], dict[Shape, KernelChoice]]


_PLACES = ("cpu", "meta")  # devices of layers to replace; models on the meta device are filled later, on the CPU


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
    """gradᵀ · x, [N, K]. oneDNN is faster if the wider operand is on the right."""
    if grad_TN.shape[1] <= x_TK.shape[1]:
        return product(grad_TN.t(), x_TK.t())
    return product(x_TK.t(), grad_TN.t()).t()


class OneDnnLinear(nn.Linear):
    """A linear layer that uses its chosen `kernel` on the CPU, and works like `nn.Linear` on other devices."""

    kernel: Kernel

    def forward(self, x: Tensor) -> Tensor:
        tokens, kernel = x.numel() // self.in_features, self.kernel
        if kernel.of_torch or tokens < kernel.choice.fewest or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if x.device.type != "cpu" or x.dtype != kernel.dtype or self.weight.dtype != kernel.dtype:
            return super().forward(x)
        if not torch.is_grad_enabled():  # avoids autograd's bookkeeping, which matters in a decode step
            return kernel.multiply_many(x, self.weight, self.bias)
        if kernel.choice.kernel != "onednn":
            return super().forward(x)
        y = _Linear.apply(x.reshape(tokens, self.in_features), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)


def use_onednn(model: nn.Module, kernels: Sequence[Name] = GENERATION, chooser: Chooser = choose) -> int:
    """Make every plain `nn.Linear` of the model use its fastest kernel, in place; returns the number of changed layers.

    `kernels`: kernels to choose from. If ``columns`` is among them, weights may change their memory layout. `chooser`:
    chooses a kernel for each weight shape.
    """
    layers = [
        module for module in model.modules() if type(module) is nn.Linear and module.weight.device.type in _PLACES
    ]
    readers = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    kinds: dict[tuple[torch.dtype, tuple[Name, ...]], list[nn.Linear]] = {}
    for layer in layers:
        offered = [kernel for kernel in kernels if kernel in SHARED or readers[id(layer.weight)] == 1]
        kinds.setdefault((layer.weight.dtype, tuple(offered)), []).append(layer)
    for (dtype, offer), alike in kinds.items():
        chosen = chooser(sorted({(one.out_features, one.in_features) for one in alike}), dtype, offer)
        for layer in alike:
            choice = chosen.get((layer.out_features, layer.in_features), KernelChoice())
            if choice.kernel == "columns":
                layer.weight.data = prepare("columns", layer.weight.data)
            layer.__class__ = OneDnnLinear
            cast(OneDnnLinear, layer).kernel = Kernel(choice, dtype)
    return len(layers)


@contextmanager
def plain(model: nn.Module) -> Iterator[dict[int, Kernel]]:
    """Context manager: the model's linear layers are plain `nn.Linear` during the block. Yields their kernels by
    ``id`` of the weight."""
    layers: list[nn.Linear] = [module for module in model.modules() if isinstance(module, OneDnnLinear)]
    kernels = {id(layer.weight): cast(OneDnnLinear, layer).kernel for layer in layers}
    try:
        for layer in layers:
            layer.__class__ = nn.Linear
        yield kernels
    finally:
        for layer in layers:
            layer.__class__ = OneDnnLinear
