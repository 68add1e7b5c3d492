"""One decode step: its packed tokens, and how its rows write and read the KV cache.

    packed tokens   [ contexts | newest of rows 3 5 7 8 9 ]
    rows            3 5 7 | 8 9        in the order of the buckets
    buckets         64      128

Within a layer the KV entries of the step are written first, then read: the newest token of a row that has just
entered attends to the context that the same layer has written. Rows are read in one of two ways::

    a a a a .       ragged   11 tokens are read, each row to its own end (CPU)
    b b . . .
    c c c c c       dense    15 tokens are read up to the longest row, those beyond a row's end masked

Axes: T packed token, W written token, R row, S slot, H query heads, K key/value heads, L tokens of a slot, D width of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from stretto.model.attention_support import Rule
from stretto.model.decode.length_buckets import Bucket
from stretto.model.kernels.decode_attention import computes_ragged, ragged_attention
from stretto.model.layout import Packing
from stretto.model.packed.attention import attend_packed, attention_by_products

CACHED_ATTENTION = "stretto_cached"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstTokens:
    """The packed tokens whose KV entries are the first of a row."""

    place: int  # of the row in the step
    sources: Ints


@dataclass(frozen=True)
class DecodeStep:
    """The packed tokens of a step, contexts first, then the newest token of every row."""

    token_ids: Ints  # [T]
    positions: Ints  # [T], each in its row
    contexts: Packing | None  # None in most steps
    buckets: tuple[Bucket, ...]  # their slots are the rows of the step, one bucket after the other
    entering: tuple[FirstTokens, ...]

    @property
    def rows(self) -> int:
        return sum(len(bucket.owners) for bucket in self.buckets)

    @property
    def start(self) -> int:
        """The index of the first newest token."""
        return len(self.token_ids) - self.rows

    @property
    def newest(self) -> Ints:
        """[R], the position of each row's newest token."""
        return self.positions[self.start :]


class StepRows(Protocol):
    """Some rows of a step, in all layers."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        """Write what the step adds to these rows, then attend from their newest tokens, [rows, H, D]."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """The attention of one step, planned once for all layers."""

    contexts: Packing | None
    rows: tuple[StepRows, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
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
    """`StepPlan.attend` as a transformers module calls it; `check_attention` has accepted what it requests."""
    return stretto_step.attend(cast(int, module.layer_idx), query, key, value, Rule.of(requested)), None


# Without a mask function of this name transformers makes no mask, which spares a search for packed sequences.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)


@dataclass(frozen=True)
class Ragged:
    """Row r attends to the tokens before ``ends[r]``."""

    ends: Ints

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        return ragged_attention(query_RHD, keys_SKLD, values_SKLD, self.ends, rule)


@dataclass(frozen=True)
class AttentionWindow:
    """The cached tokens, `first` to before `end`, that rows attend to in layers of one window."""

    first: int
    end: int
    bias: Tensor  # [R, 1, 1, end - first]: 0, or -inf where masked


@dataclass(frozen=True)
class Dense:
    """All rows up to the longest."""

    windows: Mapping[int | None, AttentionWindow]  # by the window of a layer

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        window = self.windows[rule.window]
        rows, heads, width = query_RHD.shape
        # The query heads of a key head take the place of a longer query, so no key is copied for them.
        query = query_RHD.reshape(rows, keys_SKLD.shape[1], -1, width)
        keys, values = (x[:rows, :, window.first : window.end] for x in (keys_SKLD, values_SKLD))
        if rule.softcap is not None:
            out = attention_by_products(query, keys, values, window.bias, rule.softcap, rule.scaling)
        else:
            bias = window.bias
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=rule.scaling)
        return out.reshape(rows, heads, width)


#: How the rows of a bucket are read, for all layers of a step.
Reading = Ragged | Dense


def reading(newest: Ints, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype) -> Reading:
    """How to read rows whose newest tokens are at these positions, in layers with these windows."""
    if computes_ragged(device, dtype):
        return Ragged(newest + 1)
    positions = torch.from_numpy(newest).to(device)
    return Dense({window: attention_window(newest, positions, window, dtype) for window in windows})


def attention_window(newest: Ints, positions: Tensor, window: int | None, dtype: torch.dtype) -> AttentionWindow:
    """Position p is attended to by a row with newest - window < p <= newest."""
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
    """The rows of one bucket."""

    bucket: Bucket
    newest: slice  # packed tokens
    sources: Tensor | slice  # [W] packed tokens whose KV entries are written
    cells: Tensor  # [W * K] where they are written, one cell for each key head
    reading: Reading

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        keys, values = self.bucket.keys[layer], self.bucket.values[layer]
        for cache, new_TKD in ((keys, k_TKD), (values, v_TKD)):
            sliced = isinstance(self.sources, slice)
            written = new_TKD[self.sources] if sliced else new_TKD.index_select(0, cast(Tensor, self.sources))
            # As rows of the whole cache: writing by slot and position takes twice as long.
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.cells, written.flatten(0, 1))
        return self.reading.attend(q_THD[self.newest], keys, values, rule)


def plan_by_bucket(
    step: DecodeStep, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype
) -> StepPlan:
    """A plan that writes and reads one bucket after the other; for any device."""

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
    """[3, W]: the packed tokens that are written, their slot (or row), and their positions in it."""
    return np.stack([sources, np.full(len(sources), slot), np.arange(len(sources))])
