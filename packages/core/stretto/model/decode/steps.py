"""One decode step: its packed tokens, and how it writes and reads the KV cache.

    packed tokens   [ contexts | newest of rows 3 5 7 8 9 ]
    rows            3 5 7 | 8 9        in the order of the buckets
    buckets         64      128

A layer first writes the step's KV entries, then reads, because the newest token of a new row attends to context that
the same layer has written. Rows are read in one of two ways::

    a a a a .       ragged   11 tokens are read, each row to its own end (CPU)
    b b . . .
    c c c c c       dense    15 tokens are read, up to the longest row; tokens beyond a row's end are masked

Axes: T packed token, W written token, R row, S slot, H query heads, K key/value heads, L tokens of a slot, D width of
a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from stretto.model.decode.length_buckets import Bucket
from stretto.model.layout import Packing
from stretto.model.packed.attention import attend_packed, attention_by_products
from stretto.model.packed.layer import attend
from stretto_kernels.compiled import computes
from stretto_kernels.decode_attention import ragged_attention
from stretto_kernels.rule import Rule
from stretto_kernels.steps.trace import Attends

CACHED_ATTENTION = "stretto_cached"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstTokens:
    """The packed tokens (`sources`, their indices) whose KV entries are written first into the slot of a new row, which
    is number `place` among the rows of the step."""

    place: int  # index of the row among the rows of the step
    sources: Ints  # indices of the packed tokens, in the order of their positions


@dataclass(frozen=True)
class DecodeStep:
    """Packed tokens of a step, with each one's position in its row: contexts first, then the newest token of every row.
    The rows are the slots of `buckets`, in this order; `entering`: those that are new. `contexts`: their layout; None:
    no contexts."""

    token_ids: Ints  # [T]
    positions: Ints  # [T], position of each token in its row
    contexts: Packing | None  # layout of the contexts; None without contexts, as in most steps
    buckets: tuple[Bucket, ...]  # the rows of the step are the slots of these buckets, in this order
    entering: tuple[FirstTokens, ...]  # new rows

    @property
    def rows(self) -> int:
        return sum(len(bucket.owners) for bucket in self.buckets)

    @property
    def start(self) -> int:
        """Index of the first row's newest token among the packed tokens."""
        return len(self.token_ids) - self.rows

    @property
    def newest(self) -> Ints:
        """Position of each row's newest token, [R]."""
        return self.positions[self.start :]


@dataclass(frozen=True)
class StepPlan:
    """Attention of one step, planned once for all layers; implements `stretto_kernels.steps.trace.Attends`. `rows`:
    attend for some rows each. `cached`, `rotated`: what compiled loops and fused GPU steps need, or None."""

    contexts: Packing | None
    rows: tuple[Attends, ...]  # get [T, H, D] and [T, K, D], write the KV entries of their rows, and return [R, H, D]
    #: For `stretto_kernels.steps.program`: a line per bucket (rows, length, slots, addresses of each layer's keys and
    #: values), and the number of tokens of each row. None where rows are not read by the compiled loop.
    cached: tuple[Ints, Ints] | None = None
    #: For `stretto_kernels.gpu.fused`: attention of a step without contexts, with the rotary embedding before it.
    rotated: Callable[..., Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Attend in layer number `layer`: contexts among themselves, and each row to its slot, into which the step's KV
        entries are written. query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D], contexts first."""
        q_THD, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
        parts = [rows.attend(layer, q_THD, k_TKD, v_TKD, rule) for rows in self.rows]
        if self.contexts is not None:
            parts.insert(0, self.within_contexts(query, key, value, rule)[0])
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def enter(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the KV entries of the contexts in layer number `layer`; the rows' newest tokens are left to the
        caller. `key`, `value`: [1, K, T, D], of all packed tokens. For plans of `plan_by_bucket` only."""
        for rows in cast("tuple[_BucketRows, ...]", self.rows):
            rows.write(layer, *(x.transpose(1, 2)[0] for x in (key, value)))

    def within_contexts(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Compute the attention within the contexts, [1, tokens of contexts, H, D]. `query` [1, H, T, D], `key` and
        `value` [1, K, T, D]: of all packed tokens, the contexts first. The step must have contexts."""
        assert self.contexts is not None
        q, k, v = (x[:, :, : self.contexts.tokens] for x in (query, key, value))
        plain = rule.softcap is None and (rule.window is None or rule.window >= self.contexts.longest)
        if not plain or not computes(v.device, v.dtype):
            return attend_packed(q, k, v, self.contexts, rule)
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).to(v.dtype).contiguous() for x in (q, k, v))
        scaling = v.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
        return attend(q_THD, k_TKD, v_TKD, self.contexts, scaling)[None]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretto_step: Attends,
    **requested: Any,
) -> tuple[Tensor, None]:
    """Call `stretto_step.attend` with the signature of a transformers attention function; `attention_mask` is not read.
    `check_attention` must have accepted the model."""
    return stretto_step.attend(cast(int, module.layer_idx), query, key, value, Rule.of(requested)), None


# transformers makes no mask for an unknown name, which saves its search for packed sequences.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)


@dataclass(frozen=True)
class Ragged:
    """Reads each row to its own end: row r attends to the tokens at positions below ``ends[r]``."""

    ends: Ints

    def attend(
        self,
        query_RHD: Tensor,
        keys_SKLD: Tensor,
        values_SKLD: Tensor,
        rule: Rule,
        newest: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute the attention of each row to its slot, [R, H, D], with the layer's settings `rule`. `newest`: each
        row's last key and value, [R, K, D], to be written before reading; None: they are written already."""
        return ragged_attention(query_RHD, keys_SKLD, values_SKLD, self.ends, rule, newest)


@dataclass(frozen=True)
class _AttentionWindow:
    """The cached tokens, from position `first` to `end` (exclusive), that rows read in layers with one window. `bias`:
    0, or -inf where masked."""

    first: int
    end: int
    bias: Tensor  # [R, 1, 1, end - first]: 0, or -inf where masked


@dataclass(frozen=True)
class Dense:
    """Reads all rows up to the end of the longest row, with a mask. `windows`: by attention window of a layer (None: no
    window)."""

    windows: Mapping[int | None, _AttentionWindow]  # by attention window of the layer

    def attend(self, query_RHD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of each row to its slot, [R, H, D]; all entries must be written already."""
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
    """Choose how the rows of a bucket are read: `Ragged` where compiled loops can (the CPU), else `Dense`. `newest`:
    positions of their newest tokens; `windows`: attention windows of the layers, None for full attention; `device`,
    `dtype`: of the KV cache."""
    if computes(device, dtype):
        return Ragged(newest + 1)
    positions = torch.from_numpy(newest).to(device)
    return Dense({window: attention_window(newest, positions, window, dtype) for window in windows})


def attention_window(newest: Ints, positions: Tensor, window: int | None, dtype: torch.dtype) -> _AttentionWindow:
    """Return the cached tokens to read, with their mask, for rows that attend to the positions p with newest - window <
    p <= newest (`window` None: p <= newest). `newest` and `positions` are the same numbers [R], as an array and as a
    tensor on the device of the cache; `dtype`: of the mask."""
    end = int(newest.max()) + 1
    first = 0 if window is None else max(0, int(newest.min()) - window + 1)
    places = torch.arange(first, end, device=positions.device)
    hidden = places > positions[:, None]
    if window is not None and window < end:
        hidden |= places <= positions[:, None] - window
    bias = positions.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return _AttentionWindow(first, end, bias[:, None, None])


@dataclass(frozen=True)
class _BucketRows:
    """The rows of one bucket in a step, made by `plan_by_bucket`; implements `stretto_kernels.steps.trace.Attends`.
    `newest`: their newest tokens among the packed ones. `written`: indices of tokens to write, and cells for them."""

    bucket: Bucket
    newest: slice  # the rows' newest tokens among the packed tokens
    #: The packed tokens whose KV entries are written first [W], and the cells that they are written to, for each key
    #: head [W * K] (`Bucket.cells`). Without the newest tokens if these are written by the compiled loop.
    written: tuple[Tensor, Tensor] | None
    reading: Reading

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write the KV entries of one layer; does nothing if the step leaves no entries to write."""
        if self.written is None:
            return
        sources, cells = self.written
        for cache, new_TKD in ((self.bucket.keys[layer], k_TKD), (self.bucket.values[layer], v_TKD)):
            # Indexed as rows of the whole cache: by slot and position takes twice as long.
            cache.view(-1, cache.shape[-1]).index_copy_(0, cells, new_TKD.index_select(0, sources).flatten(0, 1))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        """Write the KV entries of these rows and attend to them. Tensors are of all packed tokens; returns [R, H,
        D]."""
        keys, values, query_RHD = self.bucket.keys[layer], self.bucket.values[layer], q_THD[self.newest]
        self.write(layer, k_TKD, v_TKD)
        if isinstance(self.reading, Ragged):
            return self.reading.attend(query_RHD, keys, values, rule, (k_TKD[self.newest], v_TKD[self.newest]))
        return self.reading.attend(query_RHD, keys, values, rule)


def plan_by_bucket(
    step: DecodeStep, windows: frozenset[int | None], device: torch.device, dtype: torch.dtype
) -> StepPlan:
    """Plan the attention of a step bucket by bucket, for any device. `windows`: attention windows of the layers, None
    for full attention; `dtype`: dtype of the KV cache."""
    compiled = computes(device, dtype)

    def rows_of(bucket: Bucket, start: int, newest: Ints, entering: list[tuple[int, Ints]]) -> _BucketRows:
        own = slice(start, start + len(newest))
        new = [written_tokens(*one) for one in entering]
        if not compiled:
            new.append(np.stack([np.arange(own.start, own.stop), np.arange(len(newest)), newest]))
        written = None
        if new:
            sources, slots, places = np.concatenate(new, axis=1)
            written = torch.from_numpy(sources).to(device), torch.from_numpy(bucket.cells(slots, places)).to(device)
        return _BucketRows(bucket, own, written, reading(newest, windows, device, dtype))

    def by_bucket() -> Iterator[_BucketRows]:
        first = 0
        for bucket in step.buckets:
            end = first + len(bucket.owners)
            entering = [(row.place - first, row.sources) for row in step.entering if first <= row.place < end]
            yield rows_of(bucket, step.start + first, step.newest[first:end], entering)
            first = end

    cached = None
    if compiled:
        table = [[len(bucket.owners), bucket.length, bucket.capacity, *bucket.addresses] for bucket in step.buckets]
        cached = np.array(table, np.int64), step.newest + 1
    return StepPlan(step.contexts, tuple(by_bucket()), cached)


def written_tokens(slot: int, sources: Ints) -> Ints:
    """Return the table [3, W] of the tokens that are written to a slot from its start: index of each packed token, as
    in `sources`; the slot; and the token's position there, 0, 1, and so on."""
    return np.stack([sources, np.full(len(sources), slot), np.arange(len(sources))])
