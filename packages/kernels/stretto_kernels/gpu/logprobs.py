"""Log-probabilities and entropies of rows of logits, and their gradient in the place of the logits, on a GPU (Triton).

    score    row                 reads the row's logits once: largest logit, mass, chosen logit, entropy
    back     row x block         reads each logit once, and writes its gradient over it

Logits are read in their own dtype; all arithmetic is float32. Sums run over lanes of a block, from block to block, and
are added up at the end. TRITON_INTERPRET=1 runs the kernels on the CPU.

`head_logprobs` computes the logits too, in chunks of rows: the output matrix is cast once, the logits of a chunk are
computed again in the backward pass, and the gradient of the matrix is summed over the chunks in float32.

Axes: N row, V vocabulary, B token of a block, W width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stretto_kernels.gpu.launching import kernel, launches_on, tl

_BLOCK, _WARPS = 4096, 8
_LOWEST: Any = -1e4 if tl is None else tl.constexpr(-1e4)  # a lower log-ratio has the probability 0 in float32
_FIRST: Any = -3.0e38 if tl is None else tl.constexpr(-3.0e38)  # below every logit that may be drawn


def computes(logits_NV: Tensor) -> bool:
    """Whether the kernels can be used for these logits: contiguous, on a GPU of Ampere or newer. False in Triton's
    interpreter."""
    return launches_on(logits_NV.device) and logits_NV.is_contiguous()


@kernel
def _score(
    logits: tl.tensor,
    chosen: tl.tensor,
    logprobs: tl.tensor,
    sums: tl.tensor,
    entropies: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    WARMED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program n reads row n, and writes what `score` returns for it. NaN among the logits gives NaN. `WARMED`: logits
    are divided by the temperature."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * vocabulary
    lanes_B = tl.arange(0, BLOCK)
    top = tl.full((), _FIRST, tl.float32)
    # Sums of p and p log p, times mass.
    mass_B, drift_B = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        columns_B = first + lanes_B
        z_B = tl.load(start + columns_B, mask=columns_B < vocabulary, other=float("-inf")).to(tl.float32)
        if WARMED:
            z_B = z_B / temperature
        new = tl.maximum(top, tl.max(z_B))
        fall = tl.maximum(top - new, _LOWEST)
        kept, below_B = tl.exp(fall), z_B - new
        weights_B = tl.exp(below_B)
        if ENTROPY:
            drift_B = (drift_B + mass_B * fall) * kept + weights_B * tl.maximum(below_B, _LOWEST)
        mass_B = mass_B * kept + weights_B
        top = new
    z = tl.load(start + tl.load(chosen + row)).to(tl.float32)
    if WARMED:
        z = z / temperature
    mass = tl.sum(mass_B)
    tl.store(logprobs + row, (z - top) - tl.log(mass))
    tl.store(sums + row, top + tl.log(mass))
    if ENTROPY:
        tl.store(entropies + row, tl.log(mass) - tl.sum(drift_B) / mass)


@kernel
def _back(
    logits: tl.tensor,
    chosen: tl.tensor,
    sums: tl.tensor,
    entropies: tl.tensor,
    grad: tl.tensor,
    grad_entropy: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    WARMED: tl.constexpr,
    CHOSEN: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, b) writes the gradient of a block of row n over its logits. `CHOSEN`: log-probabilities have a
    gradient; `ENTROPY`: entropies have one."""
    row, columns_B = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at_B, real_B = row.to(tl.int64) * vocabulary + columns_B, columns_B < vocabulary
    z_B = tl.load(logits + at_B, mask=real_B, other=float("-inf")).to(tl.float32)
    if WARMED:
        z_B = z_B / temperature
    z_B -= tl.load(sums + row)
    p_B = tl.exp(z_B)
    own = tl.load(grad + row) if CHOSEN else 0.0
    if ENTROPY:
        share_B = (tl.maximum(z_B, _LOWEST) + tl.load(entropies + row)) * tl.load(grad_entropy + row) + own
        back_B = -p_B * share_B
    else:
        back_B = -p_B * own
    back_B += tl.where(columns_B == tl.load(chosen + row), own, 0.0)
    if WARMED:
        back_B = back_B / temperature
    tl.store(logits + at_B, back_B.to(logits.dtype.element_ty), mask=real_B)


def score(logits_NV: Tensor, chosen_N: Tensor, *, entropy: bool, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each row's chosen token (an id), the logarithm of the row's sum of exponentials, and with
    `entropy` its entropy (otherwise 0); each [N], float32, of logits / temperature. NaN among a row's logits gives NaN.
    """
    rows, vocabulary = logits_NV.shape
    logprobs_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    sums_N, entropy_N = torch.empty_like(logprobs_N), torch.zeros_like(logprobs_N)
    flags = {"WARMED": temperature != 1.0, "ENTROPY": entropy, "BLOCK": _BLOCK, "num_warps": _WARPS}
    tensors = (logits_NV, chosen_N, logprobs_N, sums_N, entropy_N)
    _score[(rows,)](*tensors, vocabulary, float(temperature), **flags)
    return logprobs_N, sums_N, entropy_N


def write_gradient(
    scored: Sequence[Tensor], grad_N: Tensor | None, grad_entropy_N: Tensor | None, temperature: float
) -> None:
    """Overwrite logits, in place, by their gradient.

    Args:
        scored: the logits and the chosen tokens, as `score` got them, and its second and third result.
        grad_N: gradient of the log-probabilities; None: they have none.
        grad_entropy_N: gradient of the entropies; None: they have none. Else `score` must have computed them.
        temperature: as `score` got it.
    """
    rows, vocabulary = scored[0].shape
    kinds = {"CHOSEN": grad_N is not None, "ENTROPY": grad_entropy_N is not None}
    flags = {"WARMED": temperature != 1.0, **kinds, "BLOCK": _BLOCK, "num_warps": _WARPS}
    given = [None if one is None else one.contiguous() for one in (grad_N, grad_entropy_N)]
    _back[(rows, -(-vocabulary // _BLOCK))](*scored, *given, vocabulary, float(temperature), **flags)
    torch.autograd.graph.increment_version(scored[0])


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NW: Tensor, weight_VW: Tensor, chosen_N: Tensor, entropy: bool, temperature: float, most: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        device = hidden_NW.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VW.dtype
        narrow, weight = hidden_NW.to(dtype), weight_VW.to(dtype)
        chunks = list(zip(narrow.split(most), chosen_N.split(most), strict=True))
        scores, kept = [], list[Tensor]()
        for rows, chosen in chunks:
            logits_NV = rows @ weight.t()
            kept += [logits_NV] if len(chunks) == 1 else []
            scores.append(score(logits_NV, chosen, entropy=entropy, temperature=temperature))
            del logits_NV  # before the next chunk's
        logprobs, sums, entropies = (torch.cat(parts) for parts in zip(*scores, strict=True))
        ctx.save_for_backward(narrow, weight, chosen_N, sums, entropies, *kept)
        ctx.temperature, ctx.most, ctx.dtypes = temperature, most, (hidden_NW.dtype, weight_VW.dtype)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        narrow, weight, chosen, sums, entropies, *kept = ctx.saved_tensors
        of_hidden = torch.empty_like(narrow) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        for first in range(0, len(narrow), ctx.most):
            part = slice(first, first + ctx.most)
            rows = narrow[part]
            logits = kept[0] if kept else rows @ weight.t()
            of_logprobs, of_entropies = (None if grad is None else grad[part] for grad in (grad_N, grad_entropy_N))
            scored = (logits, chosen[part], sums[part], entropies[part])
            write_gradient(scored, of_logprobs, of_entropies, ctx.temperature)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            if ctx.needs_input_grad[1]:
                of_weight = _plus_product(of_weight, logits.t(), rows)
            del logits, scored
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if of_hidden is None else of_hidden.to(hidden_dtype),
            None if of_weight is None else of_weight.to(weight_dtype),
            *(None,) * 4,
        )


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right, written over `total` and returned; `total` None: left · right, as a new tensor. In float32
    if the factors are of half precision."""
    half = left.dtype in (torch.bfloat16, torch.float16)
    if half and left.is_cuda:  # the product itself is not rounded to half precision
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    found = (left @ right).float() if half else left @ right
    return found if total is None else total.add_(found)


def head_logprobs(
    hidden_NW: Tensor, weight_VW: Tensor, chosen_N: Tensor, *, entropy: bool, temperature: float, most: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of the chosen tokens (ids), and with `entropy` the entropies [N] (otherwise 0), from hidden
    states and the output matrix, of logits / temperature; float32, differentiable. `most`: rows of logits in memory at
    once."""
    applied = _Head.apply(hidden_NW, weight_VW, chosen_N, entropy, temperature, most)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], applied)
