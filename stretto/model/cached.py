"""The cached attention path: the transformers module generates, one forward over packed tokens per step.

A step feeds the newest token of every row and gets the logits of the token after it. A row that is new, or whose
cache was dropped, brings its earlier tokens along as *context*::

    packed tokens  [ context of row 7 | context of rows 8 and 9 | newest of rows 3 5 7 8 9 ]      T tokens
    attention        causal, within the context                   over the row's own slot
    logits                                                        one line per row                [R, V]

Everything but attention sees plain tokens, so all linear layers run once over all T of them; siblings of one prompt
share its context. Keys and values live in `stretto.model.shelves`. The order within the layer is write, then read:
a new row's newest token attends to the context that the same layer has just written.

Axes: T packed token, R row, H query heads, K key/value heads, G = H / K, L cached tokens, D width of a head, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from stretto.model.captured import capture
from stretto.model.kinds import Attention, check_attention
from stretto.model.layout import Packing, pack, round_length
from stretto.model.packed import Rule, packed_attention
from stretto.model.reading import Reading, reading
from stretto.model.shelves import HOLE, CacheLayout, Shelf, Shelves

CACHED_ATTENTION = "stretto_cached"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """Tokens before the newest one, to be cached for one row or for several siblings: ``token_ids`` [C], C may be 0.

    The first `shared` of them are also the first of the context at place `lender` of the same step, which shares
    nothing itself; they are computed there. At least one token must be the context's own.
    """

    token_ids: Ints
    rows: tuple[int, ...]
    lender: int = 0
    shared: int = 0

    @property
    def own(self) -> Ints:
        """The tokens that this context brings into the step."""
        return self.token_ids[self.shared :]


@dataclass(frozen=True)
class ShelfStep:
    """The rows of one shelf: what is written to it, and how its rows read."""

    shelf: Shelf
    start: int
    stop: int
    sources: Tensor | slice  # [W] packed tokens whose keys and values are written
    cells: Tensor  # [W * K] where they are written, for each key head
    reading: Reading

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        keys, values = self.shelf.keys[layer], self.shelf.values[layer]
        for cache, new_TKD in ((keys, k_TKD), (values, v_TKD)):
            # As rows of the whole cache: writing them by slot and position takes twice as long.
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.cells, self._written(new_TKD))
        return self.reading.attend(q_THD[self.start : self.stop], keys, values, rule)

    def _written(self, new_TKD: Tensor) -> Tensor:
        """[W * K, D]"""
        if isinstance(self.sources, slice):
            return new_TKD[self.sources].flatten(0, 1)
        return new_TKD.index_select(0, self.sources).flatten(0, 1)


@dataclass(frozen=True)
class StepPlan:
    """What the attention function needs to know, made once per step and shared by all layers."""

    contexts: Packing | None  # None in a step that brings no context, which is most steps
    shelves: tuple[ShelfStep, ...]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    stretto_step: StepPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D].

    What a layer may ask for was checked when the policy was made (`stretto.model.kinds.check_attention`).
    """
    layer, rule = cast(int, module.layer_idx), Rule(scaling, sliding_window, softcap)
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
    parts = [shelf.attend(layer, q_THD, k_TKD, v_TKD, rule) for shelf in stretto_step.shelves]
    if (packing := stretto_step.contexts) is not None:
        q, k, v = (x[:, :, : packing.tokens] for x in (query, key, value))
        asked: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        parts.insert(0, packed_attention(module, q, k, v, None, packing=packing, **asked, **rest)[0][0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


# No mask function is registered for this name: transformers then makes no mask at all, which spares the search for
# packed sequences in every step.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)


class CachedPolicy:
    """A causal language model with a cache of rows.

    Example: two siblings of one prompt, then one more token each::

        policy.forward(newest, lengths, [Context(prompt[:-1], rows=(0, 1))])   # logits [2, V]
        policy.forward(newest, lengths, [])                                    # one token per row
        policy.release(0)
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int | None = None) -> None:
        """`most_bytes` bounds the memory of keys and values between two steps.

        Raises:
            ModelFolderError: the model's attention is of a kind that is not computed (`stretto.model.kinds`).
        """
        attention = check_attention(model)
        self.model = model
        self.calls = capture(model)
        self.layout = cache_layout(model, attention)
        self._windows = attention.windows
        most_tokens = None if most_bytes is None else most_bytes // self.layout.bytes_per_token
        self._shelves = Shelves(self.layout, most_tokens)

    def __len__(self) -> int:
        return len(self._shelves)

    def __contains__(self, row: int) -> bool:
        return row in self._shelves

    @property
    def rows(self) -> set[int]:
        """The rows that are cached."""
        return self._shelves.rows()

    @property
    def bytes_allocated(self) -> int:
        """Memory held for keys and values now."""
        return self._shelves.tokens_allocated() * self.layout.bytes_per_token

    def release(self, row: int) -> None:
        """Forget a row."""
        self._shelves.release(row)

    def clear(self) -> None:
        """Forget all rows: their keys and values belong to weights that are gone."""
        self._shelves.clear()

    def check_integrity(self) -> None:
        self._shelves.check_integrity()

    @torch.inference_mode()
    def forward(self, newest: Ints, lengths: Ints, contexts: Sequence[Context]) -> tuple[Ints, Tensor]:
        """Feed the newest token of every cached row and of the rows that `contexts` bring in.

        Args:
            newest: [rows] newest token of each row, indexed by row.
            lengths: [rows] tokens of each row, the newest one included, indexed by row.
            contexts: the rows that enter now, each in exactly one context.

        Returns:
            The rows in the order of the logits [R], and the logits of each row's next token [R, V], float32.
        """
        self._make_room(lengths, contexts)
        used = self._shelves.used()
        order = np.concatenate([shelf.rows for shelf in used])
        carried = _with_filler(_without_empty(contexts), len(order))
        tokens = np.concatenate([context.own for context in carried] + [newest[order]])
        newest_places = lengths[order] - 1
        places = [np.arange(context.shared, len(context.token_ids)) for context in carried]
        positions = np.concatenate([*places, newest_places])
        attention = partial(cached_attention, stretto_step=self._plan(used, newest_places, carried))
        logits = self.calls(self._tensor(tokens), self._tensor(positions), len(order), attention)
        return order, logits.float()

    def _make_room(self, lengths: Ints, contexts: Iterable[Context]) -> None:
        for shelf in self._shelves.used():
            rows = shelf.rows
            for row in rows[(rows != HOLE) & (lengths[rows] > shelf.length)].tolist():
                self._shelves.stretch(row, int(lengths[row]))
        for row in (row for context in contexts for row in context.rows):
            self._shelves.place(row, int(lengths[row]))
        self._shelves.close_holes()

    def _plan(self, used: Sequence[Shelf], newest_places: Ints, carried: Sequence[Context]) -> StepPlan:
        sizes = [len(context.token_ids) for context in carried]
        borrowed = [(context.lender, context.shared) for context in carried]
        start, writes = sum(len(context.own) for context in carried), self._context_writes(carried)
        shelves: list[ShelfStep] = []
        ends = np.cumsum([len(shelf.owners) for shelf in used])[:-1]
        for shelf, places in zip(used, np.split(newest_places, ends), strict=True):
            shelves.append(self._shelf_step(shelf, start, places, writes.get(shelf.length, [])))
            start = shelves[-1].stop
        return StepPlan(pack(sizes, self.layout.device, borrowed) if carried else None, tuple(shelves))

    def _context_writes(self, carried: Sequence[Context]) -> dict[int, list[Ints]]:
        """Per length of shelf, the (packed token, slot, position) triples [3, W] of context that enters the cache."""
        writes: dict[int, list[Ints]] = {}
        ends = np.cumsum([len(context.own) for context in carried])
        starts = ends - [len(context.own) for context in carried]
        for context, start, end in zip(carried, starts, ends, strict=True):
            lent = starts[context.lender] + np.arange(context.shared)
            sources = np.concatenate([lent, np.arange(start, end)])
            for row in context.rows:
                shelf, slot = self._shelves.place_of(row)
                triple = np.stack([sources, np.full(len(sources), slot), np.arange(len(sources))])
                writes.setdefault(shelf.length, []).append(triple)
        return writes

    def _shelf_step(self, shelf: Shelf, start: int, newest: Ints, writes: list[Ints]) -> ShelfStep:
        rows = len(newest)
        sources: Tensor | slice = slice(start, start + rows)
        slots, places = np.arange(rows), newest
        if writes:
            own = np.stack([np.arange(start, start + rows), slots, newest])
            written, slots, places = np.concatenate([*writes, own], axis=1)
            sources = self._tensor(written)
        cells = self._tensor(shelf.cells(slots, places))
        read = reading(newest, self._windows, self.layout.device, self.layout.dtype)
        return ShelfStep(shelf, start, start + rows, sources, cells, read)

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.layout.device)


def _without_empty(contexts: Sequence[Context]) -> list[Context]:
    """The contexts that hold tokens; lenders keep their meaning, since nobody borrows from an empty one."""
    places = {place: at for at, place in enumerate(k for k, c in enumerate(contexts) if len(c.token_ids))}
    return [
        dataclasses.replace(context, lender=places.get(context.lender, 0))
        for context in contexts
        if len(context.token_ids)
    ]


def _with_filler(carried: list[Context], rows: int) -> list[Context]:
    """A last context that belongs to no row and brings the step to a length that repeats."""
    tokens = rows + sum(len(context.own) for context in carried)
    filler = round_length(tokens) - tokens if carried else 0
    return [*carried, Context(np.zeros(filler, np.int64), rows=())] if filler else carried


def cache_layout(model: PreTrainedModel, attention: Attention) -> CacheLayout:
    """The shape of one cached token."""
    return CacheLayout(
        layers=attention.layers,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        context_length=model.config.get_text_config().max_position_embeddings,
        dtype=model.dtype,
        device=model.device,
    )
