"""Promises of a divergence that is part of the reward: every estimator of advantages by hand; a weight of zero, and a
reference that agrees, change nothing; as a reward k1 has the gradient of the divergence; a step is the equation written
out, answer by answer, whatever the packing; the reference is asked once and is not in the loss.
"""

import math
from collections.abc import Mapping
from typing import Annotated

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stretto.core.records import Sampling
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective import kl
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import ESTIMATORS as DOOR
from stretto.trainer.objective.estimators import EstimatorSection, RewardedCompletion
from stretto.trainer.objective.token_estimators import advantages_of
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from tests.tolerances import LOGITS, assert_close, near
from tests.trainer.batches import LONGEST, assert_same, batch, sample_logprobs
from tests.trainer.tiny import FORWARD, elsewhere, tiny

ESTIMATORS: TypeAdapter[EstimatorSection] = TypeAdapter(Annotated[EstimatorSection, DOOR])
CONFIG = TrainerConfig(learning_rate=3e-3, eps=1e-3, minibatches=2, weight_decay=0.1, max_grad_norm=0.7)
SAMPLING = Sampling(max_tokens=LONGEST)
#: Rewards 4 and 1; the first answer's tokens cost 1 and 2, the second one's single token gains a half.
GROUP = [RewardedCompletion(4.0, 2, range(2), (), (1.0, 2.0)), RewardedCompletion(1.0, 1, range(1), (), (-0.5,))]
#: Answer by answer 4 - 3 = 1 and 1 + 0.5 = 1.5; from each token on 1, 2 and 1.5.
MEAN, DEVIATION = 1.5, math.sqrt(0.5 / 3)

BY_HAND: Mapping[str, list[list[float]]] = {
    "reward": [[1.0, 1.0], [1.5]],
    "group_mean": [[-0.25, -0.25], [0.25]],
    "leave_one_out": [[-0.5, -0.5], [0.5]],
    "group": [[-1.0, -1.0], [1.0]],
    "gae": [[1.0, 2.0], [1.5]],
    "reinforce_pp": [[(1 - MEAN) / DEVIATION, (2 - MEAN) / DEVIATION], [0.0]],
}


def settings(into: str = "reward", estimator: str = "k1", weight: float = 0.5, **other: object) -> AlgorithmConfig:
    reference = {"into": into, "estimator": estimator, "weight": weight}
    return AlgorithmConfig.model_validate({"reference": reference} | other)


@pytest.mark.parametrize("name", BY_HAND)
def test_every_estimator_takes_the_costs_off_by_hand(name: str) -> None:
    (got,) = advantages_of(ESTIMATORS.validate_python(name), [GROUP])
    for answer, expected in zip(got, BY_HAND[name], strict=True):
        assert answer == pytest.approx(expected, abs=1e-5)


def test_a_discount_and_a_critic_see_the_costs_where_they_stand() -> None:
    # rewards -1 and 2; decay 0.5 * 0.8: -1 + 0.4 * 2
    (got,) = advantages_of(ESTIMATORS.validate_python({"kind": "gae", "gamma": 0.5, "lam": 0.8}), [GROUP[:1]])
    assert [*map(list, got)] == [pytest.approx([-0.2, 2.0])]
    # with values 1 and 3: delta_1 = 2 - 3, delta_0 = -1 + 0.5 * 3 - 1; A_0 = -0.5 + 0.4 * -1
    judged = [RewardedCompletion(4.0, 2, range(2), (1.0, 3.0), (1.0, 2.0))]
    (got,) = advantages_of(ESTIMATORS.validate_python({"kind": "gae", "gamma": 0.5, "lam": 0.8}), [judged])
    assert [*map(list, got)] == [pytest.approx([-0.9, -1.0])]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_reference_that_agrees_and_a_weight_of_zero_change_nothing(name: str, estimator: str) -> None:
    given = batch(3)
    agreeing = {t.id: t.behavior_logprobs for g in given.groups for t in g.trajectories}
    plain = samples_of(given, AlgorithmConfig.model_validate({"advantages": name}), LONGEST).samples
    samples = samples_of(
        given, settings(estimator=estimator, advantages=name), LONGEST, reference_logprobs=agreeing
    ).samples
    assert [tuple(sample.advantages) for sample in samples] == [pytest.approx(sample.advantages) for sample in plain]
    far = {name: [x - 1 for x in logprobs] for name, logprobs in agreeing.items()}
    samples = samples_of(given, settings(weight=0.0, advantages=name), LONGEST, reference_logprobs=far).samples
    assert [tuple(sample.advantages) for sample in samples] == [pytest.approx(sample.advantages) for sample in plain]


@given(*[st.lists(st.floats(-3, 3), min_size=4, max_size=4)] * 2)
def test_as_a_reward_k1_has_the_gradient_of_the_divergence(p: list[float], q: list[float]) -> None:
    """REINFORCE with the reward -k1, in the mean over tokens that the policy itself sampled."""
    reference, gradients = torch.tensor(q).log_softmax(0), []
    for kind in ("divergence", "reward"):
        logits = torch.tensor(p, requires_grad=True)
        policy = logits.log_softmax(0)
        sampled = policy.detach()
        reward = -kl.k1(sampled, reference)
        values = {
            "divergence": (policy.exp() * (policy - reference)).sum(),
            "reward": -(sampled.exp() * reward * policy).sum(),
        }
        values[kind].backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
    assert_close(gradients[0], gradients[1], size=6.0)  # logarithms of probabilities


def trainer(algorithm: AlgorithmConfig, tokens: int = 24) -> Trainer:
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    reference = ReferencePolicy(elsewhere(tiny()), config, SAMPLING)
    return Trainer(tiny(), config, algorithm, SAMPLING, reference=reference)


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_the_reference_says_of_each_answer_what_it_says_of_it_alone(tokens: int) -> None:
    given, config = batch(1), CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    said = ReferencePolicy(elsewhere(tiny()), config, SAMPLING).token_logprobs(given)
    samples = samples_of(given, AlgorithmConfig(), LONGEST).samples
    assert set(said) == {sample.id for sample in samples}
    for sample in samples:
        alone, _ = sample_logprobs(elsewhere(tiny()), sample)
        assert said[sample.id] == near(alone.tolist(), FORWARD, size=LOGITS)


def by_hand(estimator: str, x: float) -> float:
    """x = reference / policy."""
    return {"k1": -math.log(x), "k2": math.log(x) ** 2 / 2, "k3": x - 1 - math.log(x)}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_step_is_one_with_rewards_that_were_lowered_by_hand(estimator: str) -> None:
    given, algorithm = batch(0), settings(estimator=estimator, advantages="gae")
    update = (one := trainer(algorithm)).train(given)
    said = trainer(algorithm)._in_reward.token_logprobs(given)  # type: ignore[union-attr]
    divergences = {}
    for t in (t for group in given.groups for t in group.trajectories):
        x = [math.exp(r - b) for r, b in zip(said[t.id], t.behavior_logprobs, strict=True)]
        divergences[t.id] = [by_hand(estimator, ratio) for ratio in x]
        expected = [t.reward - 0.5 * sum(divergences[t.id][k:]) for k in range(len(x))]
        (sample,) = (
            sample
            for sample in samples_of(given, algorithm, LONGEST, reference_logprobs=said).samples
            if sample.id == t.id
        )
        assert tuple(sample.advantages) == near(expected, FORWARD, size=LOGITS * max(x))
    tokens = [divergence for answer in divergences.values() for divergence in answer]
    assert update.metrics["kl_reference"] == near(sum(tokens) / len(tokens), FORWARD, size=max(tokens))
    plain = Trainer(tiny(), CONFIG, settings(advantages="gae", weight=0.0), SAMPLING, reference=one._in_reward)
    plain.train(given)
    assert not torch.equal(*(next(iter(t.learner.model.parameters())) for t in (one, plain)))


def test_it_is_no_term_of_the_loss() -> None:
    """With a weight of zero a step is the step without a reference, to the last bit."""
    with_one = trainer(settings(weight=0.0))
    without = Trainer(tiny(), CONFIG.model_copy(update={"micro_batch_tokens": 24}), AlgorithmConfig(), SAMPLING)
    for one in (with_one, without):
        one.train(batch(0))
    assert_same(with_one.learner.model, without.learner.model)
