"""What a training step did with each token, for the record (`store.series.tokens`).

The numbers are those that the loss was computed with. They stay where they are until the step's end, and are copied
once; all else is done by the one that writes them.

Axes: N loss token of all ranks, S sampled token of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.conversation.forest import paths
from stretto.core.records import Batch, Trajectory
from stretto.store.series.tokens import SampledTokens, TokenOutcome
from stretto.trainer.batch.minibatch import Minibatch
from stretto.trainer.batch.paths import path_id
from stretto.trainer.batch.samples import Sample
from stretto.trainer.objective.losses import Loss
from stretto.trainer.parallel.ranks import Ranks


class TokenSink(Protocol):
    """What a trainer hands the tokens of its steps to; on every rank there is one, and they say the same."""

    def keeps(self, step: int) -> bool: ...

    def take(self, tokens: TrainedTokens) -> None:
        """All is kept elsewhere than on the way of the training."""
        ...


class TokenMeter:
    """Collects the numbers of the loss tokens, micro-batch by micro-batch, on each rank."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []

    def computed(self, loss: Loss, before: Tensor | None) -> None:
        """Add a micro-batch; `before` [N] are its log-probabilities by the policy before the step, where known."""
        trainer = torch.full_like(loss.ratio, math.nan) if before is None else before
        self._columns.append(torch.stack([trainer, loss.ratio, outcomes(loss)], dim=1))

    def gathered(self, ranks: Ranks, parts: Sequence[Minibatch], batch: Batch) -> TrainedTokens:
        """The step on record, the same on every rank; all ranks call it."""
        order = [sample for rank in range(ranks.count) for part in parts for sample in part.divided[rank]]
        if not self._columns:  # on any rank: all have as many micro-batches
            return TrainedTokens(batch, order, torch.empty(0, 3))
        numbers, _ = ranks.all_gather(torch.cat(self._columns).flatten())
        return TrainedTokens(batch, order, numbers.view(-1, 3).cpu())


def outcomes(loss: Loss) -> Tensor:
    """[N], each token's `TokenOutcome` as a float."""
    weightless = loss.weights.weight == 0
    return (
        TokenOutcome.IN_LOSS
        + TokenOutcome.BOUNDED * loss.bounded.float()
        + TokenOutcome.CORRECTED * loss.weights.corrected.float()
        + TokenOutcome.WEIGHTLESS * weightless.float()
    )


@dataclass(frozen=True)
class TrainedTokens:
    """A step's batch with what was measured of its loss tokens."""

    batch: Batch
    samples: Sequence[Sample]
    numbers: Tensor  # [N, 3] on the CPU, in the samples' order: log proximal, ratio, outcome

    def sampled(self) -> tuple[dict[str, int], SampledTokens]:
        """All sampled tokens of the batch: how many each trajectory has, by its id, and their numbers."""
        lengths, places = dict[str, int](), dict[str, list[int]]()
        first = 0
        for of, trajectory in ((group.id, one) for group in self.batch.groups for one in group.trajectories):
            places |= _loss_tokens(trajectory, first, self.batch.oldest_of(of))
            lengths[trajectory.id] = sum(len(segment.versions) for segment in trajectory.segments)
            first += lengths[trajectory.id]
        columns = np.full((first, 4), (math.nan, math.nan, math.nan, 0), dtype=np.float32)
        order = list(chain.from_iterable(places[sample.id] for sample in self.samples))
        advantages = list(chain.from_iterable(sample.advantages for sample in self.samples))
        columns[order] = np.insert(self.numbers.numpy(), 2, advantages, axis=1)
        trainer, ratio, advantage, outcome = columns.T
        return lengths, SampledTokens(trainer, ratio, advantage, outcome.astype(np.uint8))


def _loss_tokens(trajectory: Trajectory, first: int, oldest: int) -> dict[str, list[int]]:
    """The places of each path's loss tokens, by the path's id; `first` is that of the trajectory's first sampled token.
    Given tokens have no version."""
    segments = trajectory.segments
    begins = list(accumulate((len(segment.versions) for segment in segments), initial=first))
    return {
        path_id(trajectory.id, number): [
            at
            for place in path.trained
            for at, version in enumerate(segments[place].versions, begins[place])
            if version >= oldest
        ]
        for number, path in enumerate(paths(segments))
    }
