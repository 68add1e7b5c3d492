"""The packed attention path: many sequences in one row, none of them padded, none of them seen by another.

    tokens     a0 a1 a2 b0 b1 c0            [T]   linear layers, norms and the MLP work here: one row per token
    cells      a0 a1 a2                     [C]   attention works here: sequences of similar length side by side,
               b0 b1 ..                           padded on the right up to the longest of their bucket
               c0 (a bucket of its own)

Attention is causal, so what stands to the right of a sequence's end is never looked at: right padding changes nothing,
and the packed forward equals the forward of each sequence alone. The transformers module itself is driven; it finds
the two functions below under the name "stretto_packed", and hands them the `Packing` that its forward was given.

Axes: T packed token, C cell, B row of a bucket, L length of a bucket, H query head, K key/value head, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface

from stretto.core.errors import ModelFolderError, Problem

#: The name under which transformers finds the packed path (``config._attn_implementation``).
PACKED_ATTENTION = "stretto_packed"

#: A bucket ends where a sequence is shorter than this part of the bucket's longest.
_SHORTEST_IN_BUCKET = 0.6

#: Arguments by which transformers asks for attention that is not plain causal attention.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed row begin and end, and how attention finds them.

    Example: ``pack([3, 2, 1])`` has 6 tokens, positions ``[[0, 1, 2, 0, 1, 0]]`` and, with buckets (2 rows, 3) and
    (1 row, 1), 7 cells of which one is padding.
    """

    lengths: tuple[int, ...]
    position_ids: Tensor  # [1, T], restarting at 0 in each sequence
    buckets: tuple[tuple[int, int], ...]  # (rows, length) of each bucket, longest first
    token_of_cell: Tensor  # [C], padding cells repeat the last token of their row
    cell_of_token: Tensor  # [T]
    starts: Tensor  # [sequences + 1] int32, cumulative lengths

    @property
    def tokens(self) -> int:
        return self.position_ids.shape[1]

    @property
    def longest(self) -> int:
        return self.buckets[0][1]


def pack(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packing:
    """Lay sequences of these lengths one after the other; the index tensors serve all layers of a forward.

    Raises:
        ValueError: there is no sequence, or one is empty.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a packing holds at least one sequence, each of at least one token, not {list(lengths)}")
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    positions = torch.arange(int(ends[-1])) - starts.repeat_interleave(sizes)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    buckets = _buckets([lengths[row] for row in order])
    first_cell = torch.empty(len(lengths), dtype=torch.int64)
    token_of_cell, cells, done = [], 0, 0
    for rows, length in buckets:
        members = torch.tensor(order[done : done + rows])
        first_cell[members] = cells + torch.arange(rows) * length
        inside = torch.arange(length).minimum(sizes[members, None] - 1)
        token_of_cell.append((starts[members, None] + inside).flatten())
        cells, done = cells + rows * length, done + rows
    return Packing(
        lengths=tuple(lengths),
        position_ids=positions[None].to(device),
        buckets=buckets,
        token_of_cell=torch.cat(token_of_cell).to(device),
        cell_of_token=(first_cell.repeat_interleave(sizes) + positions).to(device),
        starts=functional.pad(ends, (1, 0)).to(device, torch.int32),
    )


def _buckets(descending: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut descending lengths into runs whose shortest is not much shorter than their longest."""
    buckets: list[tuple[int, int]] = []
    for length in descending:
        rows, longest = buckets[-1] if buckets else (0, 0)
        if rows and length >= _SHORTEST_IN_BUCKET * longest:
            buckets[-1] = (rows + 1, longest)
        else:
            buckets.append((1, length))
    return tuple(buckets)


class _ToCells(torch.autograd.Function):
    """Gather tokens into cells. The gradient is a gather too: a token has one cell, and padding cells get none."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return tokens.index_select(0, packing.token_of_cell)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.packing.cell_of_token), None


class _ToTokens(torch.autograd.Function):
    """Gather cells into tokens; padding cells are dropped and have no gradient."""

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
    return cast(
        Tensor,
        varlen.varlen_attn(
            query_THD,
            key_TKD,
            value_TKD,
            packing.starts,
            packing.starts,
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
    if value.is_cuda and value.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0:
        return _flash(query_THD, key_TKD, value_TKD, packing, scaling)[None], None
    return _bucketed(query_THD, key_TKD, value_TKD, packing, scaling, dropout)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The packed path needs no mask tensor: boundaries are in the `Packing`."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
