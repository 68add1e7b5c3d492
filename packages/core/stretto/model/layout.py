"""Layout of packed sequences: one row of tokens, and padded cells for attention.

    tokens     a0 a1 a2 b0 b1 c2            [T]   linear layers, norms and the MLP: one row per token, no padding
    cells      a0 a1 a2                     [C]   attention: sequences of similar length side by side in a bucket,
               a0 a1 c2                           padded on the right up to the longest of their bucket
               b0 b1 (a bucket of its own)

Sequence c *shares* its first two tokens with a; they are computed once. In a causal model a token depends only on
earlier tokens, so completions can share their prompt without a change of the result.

Axes: T packed token, C cell, B row of a bucket, L length of a bucket, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from stretto.model.device import copied

Ints = npt.NDArray[np.int64]

#: A sequence shorter than this fraction of the bucket's longest starts a new bucket.
SHORTEST_IN_BUCKET = 0.75
_FEWEST_ROUNDED = 128


@dataclass(frozen=True)
class RowPart(ABC):
    """This process's part, t tokens, of a packed row whose T tokens several ranks divide
    (`stretto_cluster.ranks.tokens`). `own`: indices, among all wanted tokens, of those that it scores; `before`: of the
    token before each, among the t. The methods are collectives: all these ranks call them together."""

    input_ids: Tensor  # [1, t]
    position_ids: Tensor  # [1, t]
    own: Tensor  # [n] indices of the wanted tokens that this rank scores
    before: Tensor  # [n] index, among the t tokens, of the token before each of them

    @abstractmethod
    def to_heads(self, columns: tuple[Tensor, ...]) -> list[Tensor]:
        """Exchange query, key and value of this rank's tokens for all heads, each [1, H, t, D], for those of all tokens
        for this rank's heads, each [1, H / ranks, T, D]."""

    @abstractmethod
    def to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange the output of this rank's heads for all tokens, [1, T, H / ranks, D], for that of all heads for this
        rank's tokens, [1, t, H, D]."""

    @abstractmethod
    def joined(self, scores: Tensor) -> Tensor:
        """Combine the scores [n] of each rank's wanted tokens to those of all wanted tokens, [N]."""


#: Cuts a row: called with its token ids [1, T], positions [1, T], and the token before each wanted one [N].
DivideRow = Callable[[Tensor, Tensor, Tensor], RowPart]


@dataclass(frozen=True)
class Packing:
    """Positions of the sequences in a packed row, as index tensors for all layers of a forward. *Cells* are the places
    of the padded batches (*buckets*, of sequences of similar length) in which attention is computed. `starts`: index of
    each sequence's first own token. `token_of_cell`, `cell_of_token`: token of each cell (padding repeats the last of
    its row), and cell of each token. `shared_cells`, `shared_tokens`: cells of tokens that belong to another sequence,
    and these tokens.

    Example: ``pack([3, 2, 3], prefixes=[(0, 0), (1, 0), (0, 2)])`` is the drawing in the module's docstring: positions
    ``[[0, 1, 2, 0, 1, 2]]``, buckets (2 rows, 3) and (1 row, 2), 8 cells for 6 tokens.
    """

    lengths: tuple[int, ...]  # tokens of each sequence, including shared tokens
    starts: Tensor  # [S] int64, index of the first own token of each sequence in the row
    position_ids: Tensor  # [1, T], position of each token in its sequence
    buckets: tuple[tuple[int, int], ...]  # (rows, length) of each bucket, longest first
    token_of_cell: Tensor  # [C], token of each cell; padding cells repeat the last token of their row
    cell_of_token: Tensor  # [T], cell of each token in its own sequence
    shared_cells: Tensor  # [b], cells in which sequences share tokens of another sequence
    shared_tokens: Tensor  # [b], token of each of these cells

    @property
    def tokens(self) -> int:
        return self.position_ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, shared ones included."""
        return self.buckets[0][1]

    @property
    def shares_prefixes(self) -> bool:
        return len(self.shared_tokens) > 0

    @cached_property
    def boundaries(self) -> Tensor:
        """Cumulative lengths of the sequences, [S + 1] int32, for flash attention. Only valid without shared
        prefixes."""
        return functional.pad(self.starts, (0, 1), value=self.tokens).to(torch.int32)


def pack(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    prefixes: Sequence[tuple[int, int]] | None = None,
) -> Packing:
    """Lay out sequences of these lengths one after the other in a row.

    ``prefixes[s] = (source, n)``: the first n tokens of sequence s are the first n tokens of sequence `source`, which
    must not share a prefix itself. Sequence s then adds ``lengths[s] - n`` own tokens to the row. None: no sequence
    shares tokens.

    Raises:
        ValueError: there is no sequence, a sequence has no own token, or a prefix is longer than its source, or its
            source shares one itself.
    """
    prefixes = prefixes or [(s, 0) for s in range(len(lengths))]
    _refuse_impossible(lengths, prefixes)
    # In numpy: for a handful of sequences its small operations take a third of torch's time.
    sizes = np.asarray(lengths, np.int64)
    sources, shared = np.asarray(prefixes, np.int64).T
    own = sizes - shared
    starts = own.cumsum() - own
    positions = _counting(own) + shared.repeat(own)
    order = np.argsort(-sizes, kind="stable")
    buckets = _buckets(sizes[order].tolist())
    first_cells = np.empty_like(sizes)
    token_of_cell, cells, first = [], 0, 0
    for rows, length in buckets:
        members = order[first : first + rows, None]
        first_cells[members[:, 0]] = cells + np.arange(rows) * length
        inside = np.minimum(np.arange(length), sizes[members] - 1)
        source, prefix = sources[members], shared[members]
        tokens = np.where(inside < prefix, starts[source] + inside, starts[members] + inside - prefix)
        token_of_cell.append(tokens.ravel())
        cells, first = cells + rows * length, first + rows
    inside = _counting(shared)
    arrays = {
        "starts": starts,
        "position_ids": positions[None],
        "token_of_cell": np.concatenate(token_of_cell),
        "cell_of_token": first_cells.repeat(own) + positions,
        "shared_cells": first_cells.repeat(shared) + inside,
        "shared_tokens": starts[sources].repeat(shared) + inside,
    }
    tensors = {name: copied(array, device) for name, array in arrays.items()}
    return Packing(lengths=tuple(lengths), buckets=buckets, **tensors)


def round_length(tokens: int) -> int:
    """Round a number of tokens up, so that few different lengths occur: from 128 on, 16 lengths between two powers of
    two. The result is at most 1/16 longer.

    oneDNN compiles code for every new shape, in about 0.3 ms. Without rounding it would do so in every step.

    >>> [round_length(tokens) for tokens in (5, 127, 129, 1000, 2100)]
    [5, 127, 136, 1024, 2176]
    """
    if tokens < _FEWEST_ROUNDED:
        return tokens
    grain = 1 << (tokens.bit_length() - 5)
    return -(-tokens // grain) * grain


def _counting(sizes: Ints) -> Ints:
    """Concatenate 0, 1, ..., size - 1 of each size: [2, 3] gives 0 1 0 1 2."""
    return np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)


def _buckets(descending: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Split descending lengths into runs, as (rows, longest length), whose lengths are at least `SHORTEST_IN_BUCKET` of
    the longest."""
    buckets: list[tuple[int, int]] = []
    for length in descending:
        rows, longest = buckets[-1] if buckets else (0, 0)
        if rows and length >= SHORTEST_IN_BUCKET * longest:
            buckets[-1] = (rows + 1, longest)
        else:
            buckets.append((1, length))
    return tuple(buckets)


def _refuse_impossible(lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError if there is no sequence, one has no own token, or a shared prefix is longer than its source, or
    its source shares a prefix itself."""
    if not lengths:
        raise ValueError("a packing holds at least one sequence")
    for s, (length, (source, prefix)) in enumerate(zip(lengths, prefixes, strict=True)):
        if length <= prefix:
            raise ValueError(f"sequence {s} has {length} tokens and shares {prefix}: at least one must be its own")
        if prefix and (prefixes[source][1] or lengths[source] < prefix):
            raise ValueError(f"sequence {s} shares {prefix} tokens of sequence {source}, which owns fewer")
