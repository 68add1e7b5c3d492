"""Build tensors from the samples of one optimizer step, split over ranks and micro-batches.

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
from stretto.trainer.batch.paths import trajectory_of
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class MicroBatch:
    """Samples computed in one forward and backward pass."""

    packed: PackedTokens
    behavior_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    staleness: Tensor  # [N], versions
    scale: Tensor  # [N], weight of each token in the minibatch's mean
    sequences: Sequences
    values: Tensor  # [N], by the critic before the step; empty without one
    returns: Tensor  # [N], the critic's targets; empty without one
    engines: tuple[str, ...]  # [S], engine that sampled the newest tokens of each sequence


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step, and one rank's share of them."""

    micro_batches: tuple[MicroBatch, ...]  # this rank's; equally many on every rank
    loss_tokens: int  # loss tokens of all ranks
    ids: tuple[str, ...]  # ids of its trajectories, of all ranks
    divided: tuple[tuple[Sample, ...], ...]  # the samples of each rank, in the order of its micro-batches


def minibatch(
    samples: Sequence[Sample],
    config: OptimizerConfig,
    aggregation: Aggregation,
    longest: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    trajectories: float | None = None,
) -> Minibatch:
    """Pack this rank's share of the samples of one optimizer step.

    `longest`: ``sampling.max_tokens``. `trajectories`: mean number of trajectories per minibatch of the batch; None if
    these samples are the whole batch. Coefficients count the samples of all ranks, so the ranks' losses sum to the
    exact mean.
    """
    lengths = [len(sample.loss_positions) for sample in samples]
    scales = coefficients(aggregation, lengths, len(samples) if trajectories is None else trajectories, longest)
    tokens = [len(sample.token_ids) for sample in samples]
    divided = shares(tokens, config.micro_batch_tokens, config.min_micro_batches, ranks.count)
    return Minibatch(
        micro_batches=tuple(
            _micro_batch([samples[i] for i in pack], [scales[i] for i in pack], device) for pack in divided[ranks.rank]
        ),
        loss_tokens=sum(lengths),
        ids=tuple(dict.fromkeys(trajectory_of(sample.id) for sample in samples)),
        divided=tuple(tuple([samples[i] for pack in share for i in pack]) for share in divided),
    )


def _micro_batch(samples: Sequence[Sample], scales: Sequence[float], device: torch.device) -> MicroBatch:
    def column(parts: Iterable[Sequence[float]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(parts)), dtype=torch.float32, device=device)

    # Flash attention needs whole sequences; otherwise samples share the computation of their prompt.
    prompts = None if device.type == "cuda" else [sample.prompt_tokens for sample in samples]
    sequences = Sequences.of([len(sample.loss_positions) for sample in samples], device)
    return MicroBatch(
        packed=pack_tokens(
            [sample.token_ids for sample in samples], [sample.loss_positions for sample in samples], device, prompts
        ),
        behavior_logprobs=column(sample.behavior_logprobs for sample in samples),
        advantages=column(sample.advantages for sample in samples),
        staleness=column(sample.staleness for sample in samples),
        scale=sequences.spread(column([scales])),
        sequences=sequences,
        values=column(sample.values for sample in samples),
        returns=column(sample.returns for sample in samples),
        engines=tuple(sample.engine for sample in samples),
    )
