"""Promises: each equation by hand; groups of any size; equal rewards say nothing, to the last bit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.advantages import (
    batch_normalised,
    group_centred,
    group_normalised,
    leave_one_out,
    lite_ppo,
    reinforce_pp_baseline,
)
from stretto.trainer.objective.returns import gae, reinforce_pp, terminal

REWARDS = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=6)


def test_group_normalised_by_hand() -> None:
    # mean 2, population deviation sqrt((1 + 1 + 4) / 3) = sqrt(2)
    (got,) = group_normalised([[1.0, 1.0, 4.0]], eps=0.0)
    assert got == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), 2 / math.sqrt(2)])


def test_the_epsilon_is_added_to_the_deviation() -> None:
    assert group_normalised([[1.0, -1.0]], eps=1.0) == [[0.5, -0.5]]


def test_group_centred_by_hand() -> None:
    assert group_centred([[5.0, -5.0, -5.0, -5.0], [1.0]]) == [[7.5, -2.5, -2.5, -2.5], [0.0]]


def test_leave_one_out_by_hand() -> None:
    # 5 - (-5 - 5) / 2 = 10;  -5 - (5 - 5) / 2 = -5
    assert leave_one_out([[5.0, -5.0, -5.0], [3.0]]) == [[10.0, -5.0, -5.0], [0.0]]


def test_batch_normalised_weighs_each_reward_by_its_tokens() -> None:
    # tokens 3 of +5 and 1 of -5: mean 2.5, variance (3 * 6.25 + 56.25) / 4 = 18.75
    got = batch_normalised([[5.0], [-5.0]], [[3], [1]], eps=0.0)
    assert got[0] == pytest.approx([2.5 / math.sqrt(18.75)])
    assert got[1] == pytest.approx([-7.5 / math.sqrt(18.75)])


def test_trajectories_without_loss_tokens_do_not_move_the_batch_mean() -> None:
    assert batch_normalised([[5.0, -5.0], [100.0]], [[2, 2], [0]], eps=0.0)[0] == [1.0, -1.0]


def test_a_batch_without_tokens_or_without_difference_has_no_advantages() -> None:
    assert batch_normalised([[1.0, 2.0]], [[0, 0]], eps=0.0) == [[0.0, 0.0]]
    assert batch_normalised([[0.1, 0.1], [0.1]], [[1, 3], [2]], eps=0.0) == [[0.0, 0.0], [0.0]]


@given(st.floats(-5, 5), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    group = [[reward] * size]
    for got in (group_normalised(group, 0.0), group_centred(group), leave_one_out(group)):
        assert got == [[0.0] * size]


@given(REWARDS)
def test_every_group_relative_advantage_sums_to_zero(rewards: list[list[float]]) -> None:
    for got in (group_normalised(rewards, 1e-6), group_centred(rewards), leave_one_out(rewards)):
        assert [len(group) for group in got] == [len(group) for group in rewards]
        assert all(abs(sum(group)) < 1e-3 for group in got)


def test_lite_ppo_centres_by_the_group_and_scales_by_the_batch() -> None:
    # group means 2 and 7; all rewards 1 3 6 8: mean 4.5, variance (12.25 + 2.25 + 2.25 + 12.25) / 4 = 7.25
    got = lite_ppo([[1.0, 3.0], [6.0, 8.0]], eps=0.0)
    for group in got:
        assert group == pytest.approx([-1 / math.sqrt(7.25), 1 / math.sqrt(7.25)])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_over_a_batch_of_one_group_lite_ppo_is_grpo(rewards: list[float]) -> None:
    assert lite_ppo([rewards], eps=1e-6) == group_normalised([rewards], eps=1e-6)


def test_a_group_without_difference_is_zero_among_others_and_alone() -> None:
    assert lite_ppo([[2.0], [1.0, 1.0], [0.0, 4.0]], eps=0.0)[:2] == [[0.0], [0.0, 0.0]]
    assert lite_ppo([[0.1, 0.1], [0.1]], eps=0.0) == [[0.0, 0.0], [0.0]]


def test_reinforce_pp_with_a_baseline_centres_twice() -> None:
    # group-centred -1 1 | 0; tokens 1 3 | 4: mean (-1 + 3) / 8 = 0.25, mean square 4 / 8, variance 0.5 - 0.0625
    got = reinforce_pp_baseline([[1.0, 3.0], [5.0]], [[1, 3], [4]], eps=0.0)
    deviation = math.sqrt(0.4375)
    assert got[0] == pytest.approx([-1.25 / deviation, 0.75 / deviation])
    assert got[1] == pytest.approx([-0.25 / deviation])


def test_reinforce_pp_by_hand() -> None:
    # returns 1 2 | 6: mean 3, variance (4 + 1 + 9) / 3
    deviation = math.sqrt(14 / 3)
    got = [list(one) for one in reinforce_pp([[1.0, 2.0], [], [6.0]], eps=0.0)]
    assert got[0] == pytest.approx([-2 / deviation, -1 / deviation])
    assert got[1:] == [[], pytest.approx([3 / deviation])]


@given(REWARDS, st.integers(1, 5))
def test_reinforce_pp_without_a_discount_is_the_papers_normalisation(rewards: list[list[float]], tokens: int) -> None:
    flat = [r for group in rewards for r in group]
    lengths = [1 + (tokens * k) % 4 for k in range(len(flat))]
    per_token = [terminal(r, n, range(n), decay=1.0) for r, n in zip(flat, lengths, strict=True)]
    expected = batch_normalised([[r] for r in flat], [[n] for n in lengths], eps=1e-3)
    for got, (score,), n in zip(reinforce_pp(per_token, eps=1e-3), expected, lengths, strict=True):
        assert got == pytest.approx([score] * n, abs=1e-6)


def test_gae_by_hand() -> None:
    # delta_2 = 4 - 3 = 1; delta_1 = 0.5 * 3 - 2 = -0.5; delta_0 = 1 + 0.5 * 2 - 1 = 1; gamma lam = 0.25
    # A_2 = 1; A_1 = -0.5 + 0.25; A_0 = 1 - 0.0625
    assert gae([1.0, 0.0, 4.0], [1.0, 2.0, 3.0], gamma=0.5, lam=0.5).tolist() == [0.9375, -0.25, 1.0]


@given(st.floats(-5, 5), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1))
def test_without_a_critic_gae_is_the_discounted_terminal_reward(
    r: float, tokens: int, gamma: float, lam: float
) -> None:
    expected = gae([0.0] * (tokens - 1) + [r], [0.0] * tokens, gamma, lam)
    assert terminal(r, tokens, range(tokens), gamma * lam) == pytest.approx(expected, abs=1e-12)


def test_without_a_discount_it_is_the_terminal_reward_to_the_last_bit() -> None:
    found = gae([0.0, 0.0, 0.3], [0.0] * 3, gamma=1.0, lam=1.0), terminal(0.3, 3, range(3), 1.0)
    assert [one.tolist() for one in found] == [[0.3, 0.3, 0.3]] * 2


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0, 1))
def test_with_lambda_1_gae_is_the_discounted_return_minus_the_value(rewards: list[float], gamma: float) -> None:
    values = [r / 2 + 1 for r in rewards]
    returns = [math.fsum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert gae(rewards, values, gamma, lam=1.0) == pytest.approx([g - v for g, v in zip(returns, values, strict=True)])


def test_an_answer_that_was_cut_off_goes_on_with_the_value_of_its_last_state_by_hand() -> None:
    # as above, and delta_2 = 4 + 0.5 * 6 - 3 = 4; A_2 = 4; A_1 = -0.5 + 1; A_0 = 1 + 0.125
    assert gae([1.0, 0.0, 4.0], [1.0, 2.0, 3.0, 6.0], gamma=0.5, lam=0.5).tolist() == [1.125, 0.5, 4.0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(-5, 5), st.floats(0, 1))
def test_a_value_after_the_last_token_is_a_reward_that_comes_one_token_later(
    rewards: list[float], after: float, gamma: float
) -> None:
    values = [r / 2 + 1 for r in rewards]
    longer = gae([*rewards, after], [*values, after], gamma, lam=0.9)  # the last advantage is 0
    assert gae(rewards, [*values, after], gamma, lam=0.9) == pytest.approx(longer[:-1], abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_a_last_state_that_is_worth_nothing_is_the_end(rewards: list[float]) -> None:
    values = [r / 2 + 1 for r in rewards]
    assert gae(rewards, [*values, 0.0], 0.9, 0.8).tolist() == gae(rewards, values, 0.9, 0.8).tolist()
