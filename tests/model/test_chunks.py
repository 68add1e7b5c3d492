"""Promises: every token that a row sees is in exactly one chunk, chunks fit their places, and none is much longer than
an equal share.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto_kernels.gpu.tables import cut

ROWS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 3000)), min_size=1, max_size=40)


def test_the_example_of_the_docstring() -> None:
    chunks = cut(np.array([0, 0, 0]), np.array([10, 2, 5]), most=8, grain=4)
    real = [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 2), (2, 0, 4), (2, 4, 5)]
    assert [tuple(item) for item in chunks.items.tolist()] == [*real, (0, 0, 0), (0, 0, 0)]
    assert chunks.bounds.tolist() == [0, 3, 4, 6]


@given(rows=ROWS, spare=st.integers(1, 60), grain=st.sampled_from([1, 4, 64]))
def test_chunks_cover_what_each_row_sees_in_order_and_once(rows: list[tuple[int, int]], spare: int, grain: int) -> None:
    firsts, lengths = np.array(rows).T
    chunks = cut(firsts, firsts + lengths, len(rows) + spare, grain)
    assert chunks.items.shape == (len(rows) + spare, 3)
    for row, (first, length) in enumerate(rows):
        own = chunks.items[chunks.bounds[row] : chunks.bounds[row + 1]]
        assert (own[:, 0] == row).all()
        assert own[0, 1] == first
        assert own[-1, 2] == first + length
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 2] > own[:, 1]).all()
    assert not chunks.items[chunks.bounds[-1] :].any()


@given(rows=ROWS, spare=st.integers(1, 60), grain=st.sampled_from([1, 4, 64]))
def test_no_chunk_is_longer_than_a_share_of_the_spare_room(rows: list[tuple[int, int]], spare: int, grain: int) -> None:
    firsts, lengths = np.array(rows).T
    items = cut(firsts, firsts + lengths, len(rows) + spare, grain).items
    assert (items[:, 2] - items[:, 1]).max() < lengths.sum() / spare + grain


def test_one_long_row_among_short_ones_is_cut_into_many_chunks() -> None:
    ends = np.array([100] * 31 + [32_000])
    bounds = cut(np.zeros_like(ends), ends, most=32 + 64, grain=64).bounds
    assert np.diff(bounds).tolist() == [1] * 31 + [56]  # 35,100 tokens over 64 places: 548.4, in whole grains 576
