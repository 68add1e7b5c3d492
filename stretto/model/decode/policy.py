"""The cached attention path: the transformers module generates, one forward over packed tokens per step.

A step feeds the newest token of every row and gets the logits of the token after it. A row that is new, or whose
cache was dropped, brings its earlier tokens along as *context*::

    packed tokens  [ context of row 7 | context of rows 8 and 9 | newest of rows 3 5 7 8 9 ]      T tokens
    attention        causal, within the context                   over the row's own slot
    logits                                                        one line per row                [R, V]

Everything but attention sees plain tokens, so all linear layers run once over all T of them; siblings of one prompt
share its context. Keys and values live in `model.decode.length_buckets`; who writes and reads them depends on the
device (`stretto.model.decode.steps`, `stretto.model.decode.slot_tables`). The order within the layer is write, then
read: a new row's newest token attends to the context that the same layer has just written.

Axes: T packed token, R row, H query heads, K key/value heads, G = H / K, L cached tokens, D width of a head, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from stretto.model.attention_support import Attention, Rule, check_attention
from stretto.model.decode.length_buckets import HOLE, CacheLayout, LengthBuckets
from stretto.model.decode.slot_tables import steps
from stretto.model.decode.steps import DecodeStep, FirstTokens, StepPlan
from stretto.model.layout import Packing, pack, round_length
from stretto.model.packed.attention import packed_attention
from stretto.model.trace.trace import trace

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

    What a layer may ask for was checked when the policy was made (`stretto.model.attention_support.check_attention`).
    """
    layer, rule = cast(int, module.layer_idx), Rule(scaling, sliding_window, softcap)
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
    parts = [rows.attend(layer, q_THD, k_TKD, v_TKD, rule) for rows in stretto_step.rows]
    if (packing := stretto_step.contexts) is not None:
        q, k, v = (x[:, :, : packing.tokens] for x in (query, key, value))
        asked: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        parts.insert(0, packed_attention(module, q, k, v, None, packing=packing, **asked, **rest)[0][0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


# No mask function is registered for this name: transformers then makes no mask at all, which spares the search for
# packed sequences in every step.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)


class DecodePolicy:
    """A causal language model with a cache of rows.

    Example: two siblings of one prompt, then one more token each::

        policy.forward(newest, lengths, [Context(prompt[:-1], rows=(0, 1))])   # logits [2, V]
        policy.forward(newest, lengths, [])                                    # one token per row
        policy.release(0)
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int | None = None) -> None:
        """`most_bytes` bounds the memory of keys and values between two steps.

        Raises:
            ModelFolderError: the model's attention is of a kind that is not computed (`model.attention_support`).
        """
        attention = check_attention(model)
        self.model = model
        self.calls = trace(model)
        self.layout = cache_layout(model, attention)
        self.steps = steps(self.layout, attention.windows)
        most_tokens = None if most_bytes is None else most_bytes // self.layout.bytes_per_token
        self._shelves = LengthBuckets(self.layout, most_tokens)

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
        step = DecodeStep(tokens, positions, self._packing(carried), tuple(used), tuple(_begun(carried, order)))
        return order, self.steps.logits(step, self._call).float()

    def _packing(self, carried: Sequence[Context]) -> Packing | None:
        sizes = [len(context.token_ids) for context in carried]
        borrowed = [(context.lender, context.shared) for context in carried]
        return pack(sizes, self.layout.device, borrowed) if carried else None

    def _call(self, token_ids: Tensor, positions: Tensor, rows: int, plan: StepPlan) -> Tensor:
        return self.calls(token_ids, positions, rows, partial(cached_attention, stretto_step=plan))

    def _make_room(self, lengths: Ints, contexts: Iterable[Context]) -> None:
        outgrown = [
            row
            for shelf in self._shelves.used()
            for row in shelf.rows[(shelf.rows != HOLE) & (lengths[shelf.rows] > shelf.length)].tolist()
        ]
        entering = [row for context in contexts for row in context.rows]
        if outgrown or entering:
            self._shelves.expect(lengths[outgrown + entering].tolist())
        for row in outgrown:
            self._shelves.stretch(row, int(lengths[row]))
        for row in entering:
            self._shelves.place(row, int(lengths[row]))
        self._shelves.close_holes()


def _begun(carried: Sequence[Context], order: Ints) -> Iterator[FirstTokens]:
    """The packed tokens of context that enter the cache, for each row of them."""
    if not carried:
        return
    places = {row: place for place, row in enumerate(order.tolist())}
    ends = np.cumsum([len(context.own) for context in carried])
    starts = ends - [len(context.own) for context in carried]
    for context, start, end in zip(carried, starts, ends, strict=True):
        lent = starts[context.lender] + np.arange(context.shared)
        sources = np.concatenate([lent, np.arange(start, end)])
        for row in context.rows:
            yield FirstTokens(places[row], sources)


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
