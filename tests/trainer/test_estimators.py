"""Promises: each equation by hand; each name of a recipe calls its equation; groups of any size; equal rewards say
nothing, to the last bit; an answer without loss tokens has no advantages."""

import math
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from stretto.trainer.objective import advantages, returns
from stretto.trainer.objective.advantages import group_centred, group_normalised, leave_one_out
from stretto.trainer.objective.estimators import ESTIMATORS as DOOR
from stretto.trainer.objective.estimators import EstimatorSection, RewardedCompletion, TokenScores
from stretto.trainer.objective.returns import gae, terminal
from stretto.trainer.objective.token_estimators import advantages_of

ESTIMATORS: TypeAdapter[EstimatorSection] = TypeAdapter(Annotated[EstimatorSection, DOOR])
GROUPS = [
    [RewardedCompletion(1.0, 2, range(2)), RewardedCompletion(0.0, 4, (2, 3))],
    [RewardedCompletion(1.0, 1, ())],
    [RewardedCompletion(3.0, 2, range(2)), RewardedCompletion(3.0, 2, range(2))],
]
# rewards 1 0 | 1 | 3 3: mean 1.6, variance (0.36 + 2.56 + 0.36 + 1.96 + 1.96) / 5 = 1.44, deviation 1.2
# loss tokens 2 2 | 0 | 2 2: mean 1.75, variance (0.5625 + 3.0625 + 1.5625 + 1.5625) / 4 = 1.6875
BATCH = math.sqrt(1.6875)
# group-centred 0.5 -0.5 | 0 | 0 0, mean 0, variance 0.5 / 4
CENTRED = math.sqrt(0.125)

FIRST_OF_EACH = {
    "group": [[1.0, -1.0], [0.0, 0.0]],
    "group_mean": [[0.5, -0.5], [0.0, 0.0]],
    "leave_one_out": [[1.0, -1.0], [0.0, 0.0]],
    "lite_ppo": [[0.5 / 1.2, -0.5 / 1.2], [0.0, 0.0]],
    "batch": [[-0.75 / BATCH, -1.75 / BATCH], [1.25 / BATCH, 1.25 / BATCH]],
    "reinforce_pp": [[-0.75 / BATCH, -1.75 / BATCH], [1.25 / BATCH, 1.25 / BATCH]],
    "reinforce_pp_baseline": [[0.5 / CENTRED, -0.5 / CENTRED], [0.0, 0.0]],
    "gae": [[1.0, 0.0], [3.0, 3.0]],
    "reward": [[1.0, 0.0], [3.0, 3.0]],
}


@pytest.mark.parametrize("name", FIRST_OF_EACH)
def test_a_name_in_the_recipe_is_its_equation(name: str) -> None:
    got = advantages_of(ESTIMATORS.validate_python(name), GROUPS)
    assert [[len(answer) for answer in group] for group in got] == [[2, 2], [0], [2, 2]]
    for group, expected in zip((got[0], got[2]), FIRST_OF_EACH[name], strict=True):
        assert [answer[0] for answer in group] == pytest.approx(expected, rel=1e-4)
        assert all(answer[0] == answer[1] for answer in group)


def listed(found: TokenScores) -> list[list[list[float]]]:
    return [[list(one) for one in group] for group in found]


def test_discounts_are_per_token_of_the_whole_answer() -> None:
    got = listed(advantages_of(ESTIMATORS.validate_python({"kind": "gae", "gamma": 0.5, "lam": 0.5}), GROUPS))
    assert got == [[[0.25, 1.0], [0.0, 0.0]], [[]], [[0.75, 3.0], [0.75, 3.0]]]
    got = listed(
        advantages_of(ESTIMATORS.validate_python({"kind": "reinforce_pp", "gamma": 0.5, "eps": 1e-9}), GROUPS[:1])
    )
    # returns 0.5 1 0 0: mean 0.375, variance (0.015625 + 0.390625 + 2 * 0.140625) / 4
    deviation = math.sqrt(0.171875)
    assert got[0] == [pytest.approx([0.125 / deviation, 0.625 / deviation]), pytest.approx([-0.375 / deviation] * 2)]


def test_a_batch_of_nothing_has_no_advantages() -> None:
    for name in FIRST_OF_EACH:
        assert advantages_of(ESTIMATORS.validate_python(name), []) == []


def test_those_that_compare_siblings_say_so() -> None:
    compare = {name for name in FIRST_OF_EACH if ESTIMATORS.validate_python(name).compares}
    assert compare == {"group", "group_mean", "leave_one_out", "lite_ppo", "reinforce_pp_baseline"}


@pytest.mark.parametrize("wrong", ["grup", {"kind": "gae", "gamma": 1.5}, {"kind": "reward", "eps": 1.0}, {}])
def test_what_is_no_estimator_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        ESTIMATORS.validate_python(wrong)


def roots(square: float, *numbers: float) -> list[float]:
    """The numbers, in deviations of this square."""
    return [number / math.sqrt(square) for number in numbers]


BY_HAND: list[tuple[str, list[Any], list[list[float]]]] = [
    # mean 2, population variance (1 + 1 + 4) / 3 = 2
    ("group_normalised", [[[1.0, 1.0, 4.0]], 0.0], [roots(2, -1, -1, 2)]),
    ("group_normalised", [[[1.0, -1.0]], 1.0], [[0.5, -0.5]]),  # the epsilon is added to the deviation
    ("group_centred", [[[5.0, -5.0, -5.0, -5.0], [1.0]]], [[7.5, -2.5, -2.5, -2.5], [0.0]]),
    # 5 - (-5 - 5) / 2 = 10;  -5 - (5 - 5) / 2 = -5
    ("leave_one_out", [[[5.0, -5.0, -5.0], [3.0]]], [[10.0, -5.0, -5.0], [0.0]]),
    # tokens 3 of +5 and 1 of -5: mean 2.5, variance (3 * 6.25 + 56.25) / 4 = 18.75
    ("batch_normalised", [[[5.0], [-5.0]], [[3], [1]], 0.0], [roots(18.75, 2.5), roots(18.75, -7.5)]),
    # one without tokens does not move the mean
    ("batch_normalised", [[[5.0, -5.0], [100.0]], [[2, 2], [0]], 0.0], [[1.0, -1.0], [20.0]]),
    ("batch_normalised", [[[1.0, 2.0]], [[0, 0]], 0.0], [[0.0, 0.0]]),
    ("batch_normalised", [[[0.1, 0.1], [0.1]], [[1, 3], [2]], 0.0], [[0.0, 0.0], [0.0]]),
    # group means 2 and 7; all rewards 1 3 6 8: mean 4.5, variance (12.25 + 2.25 + 2.25 + 12.25) / 4 = 7.25
    ("lite_ppo", [[[1.0, 3.0], [6.0, 8.0]], 0.0], [roots(7.25, -1, 1)] * 2),
    # rewards 2 1 1 0 4: mean 1.6, variance (0.16 + 0.36 + 0.36 + 2.56 + 5.76) / 5 = 1.84
    ("lite_ppo", [[[2.0], [1.0, 1.0], [0.0, 4.0]], 0.0], [[0.0], [0.0, 0.0], roots(1.84, -2, 2)]),
    ("lite_ppo", [[[0.1, 0.1], [0.1]], 0.0], [[0.0, 0.0], [0.0]]),
    # group-centred -1 1 | 0; tokens 1 3 | 4: mean (-1 + 3) / 8 = 0.25, mean square 4 / 8, variance 0.5 - 0.0625
    (
        "reinforce_pp_baseline",
        [[[1.0, 3.0], [5.0]], [[1, 3], [4]], 0.0],
        [roots(0.4375, -1.25, 0.75), roots(0.4375, -0.25)],
    ),
    # returns 1 2 | 6: mean 3, variance (4 + 1 + 9) / 3
    ("reinforce_pp", [[[1.0, 2.0], [], [6.0]], 0.0], [roots(14 / 3, -2, -1), [], roots(14 / 3, 3)]),
]


@pytest.mark.parametrize(("name", "given", "expected"), BY_HAND)
def test_each_equation_by_hand(name: str, given: list[Any], expected: list[list[float]]) -> None:
    found = {**vars(advantages), **vars(returns)}[name](*given)
    assert [list(group) for group in found] == [pytest.approx(group) for group in expected]


@given(st.floats(-5, 5), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    group = [[reward] * size]
    for got in (group_normalised(group, 0.0), group_centred(group), leave_one_out(group)):
        assert got == [[0.0] * size]


def test_gae_by_hand() -> None:
    # delta_2 = 4 - 3 = 1; delta_1 = 0.5 * 3 - 2 = -0.5; delta_0 = 1 + 0.5 * 2 - 1 = 1; gamma lam = 0.25
    # A_2 = 1; A_1 = -0.5 + 0.25; A_0 = 1 - 0.0625
    assert gae([1.0, 0.0, 4.0], [1.0, 2.0, 3.0], gamma=0.5, lam=0.5).tolist() == [0.9375, -0.25, 1.0]


@given(st.floats(-5, 5), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1))
def test_without_critic_gae_is_the_discounted_terminal_reward(r: float, tokens: int, gamma: float, lam: float) -> None:
    expected = gae([0.0] * (tokens - 1) + [r], [0.0] * tokens, gamma, lam)
    assert terminal(r, tokens, range(tokens), gamma * lam) == pytest.approx(expected, abs=1e-12)


def test_without_a_discount_it_is_the_terminal_reward_to_the_last_bit() -> None:
    found = gae([0.0, 0.0, 0.3], [0.0] * 3, gamma=1.0, lam=1.0), terminal(0.3, 3, range(3), 1.0)
    assert [one.tolist() for one in found] == [[0.3, 0.3, 0.3]] * 2


def test_an_answer_that_was_cut_off_goes_on_with_the_value_of_its_last_state_by_hand() -> None:
    # as above, and delta_2 = 4 + 0.5 * 6 - 3 = 4; A_2 = 4; A_1 = -0.5 + 1; A_0 = 1 + 0.125
    assert gae([1.0, 0.0, 4.0], [1.0, 2.0, 3.0, 6.0], gamma=0.5, lam=0.5).tolist() == [1.125, 0.5, 4.0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_a_last_state_that_is_worth_nothing_is_the_end(rewards: list[float]) -> None:
    values = [r / 2 + 1 for r in rewards]
    assert gae(rewards, [*values, 0.0], 0.9, 0.8).tolist() == gae(rewards, values, 0.9, 0.8).tolist()
