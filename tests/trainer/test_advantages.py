"""Promises: each equation by hand; groups of any size; equal rewards say nothing, to the last bit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.advantages import (
    advantages,
    batch_normalised,
    group_centred,
    group_normalised,
    leave_one_out,
)
from stretto.trainer.config import AlgorithmConfig

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


@pytest.mark.parametrize("name", ["group", "group_mean", "leave_one_out", "batch"])
def test_the_recipe_chooses_the_equation(name: str) -> None:
    config = AlgorithmConfig.model_validate({"advantages": name, "advantage_eps": 1e-9})
    expected = {"group": 1.0, "group_mean": 0.5, "leave_one_out": 1.0, "batch": 1.0}[name]
    assert advantages(config, [[1.0, 0.0]], [[2, 2]])[0] == pytest.approx([expected, -expected])
