"""One training step: a batch in, the next version out.

    batch ─► rows ─► minibatches ─► micro-batches            (rows, packing)
                         │
                         ├─ proximal log-probs of minibatches 2 .. N, by the policy before the step
                         │
                         └─ for each minibatch: forward, loss, backward per micro-batch; then one optimizer step

The proximal policy is the one before the step's first update (AReaL, section 5.2). For the first minibatch that is the
policy of its own training forward, so its log-probs, detached, are the proximal ones, to the last bit; only the later
minibatches need a forward of their own before the first update.

Axes: T packed token, N loss token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.errors import BoundViolated
from stretto.core.events import Span
from stretto.core.records import Batch, Sampling, Update
from stretto.model.logprobs import PackedTokens, pack_tokens
from stretto.trainer import checkpoint
from stretto.trainer.config import AlgorithmConfig, TrainerConfig
from stretto.trainer.learner import UNCHANGED, Learner, learning_rate
from stretto.trainer.losses import Objective, Tokens, decoupled_ppo, ppo
from stretto.trainer.metrics import Meter
from stretto.trainer.packing import micro_batches, minibatches
from stretto.trainer.rows import Row, rows_of
from stretto.weights.mailbox import Publisher

LOSSES = {"decoupled_ppo": decoupled_ppo, "ppo": ppo}


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together."""

    packed: PackedTokens
    behavior_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    on_policy: Tensor  # [N] bool


@dataclass(frozen=True)
class Minibatch:
    """Rows of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int


class Trainer:
    """Holds the policy that is trained, and its version.

    Example: a trainer at version 6 takes the batch of version 6 and holds version 7::

        trainer = Trainer(model, config, algorithm, plan.sampling, version=6)
        update = trainer.train(batch)
        trainer.publish(publisher)      # engines can load version 7
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        sampling: Sampling = UNCHANGED,
        *,
        version: int = 0,
    ) -> None:
        """`model` must be loaded with the packed attention, in float32; `sampling` is what the engines draw by."""
        self.learner = Learner(model, config, sampling)
        self.version = version
        self._config, self._algorithm = config, algorithm
        self._loss = LOSSES[algorithm.loss]
        self._objective = Objective(algorithm.clip_low, algorithm.clip_high, algorithm.behavior_weight_cap)
        self._spans: list[Span] = []

    def train(self, batch: Batch) -> Update:
        """One training step on the whole batch; afterwards `version` is one higher.

        Raises:
            BoundViolated: the batch is not of this version, or holds tokens from the future.
            TrainingDiverged: too many optimizer steps in a row had gradients that are not finite.
        """
        if batch.version != self.version:
            raise BoundViolated(f"a batch of version {batch.version} for a trainer at version {self.version}")
        meter = Meter()
        began = time.monotonic()
        rows = rows_of(batch, self._algorithm)
        parts = self._minibatches(rows.rows)
        anchors = self._proximal_logprobs(parts[1:])
        proximal_done = self._span("proximal", began)
        rate = learning_rate(self._config, self.version, self._config.steps)
        for index, part in enumerate(parts):
            self._optimize(part, anchors[index - 1] if index else None, meter)
            meter.stepped(self.learner.step(rate, batch.step))
        update_done = self._span("update", proximal_done)
        self.version += 1
        facts = {
            "learning_rate": rate,
            "reward_mean": rows.reward_mean,
            "tokens": float(sum(len(row.token_ids) for row in rows.rows)),
            "seconds_proximal": proximal_done - began,
            "seconds_update": update_done - proximal_done,
        }
        trained = sum(part.loss_tokens for part in parts)
        return Update(
            step=batch.step,
            version=self.version,
            trained_tokens=trained,
            masked_tokens=rows.masked_tokens,
            metrics=meter.metrics() | facts,
        )

    def publish(self, publisher: Publisher) -> None:
        """Hand the policy out as `version`."""
        began = time.monotonic()
        publisher.publish(self.version, self.learner.model.named_parameters())
        self._span("publish", began)

    def save_checkpoint(self, folder: Path) -> None:
        """Everything that `load_checkpoint` needs to go on bit for bit; the folder appears whole or not at all."""
        began = time.monotonic()
        checkpoint.save(folder, self.learner, self.version)
        self._span("checkpoint", began)

    def load_checkpoint(self, folder: Path) -> None:
        """Stand where the trainer stood that wrote `folder`.

        Raises:
            StoreError: the folder is not whole, or is of another model.
        """
        self.version = checkpoint.load(folder, self.learner)

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _minibatches(self, rows: Sequence[Row]) -> list[Minibatch]:
        parts = minibatches([len(row.token_ids) for row in rows], self._config.minibatches)
        return [self._minibatch([rows[i] for i in part]) for part in parts]

    def _minibatch(self, rows: Sequence[Row]) -> Minibatch:
        config, device = self._config, self.learner.model.device
        lengths = [len(row.token_ids) for row in rows]
        packs = micro_batches(lengths, config.micro_batch_tokens, config.min_micro_batches)
        return Minibatch(
            micro_batches=tuple(_micro_batch([rows[i] for i in pack], device) for pack in packs),
            loss_tokens=sum(len(row.loss_positions) for row in rows),
        )

    def _proximal_logprobs(self, parts: Sequence[Minibatch]) -> list[list[Tensor]]:
        """log-probs [N] of each micro-batch by the policy as it is now. Plain PPO is anchored elsewhere."""
        if self._loss is ppo:
            return [[micro.behavior_logprobs for micro in part.micro_batches] for part in parts]
        with torch.no_grad():
            return [[self.learner.logprobs(micro.packed).logprobs for micro in part.micro_batches] for part in parts]

    def _optimize(self, part: Minibatch, anchors: Sequence[Tensor] | None, meter: Meter) -> None:
        """Accumulate the gradient of one minibatch; `anchors` None: nothing has been updated yet in this step."""
        for index, micro in enumerate(part.micro_batches):
            policy, entropy = self.learner.logprobs(micro.packed, entropy=self._algorithm.entropy)
            proximal = policy.detach() if anchors is None else anchors[index]
            tokens = Tokens(micro.behavior_logprobs, proximal, micro.advantages)
            loss = self._loss(self._objective, policy, tokens, part.loss_tokens)
            loss.value.backward()
            meter.learned(loss, len(policy), entropy)
            if anchors is None or self._loss is not ppo:
                meter.agreed(micro.behavior_logprobs, proximal, micro.on_policy)

    def _span(self, name: str, began: float) -> float:
        now = time.monotonic()
        self._spans.append(Span(role="trainer", name=name, start=began, end=now, version=self.version))
        return now


def _micro_batch(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    # Flash attention wants every sequence whole; elsewhere answers to one prompt share the prompt's computation.
    prompts = None if device.type == "cuda" else [row.prompt_tokens for row in rows]
    return MicroBatch(
        packed=pack_tokens([row.token_ids for row in rows], [row.loss_positions for row in rows], device, prompts),
        behavior_logprobs=column([x for row in rows for x in row.behavior_logprobs]),
        advantages=column([row.advantage for row in rows for _ in row.loss_positions]),
        on_policy=torch.tensor([x for row in rows for x in row.on_policy], dtype=torch.bool, device=device),
    )
