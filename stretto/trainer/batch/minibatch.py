"""Rows as tensors: the answers of one optimizer step, divided over the ranks and into what goes through the model
together.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.packing import shares
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together."""

    packed: PackedTokens
    behavior_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    staleness: Tensor  # [N], versions
    scale: Tensor  # [N], what each token weighs in the minibatch's mean
    sequences: Sequences
    values: Tensor  # [N], by the critic before the step; empty without one
    returns: Tensor  # [N], what the critic should say; empty without one


@dataclass(frozen=True)
class Minibatch:
    """Rows of one optimizer step, and what one rank computes of them."""

    micro_batches: tuple[MicroBatch, ...]  # of this rank; every rank has as many
    loss_tokens: int  # of all ranks
    answers: tuple[str, ...]  # ids of its trajectories, of all ranks


def minibatch(
    rows: Sequence[Sample],
    config: OptimizerConfig,
    aggregation: Aggregation,
    longest: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    answers: float | None = None,
) -> Minibatch:
    """Pack this rank's rows of one optimizer step; `longest` is the most tokens that an answer may have, `answers` how
    many of the batch there are to a minibatch (none: these rows are all).

    What a token weighs is known from the rows of all ranks, so the ranks' losses add up to the exact mean.
    """
    lengths = [len(row.loss_positions) for row in rows]
    scales = coefficients(aggregation, lengths, len(rows) if answers is None else answers, longest)
    tokens = [len(row.token_ids) for row in rows]
    packs = shares(tokens, config.micro_batch_tokens, config.min_micro_batches, ranks.count)[ranks.rank]
    return Minibatch(
        micro_batches=tuple(_micro_batch([rows[i] for i in pack], [scales[i] for i in pack], device) for pack in packs),
        loss_tokens=sum(lengths),
        answers=tuple(row.id for row in rows),
    )


def _micro_batch(rows: Sequence[Sample], scales: Sequence[float], device: torch.device) -> MicroBatch:
    def column(parts: Iterable[Sequence[float]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(parts)), dtype=torch.float32, device=device)

    # Flash attention wants every sequence whole; elsewhere answers to one prompt share the prompt's computation.
    prompts = None if device.type == "cuda" else [row.prompt_tokens for row in rows]
    sequences = Sequences.of([len(row.loss_positions) for row in rows], device)
    return MicroBatch(
        packed=pack_tokens([row.token_ids for row in rows], [row.loss_positions for row in rows], device, prompts),
        behavior_logprobs=column(row.behavior_logprobs for row in rows),
        advantages=column(row.advantages for row in rows),
        staleness=column(row.staleness for row in rows),
        scale=sequences.spread(column([scales])),
        sequences=sequences,
        values=column(row.values for row in rows),
        returns=column(row.returns for row in rows),
    )
