"""Promises: the three estimators by hand; on a whole distribution k1 and k3 are the divergence; k2 has its gradient."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.kl import k1, k2, k3
from tests.tolerances import near
from tests.trainer.packed_tokens import logs

LOGITS = st.lists(st.floats(-3, 3), min_size=4, max_size=4)

SIZE = math.exp(6)  # of the largest ratio of probabilities between them


def test_the_estimators_by_hand() -> None:
    policy, reference = logs(0.5, 0.2), logs(0.25, 0.4)  # x = 0.5 and 2
    assert k1(policy, reference).tolist() == near([math.log(2), -math.log(2)])
    assert k2(policy, reference).tolist() == near([math.log(2) ** 2 / 2] * 2)
    assert k3(policy, reference).tolist() == near([-0.5 + math.log(2), 1 - math.log(2)])


@given(LOGITS, LOGITS)
def test_in_the_mean_over_the_policy_k1_and_k3_are_the_divergence(p: list[float], q: list[float]) -> None:
    policy, reference = torch.tensor(p).log_softmax(0), torch.tensor(q).log_softmax(0)
    divergence = float((policy.exp() * (policy - reference)).sum())
    for estimator in (k1, k3):
        assert float((policy.exp() * estimator(policy, reference)).sum()) == near(divergence, size=SIZE)


@given(LOGITS, LOGITS)
def test_in_the_mean_k2_has_the_gradient_of_the_divergence_and_k1_none(p: list[float], q: list[float]) -> None:
    reference = torch.tensor(q).log_softmax(0)

    def gradient(kind: str) -> list[float]:
        logits = torch.tensor(p, requires_grad=True)
        policy = logits.log_softmax(0)
        sampled = policy.exp().detach()  # the mean over tokens that the policy itself sampled
        losses = {
            "divergence": (policy.exp() * (policy - reference)).sum(),
            "k1": (sampled * k1(policy, reference)).sum(),
            "k2": (sampled * k2(policy, reference)).sum(),
        }
        losses[kind].backward()
        assert logits.grad is not None
        return logits.grad.tolist()

    assert gradient("k2") == near(gradient("divergence"), size=SIZE)
    assert gradient("k1") == near([0.0] * 4, size=SIZE)


@given(LOGITS, LOGITS)
def test_k3_is_never_negative_and_zero_where_they_agree(p: list[float], q: list[float]) -> None:
    policy, reference = torch.tensor(p).log_softmax(0), torch.tensor(q).log_softmax(0)
    assert (k3(policy, reference) >= 0).all()
    assert k3(policy, policy).tolist() == k2(policy, policy).tolist() == [0.0] * 4
