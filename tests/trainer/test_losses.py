"""Promises: equation 5 by hand; PPO is its special case; the weight and the anchor have no gradient; the sum over
micro-batches is the exact token mean.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.losses import DIAGNOSTICS, Objective, Tokens, decoupled_ppo, ppo

PLAIN = Objective(clip_low=0.2, clip_high=0.2, behavior_weight_cap=math.inf)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def diagnostics(sums: torch.Tensor) -> dict[str, float]:
    return dict(zip(DIAGNOSTICS, sums.tolist(), strict=True))


def test_equation_5_by_hand() -> None:
    # token 1: w = 0.4 / 0.2 = 2, u = 0.5 / 0.4 = 1.25, A = 1:  min(1.25, 1.2) * 2 = 2.4, clipped
    # token 2: w = 0.1 / 0.2 = 0.5, u = 0.2 / 0.1 = 2, A = -3: min(-6, -3.6) * 0.5 = -3.0, not clipped
    tokens = Tokens(logs(0.2, 0.2), logs(0.4, 0.1), torch.tensor([1.0, -3.0]))
    loss = decoupled_ppo(PLAIN, logs(0.5, 0.2), tokens, total=4)
    assert loss.value.item() == pytest.approx(-(2.4 - 3.0) / 4)
    seen = diagnostics(loss.sums)
    assert seen["clipped"] == 1
    assert seen["capped"] == 0
    assert seen["ratio"] == pytest.approx(3.25)
    assert seen["behavior_weight"] == pytest.approx(2.5)
    # x = policy / behavior = 2.5 and 1: (1.5 - ln 2.5) + 0
    assert seen["kl_behavior"] == pytest.approx(1.5 - math.log(2.5))


def test_the_two_bounds_of_the_clip_are_separate() -> None:
    objective = Objective(clip_low=0.1, clip_high=0.5, behavior_weight_cap=math.inf)
    tokens = Tokens(logs(0.5, 0.5), logs(0.5, 0.5), torch.tensor([1.0, -1.0]))
    # u = 1.8 clipped to 1.5; u = 0.6 clipped to 0.9: min(-0.6, -0.9)
    assert decoupled_ppo(objective, logs(0.9, 0.3), tokens, total=1).value.item() == pytest.approx(-(1.5 - 0.9))


def test_a_capped_token_leaves_the_objective_and_stays_in_the_mean() -> None:
    objective = Objective(clip_low=0.2, clip_high=0.2, behavior_weight_cap=1.5)
    policy = logs(0.4, 0.3).requires_grad_()
    tokens = Tokens(logs(0.2, 0.3), logs(0.4, 0.3), torch.tensor([1.0, 1.0]))
    loss = decoupled_ppo(objective, policy, tokens, total=2)
    loss.value.backward()
    assert loss.value.item() == pytest.approx(-1 / 2)
    assert diagnostics(loss.sums)["capped"] == 1
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -0.5])


def test_an_infinite_weight_is_capped_too() -> None:
    objective = Objective(clip_low=0.2, clip_high=0.2, behavior_weight_cap=5.0)
    policy = torch.tensor([-0.1]).requires_grad_()
    loss = decoupled_ppo(objective, policy, Tokens(torch.tensor([-400.0]), policy.detach(), torch.ones(1)), total=1)
    loss.value.backward()
    assert loss.value.item() == 0
    assert policy.grad is not None
    assert policy.grad.item() == 0


def test_the_gradient_on_the_anchor_is_the_weighted_advantage() -> None:
    # u = 1 exactly: d(w u A)/d(log policy) = w A, here w = 2 and 0.5
    policy = logs(0.4, 0.1).requires_grad_()
    tokens = Tokens(logs(0.2, 0.2), policy.detach(), torch.tensor([1.0, -3.0]))
    decoupled_ppo(PLAIN, policy, tokens, total=1).value.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-2.0, 1.5])


LOGS = st.lists(st.tuples(*[st.floats(-4, 0)] * 2, st.floats(-3, 3)), min_size=1, max_size=8)


@given(LOGS)
def test_ppo_is_the_decoupled_objective_with_proximal_equal_to_behavior(rows: list[tuple[float, float, float]]) -> None:
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    elsewhere = torch.full_like(behavior, -1.0)
    plain = ppo(PLAIN, policy, Tokens(behavior, elsewhere, scores), total=3)
    decoupled = decoupled_ppo(PLAIN, policy, Tokens(behavior, behavior, scores), total=3)
    assert plain.value.item() == decoupled.value.item()
    ratio = (policy - behavior).exp()
    expected = -torch.minimum(ratio * scores, ratio.clamp(0.8, 1.2) * scores).sum() / 3
    torch.testing.assert_close(plain.value, expected)


@given(LOGS, st.integers(0, 8))
def test_the_parts_of_a_minibatch_add_up_to_its_token_mean(rows: list[tuple[float, float, float]], cut: int) -> None:
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    whole = decoupled_ppo(PLAIN, policy, Tokens(behavior, behavior, scores), total=len(rows))
    parts = [
        decoupled_ppo(PLAIN, policy[part], Tokens(behavior[part], behavior[part], scores[part]), total=len(rows))
        for part in (slice(None, cut), slice(cut, None))
    ]
    torch.testing.assert_close(whole.value, parts[0].value + parts[1].value)
    torch.testing.assert_close(whole.sums, parts[0].sums + parts[1].sums)


@given(LOGS)
def test_the_kl_estimate_is_never_negative(rows: list[tuple[float, float, float]]) -> None:
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    assert diagnostics(ppo(PLAIN, policy, Tokens(behavior, behavior, scores), 1).sums)["kl_behavior"] >= 0
