"""The packed attention path: many sequences in one row, none of them padded, none of them seen by another.

Attention is causal, so what stands to the right of a sequence's end is never looked at: the right padding of the cells
(`stretto.model.layout`) changes nothing, and the packed forward equals the forward of each sequence alone. The
transformers module itself is driven; it finds the two functions below under the name "stretto_packed", and hands them
the `Packing` that its forward was given.

Axes: T packed token, C cell, B row of a bucket, L length of a bucket, H query head, K key/value head, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.layout import Packing

#: The name under which transformers finds the packed path (``config._attn_implementation``).
PACKED_ATTENTION = "stretto_packed"

#: Arguments by which transformers asks for attention that is not plain causal attention.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


class _ToCells(torch.autograd.Function):
    """Gather tokens into cells.

    The gradient is a gather too: a token has one cell of its own, and padding cells have no gradient. Only the cells of
    borrowed tokens are added up.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return tokens.index_select(0, packing.token_of_cell)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        packing: Packing = ctx.packing
        tokens = gradient.index_select(0, packing.cell_of_token)
        if packing.borrows:
            tokens.index_add_(0, packing.borrowed_tokens, gradient.index_select(0, packing.borrowed_cells))
        return tokens, None


class _ToTokens(torch.autograd.Function):
    """Gather cells into tokens; padding and borrowed cells are dropped and have no gradient."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return cells.index_select(0, packing.cell_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        packing: Packing = ctx.packing
        cells = gradient.new_zeros((len(packing.token_of_cell), *gradient.shape[1:]))
        return cells.index_copy_(0, packing.cell_of_token, gradient), None


def _to_cells(tokens: Tensor, packing: Packing) -> Tensor:
    return cast(Tensor, _ToCells.apply(tokens, packing))  # type: ignore[no-untyped-call]


def _to_tokens(cells: Tensor, packing: Packing) -> Tensor:
    return cast(Tensor, _ToTokens.apply(cells, packing))  # type: ignore[no-untyped-call]


def _bucketed(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, scaling: float | None, dropout: float
) -> Tensor:
    """Causal attention bucket by bucket: one gather in, one gather out, dense attention between. Any device."""
    sizes = [rows * length for rows, length in packing.buckets]
    columns = [_to_cells(x, packing).split(sizes) for x in (query_THD, key_TKD, value_TKD)]
    attended = []
    for (rows, length), *cells in zip(packing.buckets, *columns, strict=True):
        query, key, value = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in cells)
        out_BHLD = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        attended.append(out_BHLD.transpose(1, 2).reshape(rows * length, *query_THD.shape[1:]))
    return _to_tokens(torch.cat(attended), packing)


def _flash(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Flash attention over the packed row itself; CUDA and half precision only."""
    boundaries = packing.boundaries()
    return cast(
        Tensor,
        varlen.varlen_attn(
            query_THD,
            key_TKD,
            value_TKD,
            boundaries,
            boundaries,
            packing.longest,
            packing.longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        ),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D].

    Raises:
        ModelFolderError: the layer asks for attention that is not plain causal attention.
    """
    asked = [name for name in _UNSUPPORTED if rest.get(name) is not None]
    if sliding_window is not None and sliding_window < packing.longest:
        asked.append(f"sliding_window = {sliding_window} below the longest sequence, {packing.longest}")
    if asked:
        place = type(module).__name__
        raise ModelFolderError([Problem(place, ", ".join(asked), "the packed path knows plain causal attention only")])
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    flash = value.is_cuda and value.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0
    if flash and not packing.borrows:
        return _flash(query_THD, key_TKD, value_TKD, packing, scaling)[None], None
    return _bucketed(query_THD, key_TKD, value_TKD, packing, scaling, dropout)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The packed path needs no mask tensor: boundaries are in the `Packing`."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
