"""Promises about a trajectory of several turns: given tokens are context, and only sampled ones are trained on.

- By hand: places, log-probabilities, staleness, advantages, values, returns and the KL are those of sampled tokens.
- A critic and a reference policy score sampled tokens alone, each in its whole context.
- Its loss and gradient are those of the same tokens as two samples of a single turn with the same context.
- Given tokens never get a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from stretto.core.records import Batch, Group, Outcome, Prompt, Sampling, Segment, StopReason, Trajectory, Verdict
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.trainer.batch.minibatch import minibatch
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.batch.scoring import score_tokens
from stretto.trainer.config import CriticConfig, OptimizerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig, ReferenceConfig
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.losses import evaluate, objective
from stretto.trainer.objective.tokens import LossTokens
from stretto.trainer.optimizer import Learner
from tests.tolerances import LOGITS, assert_close, near
from tests.trainer.tiny import BACKWARD, FORWARD

Build = Callable[[], PreTrainedModel]

PROMPT = Prompt(id="0", token_ids=(5, 12), text="", answer="")
FIRST = Segment.of(token_ids=(4, 9), behavior_logprobs=(-0.5, -1.0), versions=(5, 6), stop_reason=StopReason.STOP)
TOOL = Segment.of(token_ids=(7, 7, 3))
SECOND = Segment.of(token_ids=(8, 2), behavior_logprobs=(-1.5, -2.0), versions=(6, 7), stop_reason=StopReason.STOP)
TOKENS = (5, 12, 4, 9, 7, 7, 3, 8, 2)  # sampled: 2, 3 and 7, 8
LONGEST = 8
CONFIG = OptimizerConfig()
CPU = torch.device("cpu")


def batch(*segments: Segment, oldest_trainable: int = 0, reward: float = 1.0) -> Batch:
    verdict = Verdict(outcome=Outcome.RIGHT, reward=reward)
    trajectory = Trajectory(id="g/0", segments=segments, verdict=verdict, text="")
    group = Group(id="g", prompt=PROMPT, admitted_version=5, trajectories=(trajectory,))
    return Batch(step=8, version=7, groups=(group,), oldest_trainable=oldest_trainable)


def test_two_turns_by_hand() -> None:
    (sample,) = samples_of(
        batch(FIRST, TOOL, SECOND), AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST
    ).samples
    assert sample == Sample(
        "g/0", TOKENS, 2, (2, 3, 7, 8), (-0.5, -1.0, -1.5, -2.0), (2, 1, 1, 0), (1.0, 1.0, 1.0, 1.0)
    )


def test_sampled_tokens_that_are_too_old_are_context_like_given_ones_and_alone_are_counted_as_masked() -> None:
    old = batch(FIRST, TOOL, SECOND, oldest_trainable=6)
    sampled = samples_of(old, AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST)
    (sample,) = sampled.samples
    assert (tuple(sample.loss_positions), tuple(sample.behavior_logprobs)) == ((3, 7, 8), (-1.0, -1.5, -2.0))
    assert sampled.masked_tokens == 1


def test_values_advantages_and_returns_go_from_sampled_token_to_sampled_token() -> None:
    # values 0.5 before each; gamma = 1, lam = 0.5: delta = 0, 0, 0, 0.5, so A = 0.0625, 0.125, 0.25, 0.5 and R = A + V
    config = AlgorithmConfig(advantages=ESTIMATORS("gae", lam=0.5, critic=CriticConfig()))
    (sample,) = samples_of(batch(FIRST, TOOL, SECOND), config, LONGEST, {"g/0": [0.5] * 4}).samples
    assert tuple(sample.advantages) == (0.0625, 0.125, 0.25, 0.5)
    assert tuple(sample.values) == (0.5, 0.5, 0.5, 0.5)
    assert tuple(sample.returns) == (0.5625, 0.625, 0.75, 1.0)


def test_a_kl_in_the_reward_is_that_of_the_sampled_tokens() -> None:
    # k1 = behavior - reference = 0.5, 0, -0.5, 1: their sum is 1, their mean 0.25, and the reward 1 - 0.1
    reference = ReferenceConfig(estimator="k1", weight=0.1, into="reward")
    config = AlgorithmConfig(advantages=ESTIMATORS("reward"), reference=reference)
    said = {"g/0": [-1.0, -1.0, -1.0, -3.0]}
    sampled = samples_of(batch(FIRST, TOOL, SECOND), config, LONGEST, reference_logprobs=said)
    assert sampled.kl_reference == 0.25
    assert tuple(sampled.samples[0].advantages) == pytest.approx((0.9, 0.9, 0.9, 0.9))


def test_batch_scoring_scores_the_sampled_tokens_in_their_whole_context(build: Build) -> None:
    learner = Learner(build(), CONFIG)
    scores = score_tokens(batch(FIRST, TOOL, SECOND), 64, CPU, lambda packed: learner.logprobs(packed).logprobs)
    every = token_logprobs(build(), pack_tokens([TOKENS]), Sampling(max_tokens=1)).logprobs  # of tokens 1 .. 8
    assert scores["g/0"] == near(every[[1, 2, 6, 7]].tolist(), FORWARD, size=LOGITS)


def test_a_trajectory_that_was_cut_off_is_scored_once_more_behind_its_last_token() -> None:
    places: list[int] = []

    def places_of(packed: object) -> torch.Tensor:
        places.extend(packed.before.tolist())  # type: ignore[attr-defined]
        return torch.zeros(len(places))

    scores = score_tokens(batch(FIRST, TOOL, SECOND), 64, CPU, places_of, continues=lambda _: True)
    assert places == [1, 2, 6, 7, 8]
    assert len(scores["g/0"]) == 5


def loss_of(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """The recipe's loss over these samples as one minibatch, anchored at half the distance to what sampled."""
    learner = Learner(model, CONFIG)
    losses = []
    for micro in minibatch(samples, CONFIG, "token_mean", LONGEST, CPU).micro_batches:
        policy = learner.logprobs(micro.packed).logprobs
        anchor = (policy.detach() + micro.behavior_logprobs) / 2
        tokens = LossTokens(micro.behavior_logprobs, anchor, micro.advantages, micro.scale, micro.sequences)
        losses.append(evaluate(objective(AlgorithmConfig()), policy, tokens).value)
    return torch.stack(losses).sum()


def test_two_turns_have_the_loss_and_the_gradient_of_two_single_turns_with_the_same_context(build: Build) -> None:
    """Of a mean over tokens, for a loss that looks at tokens."""
    config = AlgorithmConfig(advantages=ESTIMATORS("reward"))
    (both,) = samples_of(batch(FIRST, TOOL, SECOND, reward=0.5), config, LONGEST).samples
    (first,) = samples_of(batch(FIRST, reward=0.5), config, LONGEST).samples
    history = replace(both, prompt_tokens=7, loss_positions=(7, 8), behavior_logprobs=SECOND.behavior_logprobs)
    second = replace(history, id="g/1", staleness=(1, 0), advantages=(0.5, 0.5))
    one, two = build(), build()
    together, apart = loss_of(one, [both]), loss_of(two, [first, second])
    assert_close(together, apart, FORWARD, size=LOGITS)
    together.backward()
    apart.backward()
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, BACKWARD, size=LOGITS)


SEGMENTS = st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=5)


@given(SEGMENTS, st.integers(0, 7))
def test_given_tokens_never_get_a_gradient(shape: list[tuple[bool, int]], oldest: int) -> None:
    """The log-probability of every token is a parameter of its own: those of given tokens, of the prompt and of tokens
    that are too old stay without a gradient, all others get one."""
    segments, expected = [], [False] * 2
    for index, (sampled, length) in enumerate(shape):
        version = min(index + 3, 7)
        logged = ((-1.0,) * length, (version,) * length) if sampled else ((), ())
        segments.append(Segment.of((6,) * length, *logged))
        expected += [sampled and version >= oldest] * length
    samples = samples_of(
        batch(*segments, oldest_trainable=oldest), AlgorithmConfig(advantages=ESTIMATORS("reward")), LONGEST
    ).samples
    logprobs = torch.full((len(expected),), -1.0, requires_grad=True)
    total = logprobs.sum() * 0
    parts = [minibatch(samples, CONFIG, "token_mean", LONGEST, CPU)] if samples else []
    for micro in (micro for part in parts for micro in part.micro_batches):
        policy = logprobs[micro.packed.wanted]
        anchor = policy.detach()
        tokens = LossTokens(micro.behavior_logprobs, anchor, micro.advantages, micro.scale, micro.sequences)
        total = total + evaluate(objective(AlgorithmConfig()), policy, tokens).value
    total.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == expected
