"""Context parallelism: ranks divide the tokens of one packed row. For attention an all-to-all exchange gives each rank
all tokens of some heads (DeepSpeed-Ulysses, Jacobs et al., arXiv 2309.14509).

    rank 0   tokens 0 .. T/C   all heads   ─┐           ┌─► all tokens, heads 0 .. H/C   ─┐           ┌─► its tokens,
    rank 1   tokens T/C .. T   all heads   ─┴ exchange ─┴─► all tokens, heads H/C .. H   ─┴ exchange ─┴─► all heads

All other operations of a model work on each token separately.

Axes: T token of the whole row, C rank, t token of one rank (T / C, padded), N wanted token, n of this rank, H head, D
head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn import functional

from stretto.model.layout import RowPart


@dataclass(frozen=True)
class RankPart(RowPart):
    """This rank's part of a packed row that the ranks of `group` divide. `tokens`: number of tokens of the whole row;
    `wanted`: number of tokens to score."""

    group: ProcessGroup
    tokens: int  # T
    wanted: int  # N

    @classmethod
    def of(cls, input_ids: Tensor, position_ids: Tensor, before: Tensor, group: ProcessGroup) -> RankPart:
        """Cut a row [1, T] into equal parts, the last ones padded with filler tokens; returns the part of this rank.
        `before`: [N], index in the row of the token before each wanted token, whose output scores the wanted token."""
        count, rank, tokens = group.size(), group.rank(), input_ids.shape[1]
        each = -(-tokens // count)
        ids, positions = (
            functional.pad(row, (0, each * count - tokens))[:, rank * each : (rank + 1) * each]
            for row in (input_ids, position_ids)
        )
        own = (before // each == rank).nonzero()[:, 0]
        return cls(ids, positions, own, before[own] - rank * each, group, tokens, len(before))

    def to_heads(self, columns: tuple[Tensor, ...]) -> list[Tensor]:
        """All-to-all before attention. `columns`: query, key and value of this rank's tokens for all heads, each [1, H,
        t, D]. Returns the same of all tokens for this rank's share of the heads, each [1, H / C, T, D]."""
        count = self.group.size()
        heads = [column.shape[1] // count for column in columns]
        sent = torch.cat([column[0].unflatten(0, (count, -1)) for column in columns], 1)  # [C, H / C, t, D]
        received = _exchanged(sent, self.group).transpose(0, 1).flatten(1, 2)[:, : self.tokens]
        return [column[None] for column in received.split(heads)]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """All-to-all after attention. `attended`: the output of this rank's heads for all tokens, [1, T, H / C, D].
        Returns the output of all heads for this rank's tokens, [1, t, H, D]."""
        count, each = self.group.size(), self.input_ids.shape[1]
        padded = functional.pad(attended[0], (0, 0, 0, 0, 0, each * count - self.tokens))
        received = _exchanged(padded.unflatten(0, (count, -1)), self.group)  # [C, t, H / C, D]
        return received.transpose(0, 1).flatten(1, 2)[None]

    def joined(self, scores: Tensor) -> Tensor:
        """Combine the scores [n] of each rank's wanted tokens to the scores of all, [N], on every rank. All ranks then
        compute the same, so a rank's gradient is the gradient of its own scores."""
        return cast(Tensor, _Joined.apply(scores, self))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """All-to-all: send the i-th block to the i-th rank of the group. The gradient is sent back in the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        distributed.all_to_all_single(received := torch.empty_like(blocks), blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return cast(Tensor, _Exchange.apply(blocks, group))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, part: RankPart) -> Tensor:
        ctx.own = part.own
        everything = scores.new_zeros(part.wanted).index_copy_(0, part.own, scores)
        distributed.all_reduce(everything, group=part.group)
        return everything

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.own), None
