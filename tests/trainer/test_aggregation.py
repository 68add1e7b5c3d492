"""Promises: coefficients by hand; means are means; Dr. GRPO's do not depend on how long the answers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.aggregation import coefficients, fixed_length, sequence_mean, token_mean

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def test_coefficients_by_hand() -> None:
    assert token_mean([2, 6]) == [0.125, 0.125]
    assert sequence_mean([2, 8]) == [0.25, 0.0625]
    assert fixed_length([2, 6], longest=8) == [0.0625, 0.0625]


@given(LENGTHS)
def test_means_of_a_constant_are_the_constant(lengths: list[int]) -> None:
    for scales in (token_mean(lengths), sequence_mean(lengths)):
        assert sum(c * n for c, n in zip(scales, lengths, strict=True)) == pytest.approx(1)


@given(LENGTHS)
def test_where_every_answer_has_the_full_length_all_three_agree(lengths: list[int]) -> None:
    full = [7] * len(lengths)
    assert token_mean(full) == pytest.approx(sequence_mean(full))
    assert token_mean(full) == pytest.approx(fixed_length(full, longest=7))


@given(LENGTHS)
def test_with_a_fixed_length_a_token_weighs_the_same_whatever_the_others_are(lengths: list[int]) -> None:
    assert fixed_length(lengths, 40) == fixed_length([1] * len(lengths), 40)


def test_the_recipe_chooses() -> None:
    assert coefficients("token_mean", [1, 3], 8) == [0.25, 0.25]
    assert coefficients("sequence_mean", [1, 4], 8) == [0.5, 0.125]
    assert coefficients("fixed_length", [1, 3], 8) == [0.0625, 0.0625]
