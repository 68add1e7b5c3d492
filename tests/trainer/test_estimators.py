"""Promises: each name of a recipe calls its equation; groups of any size; an answer without loss tokens has none."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from stretto.trainer.objective.estimators import ESTIMATORS as DOOR
from stretto.trainer.objective.estimators import EstimatorSection, RewardedCompletion, TokenScores
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
