"""The packed attention path: many sequences in one row, without padding and without attending to each other.

Attention is causal, so the right padding of the cells (`stretto.model.layout`) has no effect, and the packed forward
equals the forward of each sequence alone. The transformers module is used unchanged: it finds `packed_attention` under
the name "stretto_packed", and passes it the `Packing` given to its forward. It makes no mask, since none of its
functions for masks has this name.

Axes: T packed token, C cell, B row of a bucket, L length of a bucket or of its queries, E of its keys, H query head, K
key/value head, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.attention_support import UNSUPPORTED
from stretto.model.layout import Packing, RowPart
from stretto_kernels.rule import Rule

#: Name of the packed path in transformers (``config._attn_implementation``).
PACKED_ATTENTION = "stretto_packed"

#: Lengths of buckets, and least number of rows, for which attention is faster as two matmuls.
LENGTHS_BY_PRODUCTS = range(16, 65)
FEWEST_BY_PRODUCTS = 4

#: Up to this number, sequences are computed one by one, which is cheaper than gathering them into cells.
FEW_SEQUENCES = 3

#: Most scores in memory at once where no fused kernel computes them (soft caps): 1 GiB in float32.
SCORES = 1 << 28

_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH, _GRAIN_FLASH = 256, 8  # head sizes of flash attention


class _ToCells(torch.autograd.Function):
    """Gather the values of tokens into cells, the places of the padded batches (`Packing`).

    The gradient is a gather too: each token has one own cell, and padding cells have no gradient. Only the gradients of
    shared cells are added up.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return tokens.index_select(0, packing.token_of_cell)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        packing: Packing = ctx.packing
        tokens = gradient.index_select(0, packing.cell_of_token)
        if packing.shares_prefixes:
            tokens.index_add_(0, packing.shared_tokens, gradient.index_select(0, packing.shared_cells))
        return tokens, None


class _ToTokens(torch.autograd.Function):
    """Gather the values of cells (`_ToCells`) back into tokens. Padding cells and shared cells are dropped and have no
    gradient."""

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


def attention_by_products(
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    hidden_LL: Tensor,
    softcap: float | None,
    scaling: float | None,
) -> Tensor:
    """Compute attention as two matmuls with a softmax between, [B, H, L, D].

    With a `softcap`, scores first become ``softcap * tanh(score / softcap)`` (Gemma 2). There may be one key head for
    several query heads. `hidden_LL`: added to the scores, -inf where masked. `scaling`: factor of the scores; None:
    1 / sqrt(D).
    """
    scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query_BHLD * scale) @ key_BHLD.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (scores + hidden_LL).softmax(-1, dtype=torch.float32)
    return weights.to(query_BHLD.dtype) @ value_BHLD


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask [queries, keys] (bool), true where a query (row) sees a token (column): itself and earlier tokens
    within the window (None: all). `queries`, `keys`: their numbers; the queries are the last tokens."""
    places = torch.arange(keys, device=device)
    behind = places[keys - queries :, None] - places[None, :]
    return (behind >= 0) & (behind < (keys if window is None else window))


def _in_bucket(query_BHLD: Tensor, key_BKED: Tensor, value_BKED: Tensor, rule: Rule) -> Tensor:
    """Compute the causal attention of B sequences, padded to one length E, for their last L tokens: [B, H, L, D]."""
    rows, heads, length, width = query_BHLD.shape
    kv_heads, end = key_BKED.shape[1:3]
    if rule.softcap is not None or _quicker_by_products(query_BHLD):
        seen = _seen(length, end, rule.window, query_BHLD.device)
        hidden = torch.zeros_like(seen, dtype=query_BHLD.dtype).masked_fill_(~seen, -torch.inf)
        grouped = query_BHLD.reshape(rows, kv_heads, heads // kv_heads, length, width)
        keys, values = key_BKED[:, :, None], value_BKED[:, :, None]
        return _by_blocks(grouped, keys, values, hidden, rule).flatten(1, 2)
    masked = length < end or (rule.window is not None and rule.window < end)
    if heads != kv_heads and not _shares_heads(query_BHLD, masked):
        key_BKED, value_BKED = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key_BKED, value_BKED))
    return functional.scaled_dot_product_attention(
        query_BHLD,
        key_BKED,
        value_BKED,
        attn_mask=_seen(length, end, rule.window, query_BHLD.device) if masked else None,
        is_causal=not masked,
        dropout_p=rule.dropout,
        scale=rule.scaling,
        enable_gqa=heads != key_BKED.shape[1],
    )


def _shares_heads(query: Tensor, masked: bool) -> bool:
    """Whether torch has a fused kernel in which query heads share a key head. On a GPU only flash attention does, which
    takes half precision without a mask; the others would fall back to all scores at once, H x L x L."""
    return query.device.type == "cpu" or (query.dtype in _HALF and not masked and _flash_takes(query.shape[-1]))


def _flash_takes(width: int) -> bool:
    """Whether flash attention has a kernel for heads of this width."""
    return width <= _WIDEST_FLASH and width % _GRAIN_FLASH == 0


def _by_blocks(query: Tensor, keys: Tensor, values: Tensor, hidden_LE: Tensor, rule: Rule) -> Tensor:
    """Compute `attention_by_products` block by block of the queries, so that at most `SCORES` scores are in memory,
    also in the backward pass. G: query heads of a key head; returns [B, K, G, L, D]."""
    rows, kv_heads, group, length, _ = query.shape
    block = max(1, SCORES // (rows * kv_heads * group * keys.shape[-2]))
    if block >= length:
        return attention_by_products(query, keys, values, hidden_LE, rule.softcap, rule.scaling)
    parts = [
        checkpoint(attention_by_products, part, keys, values, hidden, rule.softcap, rule.scaling, use_reentrant=False)
        for part, hidden in zip(query.split(block, dim=-2), hidden_LE.split(block), strict=True)
    ]
    return torch.cat(parts, dim=-2)


def _quicker_by_products(query_BHLD: Tensor) -> bool:
    """Whether two matmuls are faster than one fused kernel. False while gradients are enabled, because the limits were
    measured for engines."""
    short = query_BHLD.shape[2] in LENGTHS_BY_PRODUCTS and query_BHLD.shape[0] >= FEWEST_BY_PRODUCTS
    on_cpu = query_BHLD.device.type == "cpu" and query_BHLD.dtype == torch.float32
    return short and on_cpu and not torch.is_grad_enabled()


def _one_by_one(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """Compute the causal attention of a few sequences without shared prefixes, [T, H, D]. Sequences are slices of the
    row, so no gathers are needed."""
    columns = [x.split(packing.lengths) for x in (query_THD, key_TKD, value_TKD)]
    attended = []
    for sequence in zip(*columns, strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in sequence)
        attended.append(_in_bucket(query, key, value, rule)[0].transpose(0, 1))
    return torch.cat(attended)


def bucketed(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """Compute causal attention bucket by bucket, [T, H, D]: gather into cells, dense attention, gather back; a few
    sequences without shared prefixes one by one. For any device."""
    if len(packing.lengths) <= FEW_SEQUENCES and not packing.shares_prefixes:
        return _one_by_one(query_THD, key_TKD, value_TKD, packing, rule)
    sizes = [rows * length for rows, length in packing.buckets]
    columns = [_to_cells(x, packing).split(sizes) for x in (query_THD, key_TKD, value_TKD)]
    attended = []
    for (rows, length), *cells in zip(packing.buckets, *columns, strict=True):
        query, key, value = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in cells)
        out_BHLD = _in_bucket(query, key, value, rule)
        attended.append(out_BHLD.transpose(1, 2).reshape(rows * length, *query_THD.shape[1:]))
    return _to_tokens(torch.cat(attended), packing)


def _flash(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """Compute flash attention over the packed row without padding, [T, H, D]. Only for CUDA, half precision, head
    widths of `_flash_takes`, and without shared prefixes, soft cap or dropout."""
    boundaries, window = packing.boundaries, rule.window
    # What `torch.nn.attention.varlen` calls; its own layer takes longer than the forward pass of short sequences.
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query_THD,
        key_TKD,
        value_TKD,
        boundaries,
        boundaries,
        packing.longest,
        packing.longest,
        0.0,  # dropout
        window is None,  # causal; with a window its right end is the query's token
        False,
        scale=rule.scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0]
    return attended


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    part: RowPart | None = None,
    **requested: Any,
) -> tuple[Tensor, None]:
    """Call `attend_packed` with the signature of a transformers attention function. `part`: the tokens of this rank if
    several ranks divide the row, else None. `attention_mask` is not read. Raises ModelFolderError if the layer requests
    unsupported attention (`stretto.model.attention_support`)."""
    if unsupported := [name for name in UNSUPPORTED if requested.get(name) is not None]:
        place = type(module).__name__
        raise ModelFolderError([Problem(place, ", ".join(unsupported), "the packed path does not compute this")])
    if part is None:
        return attend_packed(query, key, value, packing, Rule.of(requested)), None
    query, key, value = part.to_heads((query.to(value.dtype), key.to(value.dtype), value))
    return part.to_tokens(attend_packed(query, key, value, packing, Rule.of(requested))), None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """Compute the causal attention within each sequence of a packed row. `query`: [1, H, T, D], `key` and `value`: [1,
    K, T, D]; returns [1, T, H, D]."""
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return attend_tokens(query_THD, key_TKD, value_TKD, packing, rule)[None]


def attend_tokens(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """Compute the causal attention within each sequence of a packed row, from tensors of one dtype that lie token by
    token: query [T, H, D], key and value [T, K, D]; returns [T, H, D]."""
    plain = rule.dropout == 0.0 and rule.softcap is None and not packing.shares_prefixes
    flash = plain and value_TKD.is_cuda and value_TKD.dtype in _HALF and _flash_takes(value_TKD.shape[-1])
    return (_flash if flash else bucketed)(query_THD, key_TKD, value_TKD, packing, rule)


def attend_last(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Compute the causal attention for the last T of the E tokens of one sequence. `query`: [1, H, T, D], `key` and
    `value`: [1, K, E, D]; returns [1, T, H, D]."""
    return _in_bucket(query.to(value.dtype), key, value, rule).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
