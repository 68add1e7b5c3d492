"""A text that is computed piece by piece, so that neither its logits nor its activations are in memory at once.

    piece 0   a b c        attends to  a b c
    piece 1   d e f                    a b c d e f
    piece 2   g . .                    a b c d e f g        filler tokens are behind all tokens of the text

Axes: T token of a piece, E token up to the end of the piece, H query heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.packed.attention import attend_last
from stretto_kernels.rule import Rule


class TextCache:
    """The KV entries of one text, of the pieces so far; implements `stretto_kernels.steps.trace.Attends`. `tokens`:
    number of tokens in these pieces; the caller adds those of a piece after its last layer."""

    def __init__(self, layout: CacheLayout, tokens: int) -> None:
        """Make room for a text of this many tokens, and for the filler of a piece (`model.layout.round_length`)."""
        shape = (1, layout.kv_heads, tokens + tokens // 16, layout.head_dim)
        self._keys, self._values = (
            [torch.empty(shape, dtype=layout.dtype, device=layout.device) for _ in range(layout.layers)]
            for _ in ("keys", "values")
        )
        self.tokens = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Write the KV entries of the next piece in layer `layer`, and attend from each of its tokens to itself and
        earlier ones (in `rule`'s window): query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
        count = key.shape[2]
        end = self.tokens + count
        first = 0 if rule.window is None else max(0, self.tokens + 1 - rule.window)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.tokens : end], values[:, :, self.tokens : end] = key, value
        return attend_last(query, keys[:, :, first:end], values[:, :, first:end], rule)
