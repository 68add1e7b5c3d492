"""The trainer: trains the policy on one batch per step, and publishes each new version.

    batch ─► samples ─► minibatches ─► micro-batches            (samples, packing)
                            │
                            ├─ proximal log-probs of minibatches 2 .. N, by the policy before the step
                            │
                            └─ for each minibatch: forward, loss, backward per micro-batch; then one optimizer step

The proximal policy is the policy before the step's first update (AReaL, section 5.2). The training forward of the first
minibatch is computed by that policy, so its detached log-probs are exactly the proximal ones. Only the later
minibatches need an extra forward before the first update, and only if the loss is anchored at the proximal policy.

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
from stretto.trainer.adapters import adapted_layers, adapter_parameters, merged, plain_parameters, scaled
from stretto.trainer.batch.minibatch import Minibatch, minibatch, minibatches
from stretto.trainer.batch.samples import NO_SCORES, Sample, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.gradients import Gradients
from stretto.trainer.messages import Evidence
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Learner, learning_rate
from stretto.trainer.outcomes import TokenMeter, TokenSink
from stretto.trainer.ranks import ALONE, Ranks
from stretto.trainer.reference import Reference, WithoutAdapters
from stretto.weights.mailbox import Publication, Publisher
from stretto.weights.shared_memory import digest_of_tensor


class Trainer:
    """Holds the trained policy with its optimizer and version, and trains, publishes and saves it.

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
        evidence: Evidence = "all",
    ) -> None:
        """Every rank has a trainer; all must call the same methods with the same arguments.

        Args:
            model: the policy in float32, loaded with packed attention.
            sampling: sampling settings of the engines.
            version: version of the policy.
            reference: required if the algorithm has a reference policy, otherwise None. A model with adapters can be
                its own reference to the initial policy; then None.
            critic: required if the algorithm has a critic, otherwise None.
            sink: receives the per-token results of the steps that it keeps; None: they are not kept.
            evidence: sampled tokens that show which weights an engine has (`messages.Evidence`).

        Raises:
            ValueError: a reference or critic is missing, or is given without need.
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
        self._config, self._algorithm, self._critic = config, algorithm, critic
        in_reward = algorithm.divergence("reward") is not None
        self._gradients = Gradients(self.learner, algorithm, None if in_reward else reference)
        self._in_reward = reference if in_reward else None
        self._longest, self._evidence = sampling.max_tokens, evidence
        self._spans: list[Span] = []
        self._publication = Publication(dict)  # of the last version that was copied
        self._text: tuple[Sequence[int], PackedTokens] | None = None  # of the last canary; a run has one text
        shape = model.config.get_text_config()
        self._depth, self._routed = int(shape.num_hidden_layers), routes(shape.to_dict())
        self._frozen = dict[str, TensorDigest]()  # of base weights under adapters, from the first publication on
        self.agreement: tuple[Agreement, ...] = ()  #: agreement of engines and trainer in the last step

    def train(self, batch: Batch) -> Update:
        """Train one step on the whole batch: one optimizer step per minibatch. Afterwards `version` is one higher.

        Raises:
            BoundViolated: the batch is for another version, or has tokens of a later version.
            RecipeError: a user's loss, correction or estimator raised, or an estimator returned wrong numbers.
            TrainingDiverged: `max_bad_steps` optimizer steps in a row had non-finite gradients.
        """
        if batch.version != self.version:
            raise BoundViolated(f"a batch of version {batch.version} for a trainer at version {self.version}")
        meter = Meter()
        sink = self._sink if self._sink is not None and self._sink.keeps(batch.step) else None
        tokens = TokenMeter() if sink is not None else None
        began = time.monotonic()
        values = self._critic.token_values(batch) if self._critic else NO_SCORES
        reference = self._in_reward.token_logprobs(batch) if self._in_reward else NO_SCORES
        sampled = samples_of(batch, self._algorithm, self._longest, values, reference, self._evidence)
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
        """Publish the policy as `version`; returns when engines can load it. Returns the canary by which engines prove
        it, with the log-probabilities of `text` (token ids); None without a text. `held`: see `copied`."""
        canary, _ = self.copied(publisher, text, held)()
        return canary

    def copied(
        self, publisher: Publisher, text: Sequence[int] = (), held: torch.dtype = torch.float32
    ) -> Callable[[], tuple[Canary | None, Span]]:
        """Start to copy the policy as the trainer's own `version`: all parameters, or only the adapters if it has any.
        Returns a function that publishes the copy by `publisher`, with its errors. That function may run in any thread
        while training continues; the next optimizer step waits only until the copy is complete.

        The function returns a canary and the span of the writing. The canary has the log-probabilities of `text` (token
        ids) and the digests of the tensors, by which engines prove the version; it is None without a text. `held`:
        dtype in which the engines hold base weights under adapters.
        """
        began = time.monotonic()
        canary = self._canary(text) if text else None
        began = self._span("prove", began) if text else began
        model = self.learner.model
        tensors = adapter_parameters(model) if self._adapted else model.named_parameters()
        self._publication = publication = publisher.copy(self.version, tensors, self._gathered)
        if canary is not None and self._adapted and not self._frozen:
            frozen = plain_parameters(model)
            self._frozen = {name: digest_of_tensor(self._gathered(name, one, held)) for name, one in frozen}
        version, base = self.version, self._frozen
        self._span("publish", began, publication.copied)

        def write() -> tuple[Canary | None, Span]:
            began = time.monotonic()
            digests = publication.write()
            span = Span("trainer", "write", began, time.monotonic(), version, publication.size)
            told = canary and msgspec.structs.replace(canary, digests={**base, **digests})
            return told, span

        return write

    @torch.no_grad()
    def _canary(self, text: Sequence[int]) -> Canary:
        """Score the canary's text; the digests of the tensors are not in the result yet."""
        if self._text is None or self._text[0] != text:
            self._text = text, pack_tokens([text], device=self.learner.model.device)
        logprobs = self.learner.logprobs(self._text[1], sampling=UNCHANGED).logprobs
        found = tuple(logprobs.tolist())
        return Canary(self.version, tuple(text), found, self._depth, self._config.dtype, routed=self._routed)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's full parameters by name, one at a time, gathered from the ranks and with adapters merged
        in. All ranks must iterate to the end."""
        for name, parameter in plain_parameters(self.learner.model):
            whole = self._ranks.full_tensor(parameter.detach())
            layer = self._adapted.get(name.removesuffix(".weight"))
            adapted = layer is not None and name.endswith(".weight")
            yield name, merged(layer, whole, self._ranks) if layer is not None and adapted else whole

    def _gathered(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter in `dtype`; all ranks must call it. B of an adapter is multiplied by the scale. Each rank
        rounds its shard before sending it."""
        return self._ranks.full_tensor(scaled(self._adapted, name, parameter.detach()).to(dtype))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the full training state, from which training continues bit for bit. Returns a function that writes the
        copy to a folder, or raises StoreError; it may run in any thread while training continues."""
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
        """Write the full training state to `folder`. Raises StoreError if it cannot be written."""
        self.snapshot()(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore the training state written to `folder`, `version` included. Raises StoreError if the folder is
        incomplete, or of another model."""
        self._publication.hold()
        if self._critic is not None:
            checkpoint.load(folder / "critic", self._critic)
        self.version = checkpoint.load(folder, self.learner)

    def drain_spans(self) -> list[Span]:
        """Return the spans since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    def _minibatches(self, samples: Sequence[Sample]) -> list[Minibatch]:
        parts = minibatches([len(sample.token_ids) for sample in samples], self._config.minibatches)
        config, aggregation, device = self._config, self._algorithm.aggregation, self.learner.model.device
        each = partial(minibatch, config=config, aggregation=aggregation, longest=self._longest, device=device)
        trajectories = len(samples) / len(parts) if parts else 0.0
        return [each([samples[i] for i in part], ranks=self._ranks, trajectories=trajectories) for part in parts]

    def _proximal_logprobs(self, parts: Sequence[Minibatch]) -> list[list[Tensor] | None]:
        """Log-probabilities of each minibatch by the policy before the step, if the loss needs them, else None. None
        for the first too, whose training forward gives them."""
        needed = self._algorithm.loss.anchor == "recomputed"
        return [self._gradients.evaluated(part) if needed and index else None for index, part in enumerate(parts)]

    def _step(self, part: Minibatch, rate: float, step: int, meter: Meter) -> bool:
        """Take one optimizer step of the policy and one of the critic; False if a gradient was not finite and its step
        was skipped. Raises TrainingDiverged if that makes `max_bad_steps` in a row."""
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
        """Add a span of `size` bytes that ends now; returns the time."""
        now = time.monotonic()
        self._spans.append(Span("trainer", name, began, now, self.version, size))
        return now
