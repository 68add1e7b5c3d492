"""Promises: Algorithm 1 as the paper has it, minibatches and shares of ranks of about equal weight; every sequence
exactly once; each rank has as many micro-batches as every other.
"""

from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.batch.minibatch import balanced, micro_batches, minibatches, shares

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def test_algorithm_1_worked_by_hand() -> None:
    # 9 opens; 6 does not fit with it and opens; 4 joins the 6 (full); 3 opens; 2 joins the 3; 1 could join the 9 or
    # the 3 + 2 and joins the one with fewer sequences.
    assert micro_batches([1, 2, 3, 4, 6, 9], capacity=10) == [[5, 0], [4, 3], [2, 1]]


def test_the_emptier_micro_batch_is_the_one_with_fewer_sequences_not_with_fewer_tokens() -> None:
    # 8 | 3 opens by k_min | 2 joins the batch [8] or [3]: both have one sequence, the first; 1 joins [3].
    assert micro_batches([8, 3, 2, 1], capacity=20, fewest=2) == [[0, 2], [1, 3]]


def test_a_sequence_longer_than_the_capacity_is_alone() -> None:
    assert micro_batches([3, 25, 4], capacity=10) == [[1], [2, 0]]


@given(LENGTHS, st.integers(1, 100), st.integers(1, 8))
def test_micro_batches_keep_the_promises_of_algorithm_1(lengths: list[int], capacity: int, fewest: int) -> None:
    batches = micro_batches(lengths, capacity, fewest)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batches)
    assert all(sum(lengths[i] for i in batch) <= capacity or len(batch) == 1 for batch in batches)
    assert len(batches) >= min(fewest, len(lengths))


@given(LENGTHS, st.integers(1, 100))
def test_no_more_than_twice_as_many_micro_batches_as_the_tokens_need(lengths: list[int], capacity: int) -> None:
    short = [length for length in lengths if length <= capacity]
    assert len(micro_batches(short, capacity)) <= max(1, 2 * sum(short) / capacity)


def test_minibatches_worked_by_hand() -> None:
    assert minibatches([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]


@given(LENGTHS, st.integers(1, 6))
def test_minibatches_hold_each_sequence_once_and_differ_by_one_sequence_at_most(lengths: list[int], n: int) -> None:
    parts = minibatches(lengths, n)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) == min(n, len(lengths))
    totals = [sum(lengths[i] for i in part) for part in parts]
    assert all(parts)
    assert not parts or max(totals) - min(totals) <= max(lengths)


def test_largest_differencing_worked_by_hand_and_beside_the_greedy_way() -> None:
    # 8 - 7 = 1, 6 - 5 = 1, then 4 - 1 = 3 (8 | 7 + 4), then 3 - 1 = 2 (8 + 6 | 7 + 4 + 5).
    lengths = [8, 7, 6, 5, 4]
    assert balanced(lengths, 2) == [[0, 2], [1, 3, 4]]
    assert totals(lengths, balanced(lengths, 2)) == [14, 16]
    assert totals(lengths, minibatches(lengths, 2)) == [17, 13]


def totals(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


@given(LENGTHS, st.integers(1, 8))
def test_largest_differencing_holds_each_sequence_once_and_differs_by_one_at_most(lengths: list[int], n: int) -> None:
    parts = balanced(lengths, n)
    assert len(parts) == n
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    found = totals(lengths, parts)
    assert max(found) - min(found) <= max(lengths, default=0)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 6))
def test_equal_sequences_are_divided_evenly(length: int, n: int, each: int) -> None:
    assert totals([length] * n * each, balanced([length] * n * each, n)) == [length * each] * n


@given(LENGTHS, st.integers(1, 100), st.integers(1, 3), st.integers(1, 6))
def test_ranks_share_all_sequences_in_equally_many_micro_batches(
    lengths: list[int], capacity: int, fewest: int, ranks: int
) -> None:
    shared = shares(lengths, capacity, fewest, ranks)
    assert len(shared) == ranks
    assert sorted(i for share in shared for pack in share for i in pack) == list(range(len(lengths)))
    assert len({len(share) for share in shared}) == 1
    assert all(sum(lengths[i] for i in pack) <= capacity or len(pack) == 1 for share in shared for pack in share)
    assert shares(lengths, capacity, fewest, 1) == [micro_batches(lengths, capacity, fewest)]
