"""One training step: a batch in, the next version out.

    batch ─► samples ─► minibatches ─► micro-batches            (samples, packing)
                            │
                            ├─ proximal log-probs of minibatches 2 .. N, by the policy before the step
                            │
                            └─ for each minibatch: forward, loss, backward per micro-batch; then one optimizer step

The proximal policy is the one before the step's first update (AReaL, section 5.2). The training forward of the first
minibatch is by that policy, so its log-probs, detached, are the proximal ones to the last bit; only the later
minibatches need a forward of their own before the first update, and only where the loss is anchored there.

Axes: T packed token, N loss token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.canary import Agreement, Canary, TensorDigest, routes
from stretto.core.errors import BoundViolated, TrainingDiverged
from stretto.core.events import Span
from stretto.core.records import Batch, Sampling, Update
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer import checkpoint
from stretto.trainer.batch.minibatch import Minibatch, minibatch
from stretto.trainer.batch.packing import minibatches
from stretto.trainer.batch.samples import NO_SCORES, Sample, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.gradients import Gradients
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Learner, learning_rate
from stretto.trainer.outcomes import TokenMeter, TokenSink
from stretto.trainer.parallel.adapters import adapted_layers, adapter_parameters, merged, plain_parameters, scaled
from stretto.trainer.parallel.ranks import ALONE, Ranks
from stretto.trainer.reference import Reference, WithoutAdapters
from stretto.weights.mailbox import Publication, Publisher
from stretto.weights.shared_memory import digest_of_tensor


class Trainer:
    """Holds the trained policy and its version.

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
        reference: Reference | None = None,
        critic: Critic | None = None,
        ranks: Ranks = ALONE,
        sink: TokenSink | None = None,
    ) -> None:
        """Every rank has a trainer; all must call the same methods with the same arguments.

        Args:
            model: float32, loaded with packed attention.
            sampling: settings of the engines.
            reference: exactly if the algorithm has one; a model with adapters is its own reference to the initial
                policy.
            critic: exactly if the algorithm has one.
            sink: receives per-token results of the steps it keeps.
        """
        self.learner = Learner(model, config, sampling, ranks)
        self._ranks, self._sink, self._adapted = ranks, sink, adapted_layers(model)
        if algorithm.reference is not None and algorithm.reference.path is None and self._adapted:
            reference = WithoutAdapters(self.learner)
        if (algorithm.reference is None) != (reference is None):
            raise ValueError("algorithm.reference needs a reference policy, and nothing else does")
        if (algorithm.critic is None) != (critic is None):
            raise ValueError("algorithm.advantages.critic needs a critic, and nothing else does")
        self.version = version
        self._config, self._algorithm = config, algorithm
        self._critic = critic
        in_reward = algorithm.divergence("reward") is not None
        self._gradients = Gradients(self.learner, algorithm, None if in_reward else reference)
        self._in_reward = reference if in_reward else None
        self._longest = sampling.max_tokens
        self._spans: list[Span] = []
        self._publication = Publication(dict)  # of the last version that was copied
        self._text: tuple[Sequence[int], PackedTokens] | None = (
            None  # packed text of the last canary; a run has one text
        )
        self._frozen: dict[
            str, TensorDigest
        ] = {}  # digests of the base weights under adapters, from the first publication on
        self.agreement: tuple[Agreement, ...] = ()  #: agreement of engines and trainer in the last step

    def train(self, batch: Batch) -> Update:
        """Train one step on the whole batch; afterwards `version` is one higher.

        Raises:
            BoundViolated: the batch is not of this version, or holds tokens of a later one.
            TrainingDiverged: too many optimizer steps in a row had non-finite gradients.
        """
        if batch.version != self.version:
            raise BoundViolated(f"a batch of version {batch.version} for a trainer at version {self.version}")
        meter = Meter()
        sink = self._sink if self._sink is not None and self._sink.keeps(batch.step) else None
        tokens = TokenMeter() if sink is not None else None
        began = time.monotonic()
        values = self._critic.token_values(batch) if self._critic else NO_SCORES
        reference = self._in_reward.token_logprobs(batch) if self._in_reward else NO_SCORES
        sampled = samples_of(batch, self._algorithm, self._longest, values, reference)
        samples = sampled.samples
        if sampled.kl_reference is not None:
            meter.kl_in_reward(sampled.kl_reference)
        if self._critic is not None:
            none = np.zeros(0)
            said, wanted = [one.values for one in samples], [one.returns for one in samples]
            meter.valued(np.concatenate([none, *said]), np.concatenate([none, *wanted]))
        parts = self._minibatches(samples)
        proximal = self._proximal_logprobs(parts)
        proximal_done = self._span("proximal", began)
        rate = learning_rate(self._config, self.version, self._config.steps)
        skipped: list[str] = []
        for index, part in enumerate(parts):
            first, before = index == 0, proximal[index]
            self._gradients.accumulate(part, meter, first=first, proximal=before, kept=tokens)
            if not self._step(part, rate, batch.step, meter):
                skipped += part.ids
        update_done = self._span("update", proximal_done)
        self.version += 1
        facts = {
            "learning_rate": rate,
            "reward_mean": sampled.reward_mean,
            "tokens": float(sum(len(sample.token_ids) for sample in samples)),
            "seconds_proximal": proximal_done - began,
            "seconds_update": update_done - proximal_done,
        }
        metrics = meter.metrics(self._ranks) | facts
        self.agreement = meter.agreement(self._ranks, sorted({sample.engine for sample in samples}))
        if sink is not None and tokens is not None:
            sink.take(tokens.gathered(self._ranks, parts, batch))
        return Update(
            step=batch.step,
            version=self.version,
            trained_tokens=sum(part.loss_tokens for part in parts),
            masked_tokens=sampled.masked_tokens,
            metrics=metrics,
            skipped=tuple(skipped),
        )

    def publish(
        self, publisher: Publisher, text: Sequence[int] = (), held: torch.dtype = torch.float32
    ) -> Canary | None:
        """Copy the policy and publish the copy, before returning. Arguments: see `copied`."""
        canary, _ = self.copied(publisher, text, held)()
        return canary

    def copied(
        self, publisher: Publisher, text: Sequence[int] = (), held: torch.dtype = torch.float32
    ) -> Callable[[], tuple[Canary | None, Span]]:
        """Copy the policy as `version`: all parameters, or only the adapters if it has any. Returns a function that
        publishes the copy, in any thread, while training continues; optimizer steps wait for the copy alone.

        It returns a canary for engines to prove the version (log-probabilities of `text` and tensor digests; None
        without a text) and the span of the writing. `held`: dtype of the engines' base weights under adapters.
        """
        began = time.monotonic()
        canary = self._canary(text) if text else None
        began = self._span("prove", began) if text else began
        model = self.learner.model
        tensors = adapter_parameters(model) if self._adapted else model.named_parameters()
        self._publication = publication = publisher.copy(self.version, tensors, self._gathered)
        if canary is not None and self._adapted and not self._frozen:
            self._frozen = dict(self._frozen_digests(held))
        version, frozen = self.version, self._frozen
        self._span("publish", began, publication.copied)

        def write() -> tuple[Canary | None, Span]:
            began = time.monotonic()
            digests = publication.write()
            span = Span("trainer", "write", began, time.monotonic(), version, publication.size)
            told = canary and msgspec.structs.replace(canary, digests={**frozen, **digests})
            return told, span

        return write

    def _frozen_digests(self, held: torch.dtype) -> Iterator[tuple[str, TensorDigest]]:
        for name, parameter in plain_parameters(self.learner.model):
            yield name, digest_of_tensor(self._gathered(name, parameter, held))

    @torch.no_grad()
    def _canary(self, text: Sequence[int]) -> Canary:
        if self._text is None or self._text[0] != text:
            self._text = text, pack_tokens([text], device=self.learner.model.device)
        logprobs = self.learner.logprobs(self._text[1], sampling=UNCHANGED).logprobs
        config = self.learner.model.config.get_text_config()
        depth: int = config.num_hidden_layers
        found, routed = tuple(logprobs.tolist()), routes(config.to_dict())
        return Canary(self.version, tuple(text), found, depth, self._config.dtype, routed=routed)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's parameters by name, one at a time, with adapters merged in."""
        for name, parameter in plain_parameters(self.learner.model):
            whole = self._ranks.full_tensor(parameter.detach())
            layer = self._adapted.get(name.removesuffix(".weight"))
            adapted = layer is not None and name.endswith(".weight")
            yield name, merged(layer, whole, self._ranks) if layer is not None and adapted else whole

    def _gathered(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter, or an adapter with its scale, in `dtype`. Each rank rounds its shard before it sends
        it."""
        return self._ranks.full_tensor(scaled(self._adapted, name, parameter.detach()).to(dtype))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the full training state, for a bitwise resume; returns a function that writes the copy to a folder, in
        any thread, while training continues."""
        began = time.monotonic()
        snapshots = {"": checkpoint.TrainerState.of(self.learner, self.version)}
        if self._critic is not None:
            snapshots["critic"] = checkpoint.TrainerState.of(self._critic, self.version)
        self._span("checkpoint", began)

        def write(folder: Path) -> None:
            for part, snapshot in snapshots.items():
                snapshot.write(folder / part)

        return write

    def save_checkpoint(self, folder: Path) -> None:
        """Write a snapshot now.

        Raises:
            StoreError: the folder cannot be written.
        """
        self.snapshot()(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore the training state written to `folder`.

        Raises:
            StoreError: the folder is incomplete, or of another model.
        """
        self._publication.hold()
        if self._critic is not None:
            checkpoint.load(folder / "critic", self._critic)
        self.version = checkpoint.load(folder, self.learner)

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _minibatches(self, samples: Sequence[Sample]) -> list[Minibatch]:
        parts = minibatches([len(sample.token_ids) for sample in samples], self._config.minibatches)
        config, aggregation, device = self._config, self._algorithm.aggregation, self.learner.model.device
        each = partial(minibatch, config=config, aggregation=aggregation, longest=self._longest, device=device)
        trajectories = len(samples) / len(parts) if parts else 0.0
        return [each([samples[i] for i in part], ranks=self._ranks, trajectories=trajectories) for part in parts]

    def _proximal_logprobs(self, parts: Sequence[Minibatch]) -> list[list[Tensor] | None]:
        """Proximal log-probabilities of all minibatches but the first, if the loss needs them; the first uses its
        training forward."""
        needed = self._algorithm.loss.anchor == "recomputed"
        return [self._gradients.evaluated(part) if needed and index else None for index, part in enumerate(parts)]

    def _step(self, part: Minibatch, rate: float, step: int, meter: Meter) -> bool:
        """One optimizer step of the policy and one of the critic; False if a gradient was not finite."""
        self._publication.hold()
        try:
            steps = [self.learner.step(rate, step)]
            meter.stepped(steps[0])
            if self._critic is not None:
                loss, fitted = self._critic.fit(part, step, version=self.version)
                meter.fitted(loss, fitted)
                steps.append(fitted)
        except TrainingDiverged as error:
            raise TrainingDiverged(error.step, error.in_a_row, part.ids) from None
        return all(one.taken for one in steps)

    def _span(self, name: str, began: float, size: int = 0) -> float:
        now = time.monotonic()
        self._spans.append(Span("trainer", name, began, now, self.version, size))
        return now
