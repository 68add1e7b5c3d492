"""How sequences stand in one packed row of tokens, and in the cells that attention works on.

    tokens     a0 a1 a2 b0 b1 c2            [T]   linear layers, norms and the MLP: one row per token, no padding
    cells      a0 a1 a2                     [C]   attention: sequences of similar length side by side in a bucket,
               a0 a1 c2                           padded on the right up to the longest of their bucket
               b0 b1 (a bucket of its own)

Sequence c begins with the same two tokens as a and *borrows* them: they are computed once. Whatever a causal model
computes for a token depends on the tokens before it alone, so the answers to one prompt share its prompt exactly.

Axes: T packed token, C cell, B row of a bucket, L length of a bucket, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

#: A bucket ends where a sequence is shorter than this part of the bucket's longest.
SHORTEST_IN_BUCKET = 0.75
_FEWEST_ROUNDED = 128


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed row are, as index tensors that serve all layers of a forward.

    Example: ``pack([3, 2, 3], borrowed=[(0, 0), (1, 0), (0, 2)])`` is the drawing above: positions
    ``[[0, 1, 2, 0, 1, 2]]``, buckets (2 rows, 3) and (1 row, 2), 8 cells for 6 tokens.
    """

    lengths: tuple[int, ...]  # of the sequences, borrowed tokens included
    starts: Tensor  # [S] int64, where each sequence's own tokens begin
    position_ids: Tensor  # [1, T], of each token in its sequence
    buckets: tuple[tuple[int, int], ...]  # (rows, length) of each bucket, longest first
    token_of_cell: Tensor  # [C], padding cells repeat the last token of their row
    cell_of_token: Tensor  # [T], the cell in the token's own sequence
    borrowed_cells: Tensor  # [b], cells of a borrowed token in a sequence that is not its own
    borrowed_tokens: Tensor  # [b], those tokens

    @property
    def tokens(self) -> int:
        return self.position_ids.shape[1]

    @property
    def longest(self) -> int:
        return self.buckets[0][1]

    @property
    def borrows(self) -> bool:
        return len(self.borrowed_tokens) > 0

    def boundaries(self) -> Tensor:
        """[S + 1] int32: cumulative lengths, as flash attention wants them; for a packing that borrows nothing."""
        return functional.pad(self.starts, (0, 1), value=self.tokens).to(torch.int32)


def pack(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    borrowed: Sequence[tuple[int, int]] | None = None,
) -> Packing:
    """Lay sequences of these lengths one after the other.

    ``borrowed[s] = (lender, n)``: the first n tokens of sequence s are those of sequence `lender`, which borrows
    nothing itself; sequence s has ``lengths[s] - n`` tokens of its own in the row.

    Raises:
        ValueError: there is no sequence, one has no token of its own, or one borrows what is not there.
    """
    borrowed = borrowed or [(s, 0) for s in range(len(lengths))]
    _refuse_impossible(lengths, borrowed)
    sizes = torch.tensor(lengths)
    lenders, prefixes = torch.tensor(borrowed).unbind(1)
    own = sizes - prefixes
    starts = own.cumsum(0) - own
    positions = _counting(own) + prefixes.repeat_interleave(own)
    order = torch.tensor(sorted(range(len(lengths)), key=lambda s: -lengths[s]))
    buckets = _buckets([lengths[s] for s in order.tolist()])
    first_cells = torch.empty(len(lengths), dtype=torch.int64)
    token_of_cell, cells = [], 0
    for members, (rows, length) in zip(order.split([rows for rows, _ in buckets]), buckets, strict=True):
        first_cells[members] = cells + torch.arange(rows) * length
        inside = torch.arange(length).minimum(sizes[members, None] - 1)
        lent, prefix = lenders[members, None], prefixes[members, None]
        tokens = torch.where(inside < prefix, starts[lent] + inside, starts[members, None] + inside - prefix)
        token_of_cell.append(tokens.flatten())
        cells += rows * length
    inside = _counting(prefixes)
    return Packing(
        lengths=tuple(lengths),
        starts=starts.to(device),
        position_ids=positions[None].to(device),
        buckets=buckets,
        token_of_cell=torch.cat(token_of_cell).to(device),
        cell_of_token=(first_cells.repeat_interleave(own) + positions).to(device),
        borrowed_cells=(first_cells.repeat_interleave(prefixes) + inside).to(device),
        borrowed_tokens=(starts[lenders].repeat_interleave(prefixes) + inside).to(device),
    )


def round_length(tokens: int) -> int:
    """The next length worth a filler: from 128 tokens on, 16 lengths between two powers of two, at most 1/16 longer.

    oneDNN makes code for every shape of a product that it has not seen, in 0.3 ms or so; lengths that never repeat
    would make all of it anew in every step.

    >>> [round_length(tokens) for tokens in (5, 127, 129, 1000, 2100)]
    [5, 127, 136, 1024, 2176]
    """
    if tokens < _FEWEST_ROUNDED:
        return tokens
    grain = 1 << (tokens.bit_length() - 5)
    return -(-tokens // grain) * grain


def _counting(sizes: Tensor) -> Tensor:
    """0, 1, ... for each size in turn: [2, 3] gives 0 1 0 1 2."""
    return torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)


def _buckets(descending: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut descending lengths into runs whose shortest is not much shorter than their longest."""
    buckets: list[tuple[int, int]] = []
    for length in descending:
        rows, longest = buckets[-1] if buckets else (0, 0)
        if rows and length >= SHORTEST_IN_BUCKET * longest:
            buckets[-1] = (rows + 1, longest)
        else:
            buckets.append((1, length))
    return tuple(buckets)


def _refuse_impossible(lengths: Sequence[int], borrowed: Sequence[tuple[int, int]]) -> None:
    if not lengths:
        raise ValueError("a packing holds at least one sequence")
    for s, (length, (lender, prefix)) in enumerate(zip(lengths, borrowed, strict=True)):
        if length <= prefix:
            raise ValueError(f"sequence {s} has {length} tokens and borrows {prefix}: at least one must be its own")
        if prefix and (borrowed[lender][1] or lengths[lender] < prefix):
            raise ValueError(f"sequence {s} borrows {prefix} tokens of sequence {lender}, which does not own so many")
