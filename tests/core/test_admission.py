"""Promises of the staleness rule:

- `admits` is equation 3 of the paper, which leaves room for (i + eta + 1) * B groups in all;
- staleness 0 admits exactly one batch per version; no bound admits for ever;
- a group is due as many versions after its admission as the bound says;
- the staleness of a batch is counted over the tokens that are in the loss.
"""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.admission import admits, due, loss_tokens
from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, Trajectory, Verdict

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


def test_a_group_is_due_by_the_bound_or_never() -> None:
    assert due(3, 4) == 7
    assert due(3, math.inf) == math.inf


GIVEN = Segment.of((9, 9, 9))


def trajectory(member: int, *segments: Segment) -> Trajectory:
    return Trajectory(f"g/{member}", segments, Verdict(Outcome.RIGHT, 1.0), "")


def sampled(*versions: int) -> Segment:
    return Segment.of((1,) * len(versions), (-0.5,) * len(versions), versions)


def test_each_sampled_token_of_the_loss_counts_once_with_the_versions_since_it_was_sampled() -> None:
    """A branch begins behind an older turn, so versions may fall from one segment to the next."""
    turns = trajectory(0, sampled(6, 7, 7), GIVEN, sampled(8), sampled(7, 8))
    group = Group("g", Prompt("p", (1,), "", ""), 6, (turns, trajectory(1, sampled(5, 8)), trajectory(2)))
    batch = Batch(step=9, version=8, groups=(group,))
    assert loss_tokens(batch) == {3: 1, 2: 1, 1: 3, 0: 3}
    assert loss_tokens(msgspec.structs.replace(batch, oldest_trainable=6)) == {2: 1, 1: 3, 0: 3}
    assert loss_tokens(msgspec.structs.replace(batch, oldest_trainable=6, oldest_by_group={"g": 7})) == {1: 3, 0: 3}
