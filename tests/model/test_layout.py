"""Promises: a packing has each token exactly once, in order, whatever is shared; padding is bounded; what cannot be
packed is refused.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.model.layout import SHORTEST_IN_BUCKET, pack

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def test_the_example_of_the_docstring() -> None:
    packing = pack([3, 2, 3], prefixes=[(0, 0), (1, 0), (0, 2)])
    assert packing.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packing.buckets == ((2, 3), (1, 2))
    assert packing.token_of_cell.tolist() == [0, 1, 2, 0, 1, 5, 3, 4]
    assert packing.cell_of_token.tolist() == [0, 1, 2, 6, 7, 5]
    assert packing.shared_cells.tolist() == [3, 4]
    assert packing.shared_tokens.tolist() == [0, 1]
    assert (packing.tokens, packing.longest, packing.shares_prefixes) == (6, 3, True)


def test_padding_repeats_the_last_token_and_boundaries_are_cumulative() -> None:
    packing = pack([4, 3])
    assert packing.buckets == ((2, 4),)
    assert packing.token_of_cell.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert packing.boundaries.tolist() == [0, 4, 7]
    assert not packing.shares_prefixes


@given(LENGTHS)
def test_every_token_has_one_cell_and_stands_in_order_in_its_row(lengths: list[int]) -> None:
    packing = pack(lengths)
    assert packing.token_of_cell[packing.cell_of_token].tolist() == list(range(sum(lengths)))
    assert sum(rows for rows, _ in packing.buckets) == len(lengths)
    assert sum(rows * length for rows, length in packing.buckets) == len(packing.token_of_cell)
    assert all(row.diff().eq(1).all() for row in packing.cell_of_token.split(lengths))


@given(st.integers(1, 12), LENGTHS)
def test_a_shared_prompt_is_in_the_row_once_and_in_each_sequences_cells(prompt: int, answers: list[int]) -> None:
    lengths = [prompt + answer for answer in answers]
    packing = pack(lengths, prefixes=[(0, prompt if s else 0) for s in range(len(lengths))])
    assert packing.tokens == prompt + sum(answers)
    assert packing.position_ids[0].tolist() == list(range(prompt)) + [prompt + k for n in answers for k in range(n)]
    assert packing.token_of_cell[packing.cell_of_token].tolist() == list(range(packing.tokens))
    assert packing.token_of_cell[packing.shared_cells].tolist() == packing.shared_tokens.tolist()
    assert packing.shared_tokens.tolist() == list(range(prompt)) * (len(answers) - 1)
    both = torch.cat((packing.cell_of_token, packing.shared_cells))
    assert len(both.unique()) == len(both) == sum(lengths)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_padding_is_bounded(lengths: list[int]) -> None:
    packing = pack(lengths)
    assert len(packing.token_of_cell) <= packing.tokens / SHORTEST_IN_BUCKET


@pytest.mark.parametrize(
    ("lengths", "prefixes", "message"),
    [
        ([], None, "at least one sequence"),
        ([3, 0], None, "sequence 1 has 0 tokens"),
        ([3, 2], [(0, 0), (0, 2)], "shares 2: at least one must be its own"),
        ([1, 4], [(0, 0), (0, 2)], "which owns fewer"),
        ([4, 4, 4], [(0, 0), (0, 2), (1, 2)], "which owns fewer"),
    ],
)
def test_what_cannot_pack_is_refused(lengths: list[int], prefixes: list[tuple[int, int]] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, prefixes=prefixes)
