"""avg@n, pass@k, maj@n and their interval, against numbers worked by hand and by counting all draws."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Outcome
from stretto.loop.records.evaluation import interval, majority, pass_at, sizes

R, W, U = Outcome.RIGHT, Outcome.WRONG, Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("k", "right", "samples", "expected"),
    [
        (1, 3, 4, 3 / 4),
        (2, 1, 4, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (3, 2, 5, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 1, 4, 1.0),
        (5, 0, 8, 0.0),
    ],
)
def test_pass_at_k_by_hand(k: int, right: int, samples: int, expected: float) -> None:
    assert pass_at(k, right, samples) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(drawn: tuple[int, int, int]) -> None:
    samples, right, k = drawn
    draws = list(combinations(range(samples), k))
    with_right = sum(any(one < right for one in draw) for draw in draws)
    assert pass_at(k, right, samples) == pytest.approx(with_right / len(draws), abs=1e-12)


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs 5 completions or more of each question, there are 4"):
        pass_at(5, 1, 4)


def test_the_k_that_are_shown_are_powers_of_two_and_all() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 32)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32]]


@pytest.mark.parametrize(
    ("outcomes", "finals", "expected"),
    [
        ([R, R, W], ["0.5", "1/2", "3"], 1.0),  # two spellings of the gold answer are one answer
        ([R, W, W], ["1", "3", "3"], 0.0),
        ([R, W, W], ["1", "3", "4"], 1 / 3),  # three answers, once each
        ([R, W], ["1", None], 1.0),  # no answer has no vote
        ([R, U, U], ["1", "3", "3"], 1.0),
        ([W, W], [None, None], 0.0),
        ([U], [None], 0.0),
        ([R, R, W, W, W, W], ["1", "1", "3", "3", "4", "4"], 1 / 3),
    ],
)
def test_majority_by_hand(outcomes: list[Outcome], finals: list[str | None], expected: float) -> None:
    assert majority(outcomes, finals) == pytest.approx(expected)


def test_the_interval_of_single_completions_is_wilsons() -> None:
    # Wilson for 8 of 10, z = 1.96: (0.8 + 0.19208 +- 1.96 * sqrt(0.016 + 0.0096040)) / 1.38416 = 0.4902, 0.9433
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    # 0 of 4: z^2 / (4 + z^2) = 3.8415 / 7.8415
    assert interval([0.0] * 4) == pytest.approx((0.0, 0.48989), abs=5e-5)
    assert interval([]) == (0.0, 1.0)


@pytest.mark.parametrize("questions", [1, 3, 16, 100, 997])
def test_where_none_or_all_are_right_the_interval_ends_there(questions: int) -> None:
    far = 3.841458820694124 / (questions + 3.841458820694124)  # z^2 / (n + z^2)
    (none, most), (least, all_of_it) = interval([0.0] * questions), interval([1.0] * questions)
    assert (none, all_of_it) == (0.0, 1.0)
    assert (most, least) == pytest.approx((far, 1.0 - far))


def test_completions_that_differ_within_questions_narrow_the_interval_and_equal_ones_do_not() -> None:
    low, high = interval([0.5] * 10)  # each question half right: nothing but the number of questions is known to vary
    assert (low, high) == pytest.approx(interval([1.0] * 5 + [0.0] * 5))
    mixed_low, mixed_high = interval([0.4, 0.6] * 5)  # variance 0.01 in place of 0.25: 25 times as many questions
    assert mixed_high - mixed_low < (high - low) / 3
    assert interval([1.0, 1.0, 0.0, 0.0]) == pytest.approx(interval([0.0, 1.0, 0.0, 1.0]))


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=50))
def test_the_interval_holds_the_mean_and_stays_within_0_and_1(shares: list[float]) -> None:
    low, high = interval(shares)
    assert 0.0 <= low <= sum(shares) / len(shares) + 1e-12
    assert sum(shares) / len(shares) - 1e-12 <= high <= 1.0
