"""Build the tensors of one optimizer step from samples, divided among ranks and micro-batches.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.packing import shares
from stretto.trainer.batch.paths import as_column, trajectory_of
from stretto.trainer.batch.samples import Sample, chosen_of, scored_of
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients
from stretto.trainer.objective.returns import Column
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class MicroBatch:
    """Samples computed in one forward and backward pass."""

    packed: PackedTokens
    behavior_logprobs: Tensor  # [N]; empty if unknown, then the policy's own log-probabilities are used
    advantages: Tensor  # [N]
    staleness: Tensor  # [N], versions
    scale: Tensor  # [N], weight of each token in the minibatch's mean
    sequences: Sequences
    values: Tensor  # [N], by the critic before the step; empty without a critic
    returns: Tensor  # [N], the critic's targets; empty without a critic
    engines: tuple[str, ...]  # [S], engine that sampled the newest tokens of each sequence
    ids: tuple[str, ...] = ()  # [S], path ids
    chosen: Tensor | None = None  # [N], indices of the loss tokens among the scored tokens; None: all are loss tokens


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step, and one rank's share of them."""

    micro_batches: tuple[MicroBatch, ...]  # of this rank's share; equally many on every rank
    loss_tokens: int  # number of loss tokens of all shares
    ids: tuple[str, ...]  # ids of the trajectories of all shares
    divided: tuple[tuple[Sample, ...], ...]  # samples of each share, in the order of its micro-batches


def minibatch(
    samples: Sequence[Sample],
    config: OptimizerConfig,
    aggregation: Aggregation | Literal["sum"],
    longest: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    trajectories: float | None = None,
) -> Minibatch:
    """Pack this rank's share of the samples of one optimizer step.

    `longest`: ``sampling.max_tokens``. `trajectories`: mean number of trajectories per minibatch of the batch; None if
    these samples are the whole batch. The tokens' weights are computed over the samples of all ranks, so the ranks'
    losses sum to the exact mean. A position with several targets counts as one token in the mean.
    """
    lengths = [len(set(sample.loss_positions) if len(sample.targets) else sample.loss_positions) for sample in samples]
    own = iter(coefficients(aggregation, [n for n in lengths if n], trajectories or len(samples), longest))
    scales = [next(own) if length else 0.0 for length in lengths]
    tokens = [len(sample.token_ids) for sample in samples]
    divided = shares(tokens, config.micro_batch_tokens, config.min_micro_batches, ranks.shares)
    return Minibatch(
        micro_batches=tuple(
            _micro_batch([samples[i] for i in pack], [scales[i] for i in pack], device) for pack in divided[ranks.share]
        ),
        loss_tokens=sum(lengths),
        ids=tuple(dict.fromkeys(trajectory_of(sample.id) for sample in samples)),
        divided=tuple(tuple([samples[i] for pack in share for i in pack]) for share in divided),
    )


def _micro_batch(samples: Sequence[Sample], scales: Sequence[float], device: torch.device) -> MicroBatch:
    def column(parts: Iterable[Column]) -> Tensor:
        return torch.from_numpy(as_column(np.concatenate([np.zeros(0, np.float32), *parts]), np.float32)).to(device)

    lengths = [len(sample.loss_positions) for sample in samples]
    sequences = Sequences.of(torch.tensor(lengths, dtype=torch.int64, device=device))  # a rank may have none
    scale = sequences.spread(column([scales]))
    if any(len(sample.weights) for sample in samples):
        scale = scale * column(sample.weights for sample in samples)
    return MicroBatch(
        packed=_packed(samples, device),
        behavior_logprobs=column(sample.behavior_logprobs for sample in samples),
        advantages=column(sample.advantages for sample in samples),
        staleness=column(sample.staleness for sample in samples),
        scale=scale,
        sequences=sequences,
        values=column(sample.values for sample in samples),
        returns=column(sample.returns for sample in samples),
        engines=tuple(sample.engine for sample in samples),
        ids=tuple(sample.id for sample in samples),
        chosen=_chosen(samples, device),
    )


def _packed(samples: Sequence[Sample], device: torch.device) -> PackedTokens:
    # Flash attention needs every sequence in full; on the CPU the samples of one prompt share its computation.
    prompts = None if device.type == "cuda" else [sample.prompt_tokens for sample in samples]
    wanted = [scored_of(sample) for sample in samples]
    targets = [sample.targets for sample in samples] if any(len(sample.targets) for sample in samples) else None
    return pack_tokens([sample.token_ids for sample in samples], wanted, device, prompts, targets)


def _chosen(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Indices of the loss tokens among the scored tokens of a micro-batch; None if all are loss tokens."""
    if not any(len(sample.scored) for sample in samples):
        return None
    chosen, start = [np.zeros(0, np.int64)], 0
    for sample in samples:
        chosen.append(start + chosen_of(sample))
        start += len(scored_of(sample))
    return torch.from_numpy(np.concatenate(chosen)).to(device)
