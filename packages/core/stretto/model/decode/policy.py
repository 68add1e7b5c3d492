"""An engine's policy: a transformers model with a KV cache, one forward pass over packed tokens per step.

A step feeds the newest token of every row, and returns the logits of its next token. A new row, or a row whose KV
entries were dropped, also brings its earlier tokens as *context*::

    packed tokens  [ context of row 7 | context of rows 8 and 9 | newest of rows 3 5 7 8 9 ]      T tokens
    attention        causal, within the context                   over the row's own slot
    logits                                                        one line per row                [R, V]

Linear layers and norms run once over all T tokens; completions of one prompt share its context. The KV cache is
`model.decode.length_buckets`, attention over it `model.decode.steps`, or `model.decode.slot_tables` on a GPU.

Axes: T packed token, R row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.model.attention_support import Attention, check_attention
from stretto.model.decode.length_buckets import CacheLayout, LengthBuckets
from stretto.model.decode.slot_tables import TableSteps, table_steps
from stretto.model.decode.steps import CACHED_ATTENTION, DecodeStep, FirstTokens, plan_by_bucket
from stretto.model.decode.text import TextCache
from stretto.model.layout import pack, round_length
from stretto_kernels.steps.trace import Forward, trace

__all__ = ["CACHED_ATTENTION", "Context", "DecodePolicy", "cache_layout"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """Tokens before the newest token of a row, whose KV entries a step computes. `token_ids`: [C], C may be 0. `rows`:
    the rows that get these entries; several if they have the same prompt.

    The first `shared` tokens are the first tokens of context number `prefix_of` of the same step, and are computed
    there; that context must not share a prefix itself. At least one token must not be shared.
    """

    token_ids: Ints
    rows: tuple[int, ...]
    prefix_of: int = 0
    shared: int = 0

    @property
    def own(self) -> Ints:
        """The tokens that are not shared, which this context adds to the step."""
        return self.token_ids[self.shared :]


class DecodePolicy:
    """A causal language model with a KV cache of rows; a row is one completion with its prompt.

    Example: two completions of one prompt, then one more token each::

        policy.forward(newest, lengths, [Context(prompt[:-1], rows=(0, 1))])   # logits [2, V]
        policy.forward(newest, lengths, [])                                    # one token per row
        policy.release(0)
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int | None = None) -> None:
        """Make a policy without rows. `model`: loaded with the attention path `CACHED_ATTENTION`. `most_bytes`: limit
        of the KV cache between two steps; None: no limit.

        Raises:
            ModelFolderError: the model's attention is not supported (`model.attention_support`).
        """
        attention = check_attention(model)
        self.model = model
        self.layout = cache_layout(model, attention)
        self.forward_of_model: Forward = trace(model)
        self.table_steps: TableSteps | None = table_steps(self.layout, attention.windows)
        self._windows = attention.windows
        most_tokens = None if most_bytes is None else most_bytes // self.layout.bytes_per_token
        self._buckets = LengthBuckets(self.layout, most_tokens)

    def __len__(self) -> int:
        return len(self._buckets)

    def __contains__(self, row: int) -> bool:
        return row in self._buckets

    @property
    def rows(self) -> set[int]:
        """The rows with KV entries."""
        return self._buckets.rows()

    @property
    def bytes_allocated(self) -> int:
        """Current memory of the KV cache in bytes."""
        return self._buckets.tokens_allocated() * self.layout.bytes_per_token

    def tune(self, record: Path | None) -> None:
        """Choose the tile size of the kernels for decoding on a GPU (`stretto_kernels.gpu.attention`); does nothing
        where these kernels are not used. `record`: file that keeps the choice for the run; None: the default size. Call
        it before the first step."""
        if self.table_steps is not None:
            self.table_steps.tune(self.model.config.get_text_config().num_attention_heads, record)

    def release(self, row: int) -> None:
        """Drop the KV entries of a row, which must have some."""
        self._buckets.release(row)

    @torch.inference_mode()
    def limit(self, most_bytes: int) -> None:
        """Set the limit of the KV cache, in bytes, and free memory beyond it. The rows must fit the limit."""
        self._buckets.limit(most_bytes // self.layout.bytes_per_token)

    def clear(self) -> None:
        """Release all rows: their KV entries were computed with earlier weights. The memory stays allocated."""
        self._buckets.clear()

    def check_integrity(self) -> None:
        """Raise BoundViolated if the slots of the KV cache and their rows contradict each other."""
        self._buckets.check_integrity()

    @torch.inference_mode()
    def forward(self, newest: Ints, lengths: Ints, contexts: Sequence[Context]) -> tuple[Ints, Tensor]:
        """Feed the newest token of every cached row and of the rows of `contexts`, which become cached.

        Args:
            newest: [rows] newest token of each row, indexed by row.
            lengths: [rows] tokens of each row including the newest, indexed by row.
            contexts: contexts of the new rows; each new row is in exactly one.

        Returns:
            The rows in the order of the logits, [R], and the logits of each row's next token, [R, V], float32.

        Raises:
            BoundViolated: a row has more tokens than the model's context.
        """
        step, order = self._step(newest, lengths, contexts)
        return order, self._logits(step, len(order))

    @torch.inference_mode()
    def forward_of_text(self, token_ids: Ints, decoded: int) -> Tensor:
        """Compute the logits after every token of a text, [C, V], float32, in one forward pass. The last `decoded`
        tokens (at least one) are computed over the KV cache, each as a row of its own; the others are computed as
        context. The policy must have no rows, and has none afterwards."""
        assert not len(self), "the rows of the policy would be fed a token each"
        together, rows = len(token_ids) - decoded, range(decoded)
        contexts = [Context(token_ids[: together + row], (row,), shared=together if row else 0) for row in rows]
        lengths = np.array([together + row + 1 for row in rows])
        step, order = self._step(token_ids[together:], lengths, contexts)
        every = self._logits(step, len(step.token_ids))
        for row in rows:
            self.release(row)
        # Order of tokens: the text, tokens that later rows add to the context, a filler, then the rows.
        lasts = torch.from_numpy(len(every) - decoded + np.argsort(order)).to(every.device)
        return torch.cat([every[:together], every[lasts]])

    @torch.inference_mode()
    def forward_of_texts(self, texts: Sequence[Ints]) -> Tensor:
        """Compute the logits after every token of several texts, concatenated to [C, V], float32, in one forward pass.
        The last token of each text is computed over the KV cache. The policy must have no rows, and has none
        afterwards."""
        assert not len(self), "the rows of the policy would be fed a token each"
        newest, lengths = (np.array([pick(text) for text in texts]) for pick in (lambda text: text[-1], len))
        contexts = [Context(text[:-1], (row,)) for row, text in enumerate(texts)]
        step, order = self._step(newest, lengths, contexts)
        every = self._logits(step, len(step.token_ids))
        # Order of tokens: contexts, a filler, then the last token of each text.
        ends = np.cumsum(lengths - 1)
        lasts = len(every) - len(texts) + np.argsort(order)
        places = [
            np.append(np.arange(end - length + 1, end), last)
            for end, length, last in zip(ends, lengths, lasts, strict=True)
        ]
        for row in range(len(texts)):
            self.release(row)
        return every[torch.from_numpy(np.concatenate(places)).to(every.device)]

    @torch.inference_mode()
    def forward_of_piece(self, text: TextCache, token_ids: Ints, last: int | None = None) -> Tensor:
        """Compute the logits after the last tokens of the next piece of a text, [last, V], float32. `last`: number of
        the piece's tokens that get logits, at least one; None: all. `text` has the KV entries of the pieces before, and
        gets those of this one. Rows of the policy are not touched."""
        count, wanted = len(token_ids), len(token_ids) if last is None else last
        filler = np.zeros(round_length(count) - count, np.int64)
        places = text.tokens + np.arange(count)
        ids, positions = (torch.from_numpy(np.append(x, filler)[None]) for x in (token_ids, places))
        device, size, rows = self.layout.device, count + len(filler), wanted + len(filler)
        logits = self.forward_of_model(ids.to(device), positions.to(device), text, size, -rows)[0, :wanted]
        text.tokens += count
        return logits.float()

    def _step(self, newest: Ints, lengths: Ints, contexts: Sequence[Context]) -> tuple[DecodeStep, Ints]:
        """Give the rows their slots and lay out the step's tokens; returns the step, and its rows in order, [R].
        Arguments are those of `forward`."""
        used = self._buckets.resize_rows(lengths, [row for context in contexts for row in context.rows])
        order = np.concatenate([bucket.rows for bucket in used])
        if not contexts:
            return DecodeStep(newest[order], lengths[order] - 1, None, tuple(used), ()), order
        packed = _with_filler(_without_empty(contexts), len(order))
        tokens = np.concatenate([context.own for context in packed] + [newest[order]])
        places = [np.arange(context.shared, len(context.token_ids)) for context in packed]
        positions = np.concatenate([*places, lengths[order] - 1])
        positions = np.minimum(positions, self.layout.context_length - 1)  # the filler may be longer than any row
        sizes = [len(context.token_ids) for context in packed]
        shared = [(context.prefix_of, context.shared) for context in packed]
        packing = pack(sizes, self.layout.device, shared) if packed else None
        entering = tuple(_first_tokens(packed, order)) if packed else ()
        return DecodeStep(tokens, positions, packing, tuple(used), entering), order

    def _logits(self, step: DecodeStep, last: int) -> Tensor:
        """Compute the logits after each of the step's last `last` tokens, [last, V], float32: from slot tables where
        the policy has them (GPU), else bucket by bucket."""
        if self.table_steps is not None:
            return self.table_steps.logits(step, self.forward_of_model, last)
        device = self.layout.device
        token_ids, position_ids = (torch.from_numpy(x[None]).to(device) for x in (step.token_ids, step.positions))
        plan = plan_by_bucket(step, self._windows, device, self.layout.dtype)
        return self.forward_of_model(token_ids, position_ids, plan, len(step.token_ids), -last)[0].float()


def _first_tokens(packed: Sequence[Context], order: Ints) -> Iterator[FirstTokens]:
    """Yield, for each new row, the packed tokens whose KV entries go into its slot. `packed`: contexts in the order of
    their tokens; `order`: rows of the step."""
    places = {row: place for place, row in enumerate(order.tolist())}
    ends = np.cumsum([len(context.own) for context in packed])
    starts = ends - [len(context.own) for context in packed]
    for context, start, end in zip(packed, starts, ends, strict=True):
        shared = starts[context.prefix_of] + np.arange(context.shared)
        sources = np.concatenate([shared, np.arange(start, end)])
        for row in context.rows:
            yield FirstTokens(places[row], sources)


def _without_empty(contexts: Sequence[Context]) -> list[Context]:
    """List the contexts that have tokens, with `prefix_of` renumbered (0 in place of an empty context, which shares
    nothing)."""
    places = {place: at for at, place in enumerate(k for k, c in enumerate(contexts) if len(c.token_ids))}
    return [
        dataclasses.replace(context, prefix_of=places.get(context.prefix_of, 0))
        for context in contexts
        if len(context.token_ids)
    ]


def _with_filler(packed: list[Context], rows: int) -> list[Context]:
    """Return the contexts with a filler context without rows behind them, so that the step has a rounded number of
    tokens (`round_length`); none is added without contexts. `rows`: number of rows of the step."""
    tokens = rows + sum(len(context.own) for context in packed)
    filler = round_length(tokens) - tokens if packed else 0
    return [*packed, Context(np.zeros(filler, np.int64), rows=())] if filler else packed


def cache_layout(model: PreTrainedModel, attention: Attention) -> CacheLayout:
    """Return the layout of the KV cache of a model with this attention, in the model's dtype and on its device."""
    return CacheLayout(
        layers=attention.layers,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        context_length=model.config.get_text_config().max_position_embeddings,
        dtype=model.dtype,
        device=model.device,
    )
