"""Promises of a training step: the first minibatch is its own anchor and later ones are anchored before the first
update; versions go up by one; a resumed trainer goes on bit for bit; bad gradients are counted. Its equation is in
test_objectives.py.
"""

import math
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch

from stretto.core.errors import BoundViolated, StoreError, TrainingDiverged
from stretto.core.records import Batch, Sampling, Segment, Trajectory
from stretto.trainer.batch.minibatch import minibatches
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import FromTrainer, Published, Train, Trained
from stretto.trainer.objective.algorithm import AlgorithmConfig, ReferenceConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.surrogates import LOSSES
from stretto.trainer.optimizer import UNCHANGED
from stretto.trainer.ranks import ALONE
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.trainer import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.tolerances import EPS, LOGITS, RATE, near, rounding
from tests.trainer.batches import LONGEST, assert_same, batch
from tests.trainer.tiny import FORWARD, spec_of, tiny

CONFIG = TrainerConfig(
    learning_rate=RATE, eps=EPS, minibatches=3, micro_batch_tokens=24, weight_decay=0.1, max_grad_norm=0.7
)
ALGORITHM = AlgorithmConfig(correction=CORRECTIONS("mask", high=4.0))
EXACT = rounding(FORWARD, size=LOGITS)


def test_the_step_reports_what_it_did() -> None:
    model = tiny()
    update = Trainer(model, CONFIG, ALGORITHM).train(batch(0, model))
    tokens = sum(len(t.token_ids) for g in batch(0).groups for t in g.trajectories)
    assert (update.step, update.version, update.trained_tokens, update.masked_tokens) == (0, 1, tokens, 0)
    metrics = update.metrics
    # The model itself sampled.
    assert metrics["behavior_logprob_error"] <= metrics["behavior_logprob_error_max"] < EXACT
    assert metrics["behavior_weight_mean"] == near(1.0, FORWARD, size=LOGITS)
    assert (metrics["learning_rate"], metrics["bad_steps"]) == (RATE, 0)
    assert metrics["grad_norm"] > 0
    assert metrics["kl_behavior"] >= 0
    assert 0 < metrics["effective_samples"] <= 1 + 1e-6
    assert 0 <= metrics["outlier_fraction"] <= 1
    assert "entropy" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_on_the_first_minibatch_the_ratio_is_exactly_one() -> None:
    config = CONFIG.model_copy(update={"minibatches": 1})
    metrics = Trainer(tiny(), config, ALGORITHM).train(batch(0)).metrics
    assert (metrics["ratio_mean"], metrics["clip_fraction"]) == (1.0, 0.0)


def test_later_minibatches_are_anchored_before_the_first_update() -> None:
    """With a large learning rate the policy has moved by the second minibatch, and the ratio shows it."""
    metrics = Trainer(tiny(), CONFIG.model_copy(update={"eps": 1e-5}), ALGORITHM).train(batch(0)).metrics
    assert abs(metrics["ratio_mean"] - 1) > 1e-3
    assert metrics["clip_fraction"] > 0


def test_ppo_is_anchored_at_the_behaviour_policy() -> None:
    metrics = Trainer(tiny(), CONFIG, AlgorithmConfig(loss=LOSSES("ppo"), entropy=True)).train(batch(0)).metrics
    assert metrics["behavior_weight_mean"] == 1.0
    assert abs(metrics["ratio_mean"] - 1) > 1e-2
    assert metrics["behavior_logprob_error_max"] > metrics["behavior_logprob_error"] > 1e-2
    assert 0 < metrics["entropy"] <= math.log(13)


@pytest.mark.parametrize(
    ("anchor", "minibatches", "forwards"),
    [("recomputed", 1, 1), ("behavior", 1, 1), ("recomputed", 3, 5), ("interpolated", 3, 3)],
)
def test_nothing_is_computed_twice(anchor: str, minibatches: int, forwards: int) -> None:
    """Each minibatch is one forward, and the policy before the step one for each of the later minibatches."""
    loss = {"kind": "ppo" if anchor == "behavior" else "decoupled_ppo", "anchor": anchor}
    config = CONFIG.model_copy(update={"minibatches": minibatches, "micro_batch_tokens": 10_000})
    trainer = Trainer(tiny(), config, AlgorithmConfig.model_validate({"loss": loss}))
    calls: list[int] = []
    trainer.learner.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    trainer.train(batch(0))
    assert len(calls) == forwards


def test_a_reference_is_needed_where_it_is_asked_for_and_measured() -> None:
    algorithm = AlgorithmConfig(reference=ReferenceConfig(weight=0.1))
    with pytest.raises(ValueError, match="needs a reference policy"):
        Trainer(tiny(), CONFIG, algorithm)
    reference = ReferencePolicy(tiny(), CONFIG, UNCHANGED)
    config = CONFIG.model_copy(update={"minibatches": 1})
    trainer = Trainer(tiny(), config, algorithm, reference=reference)
    assert trainer.train(batch(0)).metrics["kl_reference"] == near(0.0, FORWARD, size=LOGITS)
    assert trainer.train(batch(1)).metrics["kl_reference"] > EXACT
    assert "kl_reference" not in Trainer(tiny(), config, AlgorithmConfig()).train(batch(0)).metrics


def test_tokens_that_are_too_old_are_context_only() -> None:
    update = Trainer(tiny(), CONFIG, ALGORITHM, version=5).train(batch(5, oldest_trainable=5))
    versions = [v for g in batch(5).groups for t in g.trajectories for v in t.versions]
    assert update.trained_tokens == versions.count(5)
    assert update.masked_tokens == len(versions) - versions.count(5)


def test_a_batch_without_loss_tokens_publishes_the_same_policy_as_the_next_version() -> None:
    trainer = Trainer(tiny(), CONFIG, ALGORITHM, version=2)
    update = trainer.train(batch(2, oldest_trainable=9))
    assert (update.version, update.trained_tokens) == (3, 0)
    assert_same(trainer.learner.model, tiny())
    assert "loss" not in update.metrics


def test_a_batch_of_another_version_stops_the_run() -> None:
    with pytest.raises(BoundViolated, match="batch of version 3 for a trainer at version 0"):
        Trainer(tiny(), CONFIG, ALGORITHM).train(batch(3))


def test_only_the_answers_of_a_step_that_was_not_taken_are_named() -> None:
    given = batch(0)
    (first, *others), rest = given.groups[0].trajectories, given.groups[1:]
    bad = msgspec.structs.replace(given.groups[0], trajectories=(_poisoned(first), *others))
    trainer = Trainer(tiny(), CONFIG, AlgorithmConfig(loss=LOSSES("ppo")))
    update = trainer.train(msgspec.structs.replace(given, groups=(bad, *rest)))
    assert update.metrics["bad_steps"] == 1
    samples = samples_of(given, ALGORITHM, LONGEST).samples
    parts = [[samples[i].id for i in part] for part in minibatches([len(sample.token_ids) for sample in samples], 3)]
    assert list(update.skipped) == next(part for part in parts if first.id in part)
    assert trainer.train(batch(1)).skipped == ()


def test_a_training_that_diverges_names_the_last_answers() -> None:
    trainer = Trainer(tiny(), CONFIG.model_copy(update={"max_bad_steps": 2}), AlgorithmConfig(loss=LOSSES("ppo")))
    with pytest.raises(TrainingDiverged, match=r"2 optimizer steps in a row .* \(the last over .*1/\d.*\); lower"):
        trainer.train(_poison(batch(0)))


def _poison(given: Batch) -> Batch:
    """Behaviour log-probs that are no numbers."""

    groups = tuple(
        msgspec.structs.replace(g, trajectories=tuple(_poisoned(t) for t in g.trajectories)) for g in given.groups
    )
    return msgspec.structs.replace(given, groups=groups)


def _poisoned(t: Trajectory) -> Trajectory:
    (segment,) = t.segments
    logprobs = tuple(math.nan for _ in segment.behavior_logprobs)
    return msgspec.structs.replace(t, segments=(Segment.of(segment.token_ids, logprobs, segment.versions),))


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, first = Trainer(tiny(), CONFIG, ALGORITHM), Trainer(tiny(), CONFIG, ALGORITHM)
    for version in range(4):
        straight.train(batch(version))
    for version in range(2):
        first.train(batch(version))
    first.save_checkpoint(tmp_path / "v2")
    torch.manual_seed(99)
    resumed = Trainer(tiny(), CONFIG, ALGORITHM)
    resumed.load_checkpoint(tmp_path / "v2")
    assert resumed.version == 2
    for version in range(2, 4):
        resumed.train(batch(version))
    assert_same(straight.learner.model, resumed.learner.model)


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/v0: the checkpoint cannot be written: .*Not a directory"):
        Trainer(tiny(), CONFIG, ALGORITHM).save_checkpoint(tmp_path / "file" / "v0")


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001.safetensors", "trainer.json"])
def test_a_torn_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    trainer = Trainer(tiny(), CONFIG, ALGORITHM)
    trainer.train(batch(0))
    trainer.save_checkpoint(tmp_path / "v1")
    path = tmp_path / "v1" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fresh = Trainer(tiny(), CONFIG, ALGORITHM)
    with pytest.raises(StoreError, match="v1 cannot be read"):
        fresh.load_checkpoint(tmp_path / "v1")
    assert fresh.version == 0
    assert_same(fresh.learner.model, tiny())


def test_what_is_published_is_the_policy_and_spans_tell_the_story(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), CONFIG, ALGORITHM)
    trainer.train(batch(0))
    publisher = SharedMemoryPublisher("t", tmp_path)
    trainer.publish(publisher)
    loaded = SharedMemorySubscriber("t", tmp_path).load(1)
    assert all(torch.equal(loaded[name], p) for name, p in trainer.learner.model.named_parameters())
    spans = trainer.drain_spans()
    assert [(span.name, span.version) for span in spans] == [("proximal", 0), ("update", 0), ("publish", 1)]
    assert all(span.start <= span.end for span in spans)
    assert trainer.drain_spans() == []


def test_a_step_is_reported_before_its_version_is_proven_and_copied(tmp_path: Path) -> None:
    """The conductor prepares the next order meanwhile."""
    tiny().save_pretrained(tmp_path / "start")
    told: SimpleQueue[FromTrainer] = SimpleQueue()
    spec = spec_of(tmp_path / "start", CONFIG, Sampling(max_tokens=4), canary=(1, 2, 3))
    role = TrainerRole(spec, SharedMemoryPublisher("t", tmp_path), ALONE, told.put)
    trained = role.carry_out(Train(batch=batch(0)))
    assert isinstance(trained, Trained)
    assert [span.name for span in trained.spans] == ["proximal", "update"]
    assert told.empty()
    role.replied()
    notice = told.get(timeout=10)
    assert isinstance(notice, Published)
    assert notice.canary is not None
    assert [span.name for span in notice.before] == ["prove", "publish"]
    assert SharedMemorySubscriber("t", tmp_path).newest() == notice.version == 1
