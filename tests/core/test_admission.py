"""Promises of the staleness rule:

- `admits` is equation 3 of the paper, `capacity` its closed form, and the two agree for all numbers;
- staleness 0 admits exactly one batch per version; no bound admits for ever;
- no trajectory that keeps to its due version has a token older than the bound.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.admission import admits, capacity, due, stale_tokens

counts = st.integers(0, 500)
versions = st.integers(0, 40)
sizes = st.integers(1, 64)
bounds = st.one_of(st.integers(0, 20), st.just(math.inf))


@pytest.mark.parametrize(
    ("counted", "version", "admitted"),
    [(0, 0, True), (7, 0, True), (8, 0, False), (8, 1, True), (11, 1, True), (12, 1, False)],
)
def test_equation_3_with_batches_of_four_and_a_staleness_of_one(counted: int, version: int, admitted: bool) -> None:
    # floor((N - 1) / 4) <= i + 1, where N counts the new group
    assert admits(counted, version, batch_size=4, max_staleness=1) is admitted


@given(counts, versions, sizes, bounds)
def test_the_closed_form_says_the_same(counted: int, version: int, size: int, bound: float) -> None:
    assert admits(counted, version, size, bound) == (capacity(counted, version, size, bound) > 0)


@given(versions, sizes)
def test_staleness_zero_admits_one_batch_per_version(version: int, size: int) -> None:
    assert capacity(version * size, version, size, 0) == size


@given(counts, versions, sizes)
def test_without_a_bound_everything_is_admitted(counted: int, version: int, size: int) -> None:
    assert admits(counted, version, size, math.inf)


@given(versions, st.integers(0, 20))
def test_what_is_trained_when_it_is_due_has_no_stale_token(admitted: int, bound: int) -> None:
    last = int(due(admitted, bound))
    assert stale_tokens([admitted, admitted + 1], last, bound) == 0
    assert stale_tokens([admitted, admitted + 1], last + 1, bound) == 1


def test_nothing_is_stale_without_a_bound_or_without_tokens() -> None:
    assert stale_tokens([0, 1], 1000, math.inf) == 0
    assert stale_tokens([], 1000, 0) == 0
