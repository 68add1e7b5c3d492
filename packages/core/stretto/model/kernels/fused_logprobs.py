"""Log-probabilities of chosen tokens, and entropies of their distributions, with a single [N, V] tensor in memory.

torch's log-softmax and gather need four such tensors: logits, log-softmax, and the gradients of both. Here the logits
are overwritten by their gradient, block by block, with z = logits / temperature:

    d log p(c) / d z_j = [j = c] - p_j,      d H / d z_j = - p_j (log p_j + H)

Axes: N chosen token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

#: Logits per block; they fit the CPU cache.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, chosen_N: Tensor, entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        logprobs_N = torch.empty(len(chosen_N), dtype=torch.float32, device=logits_NV.device)
        sums_N, entropy_N = torch.empty_like(logprobs_N), torch.zeros_like(logprobs_N)
        for rows in _blocks(logits_NV):
            z = logits_NV[rows].float()
            z = z if temperature == 1.0 else z / temperature
            highest = z.amax(-1, keepdim=True)
            below = z - highest  # at most 0
            chosen = below.gather(1, chosen_N[rows, None])[:, 0]
            weights = below.exp()
            total = weights.sum(-1)
            logprobs_N[rows] = chosen - total.log()
            sums_N[rows] = highest[:, 0] + total.log()
            if entropy:
                entropy_N[rows] = total.log() - weights.mul_(below).sum(-1) / total
        ctx.save_for_backward(logits_NV, chosen_N, sums_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits_NV, chosen_N, sums_N, entropy_N = ctx.saved_tensors
        if grad_N is None:
            grad_N = torch.zeros_like(sums_N)
        for rows in _blocks(logits_NV):
            z = logits_NV[rows].float()  # of float32 the logits themselves
            if ctx.temperature != 1.0:
                z.div_(ctx.temperature)
            z.sub_(sums_N[rows, None])  # log p
            if grad_entropy_N is None:
                z.exp_().mul_(-grad_N[rows, None])
            else:
                p = z.exp()
                z.clamp_(min=-1e4)  # excluded tokens: their p is 0
                z.add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None]).add_(grad_N[rows, None])
                z.mul_(p).neg_()
            z.scatter_add_(1, chosen_N[rows, None], grad_N[rows, None])
            if ctx.temperature != 1.0:
                z.div_(ctx.temperature)
            if logits_NV.dtype != torch.float32:
                logits_NV[rows] = z.to(logits_NV.dtype)
        return logits_NV, None, None, None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK.get(logits_NV.device.type, 1 << 20) // logits_NV.shape[1])
    return (slice(first, first + rows) for first in range(0, len(logits_NV), rows))


def chosen_logprobs(
    logits_NV: Tensor, chosen_N: Tensor, *, entropy: bool, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[chosen], [N], and with `entropy` the entropies [N]; float32, differentiable
    with respect to the logits.

    The backward pass overwrites the logits, so they must not be used elsewhere. autograd refuses a second backward
    pass.
    """
    logprobs_N, entropy_N = cast(
        tuple[Tensor, Tensor],
        _Chosen.apply(logits_NV, chosen_N, entropy, temperature),  # type: ignore[no-untyped-call]
    )
    return logprobs_N, entropy_N if entropy else None
