"""How the rows of a shelf read what is cached for them: each as far as it is long, or as a rectangle up to the longest.

    rows     a a a a .        ragged   11 tokens are read, one loop over them (on the processor)
             b b . . .
             c c c c c        dense    15 tokens are read, hidden ones without weight (everything else)

Axes: R row, S slot, H query heads, K key/value heads, G = H / K, L tokens of a slot, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from stretto.model.attention_support import Rule
from stretto.model.kernels.decode_attention import computes_ragged, ragged_attention
from stretto.model.packed.attention import attention_by_products

Ints = npt.NDArray[np.int64]


class Reading(Protocol):
    """The reading of one step, for all layers."""

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        """What row r takes from slot r, [R, H, D]."""
        ...


@dataclass(frozen=True)
class Ragged:
    """Every row as far as it is long: row r sees the tokens before ``ends[r]``."""

    ends: Ints

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        return ragged_attention(query_RHD, keys_SKLD, values_SKLD, self.ends, rule)


@dataclass(frozen=True)
class AttentionWindow:
    """What the rows see in the layers of one window: cached tokens from `first` to before `end`."""

    first: int
    end: int
    bias: Tensor  # [R, 1, 1, end - first], 0 where the row sees a token, -inf where it does not


@dataclass(frozen=True)
class Dense:
    """All rows up to the longest."""

    sights: Mapping[int | None, AttentionWindow]  # by the window of a layer

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        sight = self.sights[rule.window]
        rows, heads, width = query_RHD.shape
        # The G query heads of one key head stand where a longer query would: no key is copied for them.
        query = query_RHD.reshape(rows, keys_SKLD.shape[1], -1, width)
        keys, values = (x[:rows, :, sight.first : sight.end] for x in (keys_SKLD, values_SKLD))
        if rule.softcap is not None:
            out = attention_by_products(query, keys, values, sight.bias, rule.softcap, rule.scaling)
        else:
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=sight.bias, scale=rule.scaling)
        return out.reshape(rows, heads, width)


def reading(newest: Ints, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype) -> Reading:
    """The reading of rows whose newest tokens are at these places, in layers with these windows."""
    if computes_ragged(device, dtype):
        return Ragged(newest + 1)
    positions = torch.from_numpy(newest).to(device)
    return Dense({window: _sight(newest, positions, window, dtype) for window in windows})


def _sight(newest: Ints, positions: Tensor, window: int | None, dtype: torch.dtype) -> AttentionWindow:
    """What rows whose newest tokens are at `newest` see: places p with newest - window < p <= newest."""
    end = int(newest.max()) + 1
    first = 0 if window is None else max(0, int(newest.min()) - window + 1)
    places = torch.arange(first, end, device=positions.device)
    hidden = places > positions[:, None]
    if window is not None and window < end:
        hidden |= places <= positions[:, None] - window
    bias = positions.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return AttentionWindow(first, end, bias[:, None, None])
