"""Per-token results of a training step, and their writing (`store.series.tokens`) in a thread while training
continues.

The numbers are the inputs and intermediate values of the loss. They stay on the device until the end of the step, and
are then copied once to the CPU.

Axes: N loss token of all ranks, S sampled token of a trajectory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import described
from stretto.core.forest import paths
from stretto.core.records import Batch, Segment, Trajectory
from stretto.store.config import TokensConfig
from stretto.store.series.tokens import SampledTokens, TokenFiles, TokenOutcome
from stretto.trainer.batch.minibatch import Minibatch
from stretto.trainer.batch.paths import path_id
from stretto.trainer.batch.samples import Sample
from stretto.trainer.messages import TokensSpec
from stretto.trainer.objective.losses import Loss
from stretto.trainer.ranks import Ranks

_NUMBERS = 4  # columns of a loss token


class TokenSink(Protocol):
    """Receives the per-token results of training steps. Every rank has a sink, and gets the results of all ranks."""

    def keeps(self, step: int) -> bool:
        """Whether the results of this step are wanted; must be equal on all ranks."""

    def take(self, tokens: TrainedTokens) -> None:
        """Store the results of a step that `keeps` wants. Must not delay training."""


class TokenMeter:
    """Collects the per-token results of one step, micro-batch by micro-batch, on each rank."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []

    def computed(self, loss: Loss, advantages: Tensor, before: Tensor | None) -> None:
        """Add a micro-batch with its `loss` and the `advantages` [N] of its tokens. `before` [N]: log-probabilities by
        the policy before the step; None: not known, NaN is stored."""
        trainer = torch.full_like(loss.ratio, math.nan) if before is None else before
        self._columns.append(torch.stack([trainer, loss.ratio, advantages, outcomes(loss)], dim=1))

    def gathered(self, ranks: Ranks, parts: Sequence[Minibatch], batch: Batch) -> TrainedTokens:
        """The collected tokens of the step, the same on every rank; no numbers if none were collected. `parts`: the
        minibatches of the step. All ranks must call it."""
        order = [sample for share in range(ranks.shares) for part in parts for sample in part.divided[share]]
        if not self._columns:  # on any rank: all have as many micro-batches
            return TrainedTokens(batch, order, torch.empty(0, _NUMBERS))
        numbers, _ = ranks.all_gather(torch.cat(self._columns).flatten())
        return TrainedTokens(batch, order, numbers.view(-1, _NUMBERS).cpu())


def outcomes(loss: Loss) -> Tensor:
    """The `TokenOutcome` of each token as a float, [N]."""
    bounded, corrected = TokenOutcome.BOUNDED * loss.bounded, TokenOutcome.CORRECTED * loss.weights.corrected
    weightless = TokenOutcome.WEIGHTLESS * (loss.weights.weight == 0)
    return (bounded + corrected + weightless + TokenOutcome.IN_LOSS).float()


@dataclass(frozen=True)
class TrainedTokens:
    """The batch of a step with its samples, and the per-token results of their loss tokens, in the samples' order.
    `numbers`: [N, 4]: log-probability by the policy before the step, ratio, advantage, outcome."""

    batch: Batch
    samples: Sequence[Sample]
    numbers: Tensor  # [N, 4] on the CPU, in the samples' order: log proximal, ratio, advantage, outcome

    def sampled(self) -> tuple[dict[str, int], SampledTokens]:
        """Number of sampled tokens of each trajectory by id, and the results of all sampled tokens of the batch in the
        order of these trajectories. Tokens outside of the loss have NaN and outcome 0."""
        lengths, places = dict[str, int](), dict[str, Sequence[int]]()
        first = 0
        for group in self.batch.groups:
            oldest = self.batch.oldest_of(group.id)
            for trajectory in group.trajectories:
                places |= _loss_tokens(trajectory, first, oldest)
                lengths[trajectory.id] = count = trajectory.sampled_length
                first += count
        columns = np.full((_NUMBERS, first), math.nan, dtype=np.float32)
        columns[-1] = 0
        order = chain.from_iterable(places[sample.id] for sample in self.samples)
        columns[:, np.fromiter(order, np.intp)] = self.numbers.numpy().T
        trainer, ratio, advantage, outcome = columns
        return lengths, SampledTokens(trainer, ratio, advantage, outcome.astype(np.uint8))


def _loss_tokens(trajectory: Trajectory, first: int, oldest: int) -> dict[str, Sequence[int]]:
    """Positions of each path's loss tokens among the sampled tokens of the batch, by path id. `first`: position of the
    trajectory's first sampled token. `oldest`: oldest version whose tokens are in the loss."""
    segments = trajectory.segments
    if len(segments) == 1:  # nearly all are single turns
        return {trajectory.id: _young(segments[0], first, oldest)}
    begins = list(accumulate((segment.sampled_length for segment in segments), initial=first))
    return {
        path_id(trajectory.id, number): list(
            chain.from_iterable(_young(segments[place], begins[place], oldest) for place in path.trained)
        )
        for number, path in enumerate(paths(segments))
    }


def _young(segment: Segment, begin: int, oldest: int) -> Sequence[int]:
    """Positions, counted from `begin`, of the sampled tokens of version `oldest` or newer; a range if these are all."""
    whole = range(begin, begin + segment.sampled_length)
    if min((stamp for stamp, _ in segment.stamps), default=oldest) >= oldest:
        return whole
    return [at for at, version in zip(whole, segment.versions, strict=True) if version >= oldest]


_PATIENCE_SECONDS = 10.0


class TokenWriter:
    """Token sink that writes the results of each step in a thread, one step at a time. A failed write is logged, and
    a step is left out, with a log line, while an earlier write hangs. Training continues in both cases."""

    def __init__(self, spec: TokensSpec, rank: int, patience: float = _PATIENCE_SECONDS) -> None:
        """Create the files' writer; it starts no thread yet. `rank`: number of this rank; only rank 0 writes, since it
        runs on the run folder's machine. `patience`: seconds to wait for an earlier write before a step is left out."""
        self._patience = patience
        self._config = TokensConfig.model_validate_json(spec.config)
        self._files = TokenFiles(Path(spec.folder), self._config.tokens_gib) if rank == 0 else None
        self._thread = ThreadPoolExecutor(1, "tokens")
        self._writing: Future[None] | None = None
        self._hangs = False  # disk hangs: do not wait for it again

    def keeps(self, step: int) -> bool:
        """Whether the recipe wants the results of this step."""
        return self._config.keeps(step)

    def take(self, tokens: TrainedTokens) -> None:
        """Start to write the results of a step; on rank 0 only. Waits for an earlier write first; if that hangs, the
        results of this step are dropped, with a message."""
        if self._files is None:
            return
        if not self.finish():
            self._say(tokens.batch.step, f"those of an earlier step are not written after {self._patience:g} s")
            return
        self._writing = self._thread.submit(self._write, self._files, tokens)
        self._writing.add_done_callback(Future.result)  # an error that is not expected goes to the log

    def finish(self) -> bool:
        """Wait until the last step is written; False if it is not written within `patience`, or at once if an earlier
        wait ended so and the write still hangs. True also if nothing was written."""
        if self._writing is not None:
            wait([self._writing], 0.0 if self._hangs else self._patience)
            self._hangs = not self._writing.done()
        return not self._hangs

    def _write(self, files: TokenFiles, tokens: TrainedTokens) -> None:
        step = tokens.batch.step
        try:
            files.write(step, *tokens.sampled())
        except OSError as error:
            self._say(step, described(error))

    def _say(self, step: int, why: str) -> None:
        print(f"the tokens of step {step} are not on record: {why}", file=sys.stderr, flush=True)
