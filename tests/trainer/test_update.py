"""Promises of a training step: it equals equation 5 written out without packing, whatever the micro-batches; the first
minibatch is its own anchor and later ones are anchored before the first update; versions go up by one; a resumed
trainer goes on bit for bit; bad gradients are counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Batch, Completion, Group, Outcome, Prompt, StopReason, Trajectory, Verdict
from stretto.model.logprobs import pack_tokens, token_logprobs
from stretto.trainer.algorithm import PPO, AlgorithmConfig, Mask
from stretto.trainer.config import TrainerConfig
from stretto.trainer.learner import UNCHANGED
from stretto.trainer.packing import minibatches
from stretto.trainer.rows import Row, rows_of
from stretto.trainer.update import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber

Build = Callable[[], PreTrainedModel]
CONFIG = TrainerConfig(learning_rate=3e-3, minibatches=3, micro_batch_tokens=24, weight_decay=0.1, max_grad_norm=0.7)
ALGORITHM = AlgorithmConfig(correction=Mask(high=4.0))
GROUPS, ANSWERS, LONGEST = 3, 4, 7


def batch(version: int, model: PreTrainedModel | None = None, oldest_trainable: int = 0) -> Batch:
    """Answers of 1 to 7 tokens; the behaviour policy is the given model, or something else altogether."""
    rng = random.Random(version)
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(id=str(g), token_ids=tuple(rng.randrange(13) for _ in range(2 + g)), text="", answer="")
        trajectories = tuple(_trajectory(rng, prompt, m, version, model) for m in range(ANSWERS))
        groups.append(Group(id=str(g), prompt=prompt, admitted_version=0, trajectories=trajectories))
    return Batch(step=version, version=version, groups=tuple(groups), oldest_trainable=oldest_trainable)


def _trajectory(
    rng: random.Random, prompt: Prompt, member: int, version: int, model: PreTrainedModel | None
) -> Trajectory:
    answer = tuple(rng.randrange(13) for _ in range(rng.randint(1, LONGEST)))
    logprobs = tuple(rng.uniform(-4, -1) for _ in answer)
    if model is not None:
        start = len(prompt.token_ids)
        packed = pack_tokens([prompt.token_ids + answer], [range(start, start + len(answer))])
        logprobs = tuple(token_logprobs(model, packed, UNCHANGED).logprobs.tolist())
    completion = Completion(
        request=prompt.id,
        member=member,
        token_ids=answer,
        behavior_logprobs=logprobs,
        versions=tuple(sorted(rng.randint(max(0, version - 2), version) for _ in answer)),
        stop_reason=StopReason.LENGTH,
    )
    verdict = Verdict(outcome=Outcome.RIGHT, reward=float(rng.randrange(3)))
    return Trajectory(id=f"{prompt.id}/{member}", completion=completion, verdict=verdict, text="")


def row_logprobs(model: PreTrainedModel, row: Row) -> Tensor:
    """The plain module on one row, no packing of several: log p of its loss tokens."""
    packed = pack_tokens([row.token_ids])
    ids, positions = packed.input_ids, packed.packing.position_ids
    logits = model(ids, position_ids=positions, use_cache=False, packing=packed.packing).logits[0]
    at = torch.tensor(row.loss_positions)
    chosen: Tensor = logits.log_softmax(-1)[at - 1].gather(1, ids[0, at][:, None])[:, 0]
    return chosen


def plain_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Equation 5 written out: proximal log-probs of all rows first, then three optimizer steps over single rows."""
    rows = rows_of(batch, ALGORITHM, LONGEST).rows
    with torch.no_grad():
        proximal = [row_logprobs(model, row) for row in rows]
    for part in minibatches([len(row.token_ids) for row in rows], 3):
        terms = []
        for i in part:
            ratio = (row_logprobs(model, rows[i]) - proximal[i]).exp()
            weight = (proximal[i] - torch.tensor(rows[i].behavior_logprobs)).exp()
            weight = torch.where(weight > 4.0, 0.0, weight)
            score = torch.tensor(rows[i].advantages)
            terms.append(weight * torch.minimum(ratio * score, ratio.clamp(0.8, 1.2) * score))
        optimizer.zero_grad()
        (-torch.cat(terms).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-5)


def assert_same(left: PreTrainedModel, right: PreTrainedModel, tolerance: float = 0.0) -> None:
    for (name, ours), theirs in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("tokens", "fewest"), [(10_000, 1), (24, 1), (1, 1), (10_000, 3)])
def test_a_step_is_equation_5_whatever_the_micro_batches(build: Build, tokens: int, fewest: int) -> None:
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens, "min_micro_batches": fewest})
    trainer, reference = Trainer(build(), config, ALGORITHM), build()
    optimizer = adamw(reference)
    for version in range(3):
        trainer.train(batch(version))
        plain_step(reference, optimizer, batch(version))
    assert_same(trainer.learner.model, reference, tolerance=2e-5)


def test_a_step_moves_the_policy_towards_what_was_rewarded(build: Build) -> None:
    model = build()
    trainer = Trainer(model, CONFIG.model_copy(update={"learning_rate": 1e-3}), ALGORITHM)
    given = batch(0, model)
    rows = rows_of(given, ALGORITHM, LONGEST).rows

    def likelihood() -> float:
        with torch.no_grad():
            return sum(float(row_logprobs(model, row).sum()) * row.advantages[0] for row in rows)

    before = likelihood()
    trainer.train(given)
    assert likelihood() > before


def test_the_step_reports_what_it_did(build: Build) -> None:
    model = build()
    update = Trainer(model, CONFIG, ALGORITHM).train(batch(0, model))
    tokens = sum(len(t.completion.token_ids) for g in batch(0).groups for t in g.trajectories)
    assert (update.step, update.version, update.trained_tokens, update.masked_tokens) == (0, 1, tokens, 0)
    metrics = update.metrics
    assert metrics["behavior_logprob_error"] < 1e-5  # the model itself was the behaviour policy
    assert metrics["behavior_weight_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["learning_rate"] == 3e-3
    assert metrics["bad_steps"] == 0
    assert metrics["grad_norm"] > 0
    assert metrics["kl_behavior"] >= 0
    assert "entropy" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_on_the_first_minibatch_the_ratio_is_exactly_one(build: Build) -> None:
    config = CONFIG.model_copy(update={"minibatches": 1})
    metrics = Trainer(build(), config, ALGORITHM).train(batch(0)).metrics
    assert metrics["ratio_mean"] == 1.0
    assert metrics["clip_fraction"] == 0.0


def test_later_minibatches_are_anchored_before_the_first_update(build: Build) -> None:
    """With a large learning rate the policy has moved by the second minibatch, and the ratio shows it."""
    metrics = Trainer(build(), CONFIG.model_copy(update={"learning_rate": 0.05}), ALGORITHM).train(batch(0)).metrics
    assert abs(metrics["ratio_mean"] - 1) > 1e-3
    assert metrics["clip_fraction"] > 0


def test_ppo_is_anchored_at_the_behaviour_policy(build: Build) -> None:
    algorithm = AlgorithmConfig(loss=PPO(), entropy=True)
    metrics = Trainer(build(), CONFIG, algorithm).train(batch(0)).metrics
    assert metrics["behavior_weight_mean"] == 1.0
    assert abs(metrics["ratio_mean"] - 1) > 1e-2
    assert metrics["behavior_logprob_error"] > 1e-2
    assert 0 < metrics["entropy"] <= math.log(13)


def test_tokens_that_are_too_old_are_context_only(build: Build) -> None:
    update = Trainer(build(), CONFIG, ALGORITHM, version=5).train(batch(5, oldest_trainable=5))
    versions = [v for g in batch(5).groups for t in g.trajectories for v in t.completion.versions]
    assert update.trained_tokens == versions.count(5)
    assert update.masked_tokens == len(versions) - versions.count(5)


def test_a_batch_without_loss_tokens_publishes_the_same_policy_as_the_next_version(build: Build) -> None:
    trainer = Trainer(build(), CONFIG, ALGORITHM, version=2)
    update = trainer.train(batch(2, oldest_trainable=9))
    assert (update.version, update.trained_tokens) == (3, 0)
    assert_same(trainer.learner.model, build())
    assert "loss" not in update.metrics


def test_a_batch_of_another_version_stops_the_run(build: Build) -> None:
    with pytest.raises(BoundViolated, match="batch of version 3 for a trainer at version 0"):
        Trainer(build(), CONFIG, ALGORITHM).train(batch(3))


def test_a_batch_that_is_not_finite_changes_nothing_and_is_reported(build: Build) -> None:
    trainer = Trainer(build(), CONFIG, AlgorithmConfig(loss=PPO()))
    update = trainer.train(_poison(batch(0)))
    assert update.metrics["bad_steps"] == 3
    assert_same(trainer.learner.model, build())


def _poison(given: Batch) -> Batch:
    """Behaviour log-probs so low that policy / behaviour overflows."""

    def poison(t: Trajectory) -> Trajectory:
        logprobs = tuple(-1e4 for _ in t.completion.behavior_logprobs)
        completion = msgspec.structs.replace(t.completion, behavior_logprobs=logprobs)
        return msgspec.structs.replace(t, completion=completion)

    groups = tuple(
        msgspec.structs.replace(g, trajectories=tuple(poison(t) for t in g.trajectories)) for g in given.groups
    )
    return msgspec.structs.replace(given, groups=groups)


def test_a_resumed_trainer_goes_on_bit_for_bit(build: Build, tmp_path: Path) -> None:
    straight, first = Trainer(build(), CONFIG, ALGORITHM), Trainer(build(), CONFIG, ALGORITHM)
    for version in range(4):
        straight.train(batch(version))
    for version in range(2):
        first.train(batch(version))
    first.save_checkpoint(tmp_path / "v2")
    torch.manual_seed(99)
    resumed = Trainer(build(), CONFIG, ALGORITHM)
    resumed.load_checkpoint(tmp_path / "v2")
    assert resumed.version == 2
    for version in range(2, 4):
        resumed.train(batch(version))
    assert_same(straight.learner.model, resumed.learner.model)


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_with_the_place(build: Build, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/v0: the checkpoint cannot be written: .*Not a directory"):
        Trainer(build(), CONFIG, ALGORITHM).save_checkpoint(tmp_path / "file" / "v0")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer.json"])
def test_a_torn_checkpoint_is_refused_and_changes_nothing(build: Build, tmp_path: Path, name: str) -> None:
    trainer = Trainer(build(), CONFIG, ALGORITHM)
    trainer.train(batch(0))
    trainer.save_checkpoint(tmp_path / "v1")
    path = tmp_path / "v1" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fresh = Trainer(build(), CONFIG, ALGORITHM)
    with pytest.raises(StoreError, match="v1 cannot be read"):
        fresh.load_checkpoint(tmp_path / "v1")
    assert fresh.version == 0
    assert_same(fresh.learner.model, build())


def test_a_checkpoint_of_another_model_is_refused_by_the_names_that_differ(build: Build, tmp_path: Path) -> None:
    trainer = Trainer(build(), CONFIG, ALGORITHM)
    trainer.save_checkpoint(tmp_path / "v0")
    smaller = build()
    del smaller.model.layers[1]
    smaller.config.num_hidden_layers = 1
    with pytest.raises(StoreError, match=r"model\.layers\.1\."):
        Trainer(smaller, CONFIG, ALGORITHM).load_checkpoint(tmp_path / "v0")


def test_what_is_published_is_the_policy_and_spans_tell_the_story(build: Build, tmp_path: Path) -> None:
    trainer = Trainer(build(), CONFIG, ALGORITHM)
    trainer.train(batch(0))
    publisher = SharedMemoryPublisher("t", tmp_path)
    trainer.publish(publisher)
    loaded = SharedMemorySubscriber("t", tmp_path).load(1)
    assert all(torch.equal(loaded[name], p) for name, p in trainer.learner.model.named_parameters())
    spans = trainer.drain_spans()
    assert [(span.name, span.version) for span in spans] == [("proximal", 0), ("update", 0), ("publish", 1)]
    assert all(span.start <= span.end for span in spans)
    assert trainer.drain_spans() == []
