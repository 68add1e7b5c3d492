"""Promises of the staleness rule:

- `admits` is equation 3 of the paper, which leaves room for (i + eta + 1) * B groups in all;
- staleness 0 admits exactly one batch per version; no bound admits for ever;
- a group is due as many versions after its admission as the bound says.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.admission import admits, due

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
    assert admits(counted, version, size, bound) == (counted < (version + bound + 1) * size)


@given(versions, sizes)
def test_staleness_zero_admits_one_batch_per_version(version: int, size: int) -> None:
    admitted = [counted for counted in range((version + 2) * size) if admits(counted, version, size, 0)]
    assert admitted == list(range((version + 1) * size))


@given(counts, versions, sizes)
def test_without_a_bound_everything_is_admitted(counted: int, version: int, size: int) -> None:
    assert admits(counted, version, size, math.inf)


def test_a_group_is_due_by_the_bound_or_never() -> None:
    assert due(3, 4) == 7
    assert due(3, math.inf) == math.inf
