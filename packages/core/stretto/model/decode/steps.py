"""One decode step: its packed tokens, and writing and reading of the KV cache.

    packed tokens   [ contexts | newest of rows 3 5 7 8 9 ]
    rows            3 5 7 | 8 9        in the order of the buckets
    buckets         64      128

A layer first writes the step's KV entries, then reads: the newest token of a new row attends to context written by the
same layer. Rows are read in one of two ways::

    a a a a .       ragged   11 tokens are read, each row to its own end (CPU)
    b b . . .
    c c c c c       dense    15 tokens are read up to the longest row, those beyond a row's end masked

Axes: T packed token, W written token, R row, S slot, H query heads, K key/value heads, L tokens of a slot, D width of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from stretto.model.attention_support import Rule
from stretto.model.decode.length_buckets import Bucket
from stretto.model.kernels.compiled import computes
from stretto.model.kernels.decode_attention import ragged_attention
from stretto.model.layout import Packing
from stretto.model.packed.attention import attend_packed, attention_by_products
from stretto.model.trace import Attends

CACHED_ATTENTION = "stretto_cached"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstTokens:
    """Packed tokens that are the first KV entries of a new row."""

    place: int  # index of the row in the step
    sources: Ints


@dataclass(frozen=True)
class DecodeStep:
    """Packed tokens of a step: contexts first, then the newest token of every row."""

    token_ids: Ints  # [T]
    positions: Ints  # [T], position of each token in its row
    contexts: Packing | None  # None in most steps
    buckets: tuple[Bucket, ...]  # buckets whose slots are the rows of the step, in this order
    entering: tuple[FirstTokens, ...]

    @property
    def rows(self) -> int:
        return sum(len(bucket.owners) for bucket in self.buckets)

    @property
    def start(self) -> int:
        """Index of the first newest token."""
        return len(self.token_ids) - self.rows

    @property
    def newest(self) -> Ints:
        """[R], position of each row's newest token."""
        return self.positions[self.start :]


@dataclass(frozen=True)
class StepPlan:
    """Attention of one step, planned once for all layers."""

    contexts: Packing | None
    rows: tuple[Attends, ...]  # each takes [T, H, D] and [T, K, D], and writes the KV entries of its rows first

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Attend: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
        q_THD, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
        parts = [rows.attend(layer, q_THD, k_TKD, v_TKD, rule) for rows in self.rows]
        if self.contexts is not None:
            q, k, v = (x[:, :, : self.contexts.tokens] for x in (query, key, value))
            parts.insert(0, attend_packed(q, k, v, self.contexts, rule)[0])
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretto_step: StepPlan,
    **requested: Any,
) -> tuple[Tensor, None]:
    """`StepPlan.attend` with the signature of a transformers attention function; `check_attention` must have accepted
    the model."""
    return stretto_step.attend(cast(int, module.layer_idx), query, key, value, Rule.of(requested)), None


# transformers makes no mask for an unknown name, which saves its search for packed sequences.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)


@dataclass(frozen=True)
class Ragged:
    """Reads each row to its own end: row r attends to the tokens before ``ends[r]``."""

    ends: Ints

    def attend(
        self,
        query_RHD: Tensor,
        keys_SKLD: Tensor,
        values_SKLD: Tensor,
        rule: Rule,
        newest: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`newest`: key and value [R, K, D] of each row's last token, to be written first; None: they are written."""
        return ragged_attention(query_RHD, keys_SKLD, values_SKLD, self.ends, rule, newest)


@dataclass(frozen=True)
class AttentionWindow:
    """Cached tokens from `first` to before `end`, read by rows in layers of one window."""

    first: int
    end: int
    bias: Tensor  # [R, 1, 1, end - first]: 0, or -inf where masked


@dataclass(frozen=True)
class Dense:
    """Reads all rows up to the longest, with a mask."""

    windows: Mapping[int | None, AttentionWindow]  # by layer window

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        window = self.windows[rule.window]
        rows, heads, width = query_RHD.shape
        # The query heads of a key head are treated as a longer query, so keys are not copied per head.
        query = query_RHD.reshape(rows, keys_SKLD.shape[1], -1, width)
        keys, values = (x[:rows, :, window.first : window.end] for x in (keys_SKLD, values_SKLD))
        if rule.softcap is not None:
            out = attention_by_products(query, keys, values, window.bias, rule.softcap, rule.scaling)
        else:
            bias = window.bias
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=rule.scaling)
        return out.reshape(rows, heads, width)


#: The way to read a bucket's rows, for all layers of a step.
Reading = Ragged | Dense


def reading(newest: Ints, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype) -> Reading:
    """Choose `Ragged` or `Dense` for rows with newest tokens at these positions, in layers with these windows."""
    if computes(device, dtype):
        return Ragged(newest + 1)
    positions = torch.from_numpy(newest).to(device)
    return Dense({window: attention_window(newest, positions, window, dtype) for window in windows})


def attention_window(newest: Ints, positions: Tensor, window: int | None, dtype: torch.dtype) -> AttentionWindow:
    """The window for rows that attend to positions p with newest - window < p <= newest."""
    end = int(newest.max()) + 1
    first = 0 if window is None else max(0, int(newest.min()) - window + 1)
    places = torch.arange(first, end, device=positions.device)
    hidden = places > positions[:, None]
    if window is not None and window < end:
        hidden |= places <= positions[:, None] - window
    bias = positions.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return AttentionWindow(first, end, bias[:, None, None])


@dataclass(frozen=True)
class BucketRows:
    """Rows of one bucket."""

    bucket: Bucket
    newest: slice  # packed tokens
    sources: Tensor | slice  # [W] packed tokens whose KV entries are written
    cells: Tensor  # [W * K] target cells, one for each key head
    reading: Reading

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        keys, values = self.bucket.keys[layer], self.bucket.values[layer]
        if isinstance(self.reading, Ragged) and isinstance(self.sources, slice):
            newest = k_TKD[self.newest], v_TKD[self.newest]
            return self.reading.attend(q_THD[self.newest], keys, values, rule, newest)
        for cache, new_TKD in ((keys, k_TKD), (values, v_TKD)):
            sliced = isinstance(self.sources, slice)
            written = new_TKD[self.sources] if sliced else new_TKD.index_select(0, cast(Tensor, self.sources))
            # Indexed as rows of the whole cache: by slot and position takes twice as long.
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.cells, written.flatten(0, 1))
        return self.reading.attend(q_THD[self.newest], keys, values, rule)


def plan_by_bucket(
    step: DecodeStep, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype
) -> StepPlan:
    """A plan that handles one bucket after the other; for any device."""

    def rows_of(bucket: Bucket, start: int, newest: Ints, entering: list[tuple[int, Ints]]) -> BucketRows:
        own = slice(start, start + len(newest))
        sources: Tensor | slice = own
        slots, places = np.arange(len(newest)), newest
        if entering:
            new = np.stack([np.arange(own.start, own.stop), slots, newest])
            written, slots, places = np.concatenate([*(written_tokens(*one) for one in entering), new], axis=1)
            sources = torch.from_numpy(written).to(device)
        cells = torch.from_numpy(bucket.cells(slots, places)).to(device)
        return BucketRows(bucket, own, sources, cells, reading(newest, windows, device, dtype))

    def by_bucket() -> Iterator[BucketRows]:
        first = 0
        for bucket in step.buckets:
            end = first + len(bucket.owners)
            entering = [(row.place - first, row.sources) for row in step.entering if first <= row.place < end]
            yield rows_of(bucket, step.start + first, step.newest[first:end], entering)
            first = end

    return StepPlan(step.contexts, tuple(by_bucket()))


def written_tokens(slot: int, sources: Ints) -> Ints:
    """[3, W]: packed tokens to write, their slot (or row), and their positions in it."""
    return np.stack([sources, np.full(len(sources), slot), np.arange(len(sources))])
