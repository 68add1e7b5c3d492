"""Promises: each filter by hand; they work one after the other on what is left; what is not refused is trained on;
each reason begins with the name of its filter.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Group, StopReason
from stretto.rollout.config import RolloutConfig
from stretto.rollout.filters import count_reasons, filters, most_often, refused, success_rate, truncated, zero_variance
from tests.store.make import Make, judged

REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6)


def group(rewards: Sequence[float], cut: Sequence[int] = ()) -> Group:
    """Right where the reward is above 0; the answers `cut` were cut off."""
    ends = [StopReason.LENGTH if member in cut else StopReason.STOP for member in range(len(rewards))]
    return Make.group("g", *[judged(f"g/{m}", reward, stop=ends[m]) for m, reward in enumerate(rewards)])


def test_answers_that_were_cut_off_by_hand() -> None:
    assert truncated(group([0.0, 1.0, 1.0], cut=[0, 2])) == dict.fromkeys(("g/0", "g/2"), "cut off at its length")
    assert truncated(group([0.0])) == {}


def test_success_rates_by_hand() -> None:
    one_in_four = group([0.0, 1.0, 0.0, 0.0])
    assert success_rate(one_in_four, low=0.25, high=0.25) == {}
    assert success_rate(one_in_four, low=0.26, high=1.0) == {f"g/{m}": "1 of 4 completions are right" for m in range(4)}
    assert len(success_rate(one_in_four, low=0.0, high=0.24)) == 4


def test_zero_variance_by_hand() -> None:
    assert zero_variance(group([0.5, 0.5])) == {"g/0": "all rewards are 0.5", "g/1": "all rewards are 0.5"}
    assert zero_variance(group([0.5, 0.4])) == {}
    assert len(zero_variance(group([0.5]))) == 1


def test_zero_variance_looks_at_the_rewards_that_are_compared() -> None:
    chosen = filters(RolloutConfig(filter="zero_variance"), lambda group: [[1.0, 1.0], [2.0, 3.0]])
    assert refused(group([0.5, 0.5]), chosen, fewest=1) == {}
    chosen = filters(RolloutConfig(filter="zero_variance"), lambda group: [[1.0, 1.0], [2.0]])
    assert len(refused(group([0.5, 0.4]), chosen, fewest=1)) == 2


@given(REWARDS)
def test_with_right_and_wrong_alone_zero_variance_is_a_success_rate_inside_the_ends(rewards: list[float]) -> None:
    assert success_rate(group(rewards), low=1e-9, high=1 - 1e-9).keys() == zero_variance(group(rewards)).keys()


def test_filters_work_on_what_is_left() -> None:
    chosen = filters(RolloutConfig(truncated="filter", filter="zero_variance"))
    # without the answer that was cut off, the two others are equal
    reasons = refused(group([1.0, 1.0, 0.0], cut=[2]), chosen, fewest=1)
    equal = "zero_variance: all rewards are 1"
    assert reasons == {"g/0": equal, "g/1": equal, "g/2": "truncated: cut off at its length"}


def test_a_group_needs_enough_answers_after_its_filters_too() -> None:
    chosen = filters(RolloutConfig(truncated="filter"))
    assert refused(group([1.0, 0.0, 0.0], cut=[0]), chosen, fewest=2).keys() == {"g/0"}
    reasons = refused(group([1.0, 0.0, 0.0], cut=[0]), chosen, fewest=3)
    assert reasons["g/1"] == "min_group_size: only 2 completions of the group are left"
    assert len(reasons) == 3


def test_a_group_of_which_nothing_is_left_asks_no_further_filter() -> None:
    chosen = filters(RolloutConfig(truncated="filter", success_rate_min=0.5, filter="zero_variance"))
    assert set(refused(group([1.0], cut=[0]), chosen, fewest=1).values()) == {"truncated: cut off at its length"}


def test_the_filter_that_refuses_the_most_groups_is_named_though_each_of_its_reasons_is_another() -> None:
    counts: dict[str, tuple[int, str]] = {}
    chosen = filters(RolloutConfig(truncated="filter", filter="zero_variance"))
    for number in range(300):
        cut = [0, 1] if number < 120 else [0]
        count_reasons(counts, refused(group([number / 1000] * 3, cut), chosen, fewest=1).values())
    assert most_often(counts) == " (most often zero_variance: all rewards are 0.299)"


@given(REWARDS, st.integers(1, 6))
def test_the_default_refuses_nothing(rewards: list[float], fewest: int) -> None:
    assert refused(group(rewards), filters(RolloutConfig()), fewest) == {}


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 0), ({"success_rate_min": 0.05}, 1), ({"success_rate_max": 0.95}, 1), ({"filter": "zero_variance"}, 1)],
)
def test_the_recipe_chooses(settings: dict[str, object], count: int) -> None:
    assert len(filters(RolloutConfig.model_validate(settings))) == count
