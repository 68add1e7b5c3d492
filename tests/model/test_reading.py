"""Promises of reading cached keys and values:

- each row sees the tokens before its end, within the layer's window, and nothing else;
- ragged and dense reading give the same, to rounding, for any lengths, groups of heads, windows and caps;
- what lies behind a row's end, or in slots without a row, has no effect;
- bfloat16 keys and values are read as the float32 numbers that they are: only the result is rounded.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.model.decode.steps import Dense, Ragged, Reading, attention_window, reading
from stretto_kernels.compiled import AVAILABLE
from stretto_kernels.rule import Rule
from tests.tolerances import assert_close

CPU, SLOT = torch.device("cpu"), 40
SCORES = 10.0  # products of normal numbers and their means are no larger


def dense(newest: np.ndarray, rule: Rule) -> Dense:
    return Dense({rule.window: attention_window(newest, torch.from_numpy(newest), rule.window, torch.float32)})


def drawn(seed: int, rows: int, heads: int, kv_heads: int, width: int) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, width), (rows + 1, kv_heads, SLOT, width), (rows + 1, kv_heads, SLOT, width))
    query, keys, values = (torch.randn(shape, generator=chance) for shape in shapes)
    return query, keys, values


def both(newest: np.ndarray, rule: Rule) -> list[Reading]:
    return [dense(newest, rule), Ragged(newest + 1)]


def test_a_row_of_one_token_takes_that_tokens_value() -> None:
    query, keys, values = drawn(1, rows=2, heads=2, kv_heads=1, width=8)
    for read in both(np.array([0, 0]), Rule()):
        assert_close(read.attend(query, keys, values, Rule()), values[:2, :, 0].expand(2, 2, 8))


def test_two_tokens_are_mixed_by_the_exponentials_of_their_scores() -> None:
    # Scores 0 and ln 3 give weights 1/4 and 3/4: 1/4 * 8 + 3/4 * 4 = 5.
    query = torch.tensor([[[1.0, 0.0]]])
    keys = torch.tensor([[[[0.0, 9.0], [float(np.log(3)), -9.0]]]])
    values = torch.tensor([[[[8.0, 0.0], [4.0, 0.0]]]])
    for read in both(np.array([1]), Rule(scaling=1.0)):
        assert_close(read.attend(query, keys, values, Rule(scaling=1.0)), torch.tensor([[[5.0, 0.0]]]))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ends=st.lists(st.integers(0, SLOT - 1), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    width=st.sampled_from([4, 8, 16, 20, 64]),
    window=st.sampled_from([None, 1, 3, 17]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    scaling=st.sampled_from([None, 0.07]),
)
def test_ragged_and_dense_reading_give_the_same(
    seed: int,
    ends: list[int],
    heads: tuple[int, int],
    width: int,
    window: int | None,
    softcap: float | None,
    scaling: float | None,
) -> None:
    query, keys, values = drawn(seed, len(ends), *heads, width)
    newest, rule = np.array(ends), Rule(scaling, window, softcap)
    expected, taken = (read.attend(query, keys, values, rule) for read in both(newest, rule))
    assert_close(taken, expected, width + SLOT, size=SCORES)


def test_what_lies_outside_a_row_has_no_effect() -> None:
    query, keys, values = drawn(3, rows=2, heads=4, kv_heads=2, width=16)
    newest, rule = np.array([10, 25]), Rule(window=8)
    before = Ragged(newest + 1).attend(query, keys, values, rule)
    for row, end in enumerate(newest):
        for cache in (keys, values):
            cache[row, :, end + 1 :], cache[row, :, : end - 7] = torch.nan, torch.nan
    keys[2], values[2] = torch.nan, torch.nan
    assert torch.equal(Ragged(newest + 1).attend(query, keys, values, rule), before)


def test_scores_far_apart_do_not_overflow() -> None:
    query = torch.tensor([[[1.0]]])
    keys = torch.tensor([[[[-4e4], [4e4], [0.0]]]])
    values = torch.tensor([[[[1.0], [2.0], [3.0]]]])
    for read in both(np.array([2]), Rule(scaling=1.0)):
        assert_close(read.attend(query, keys, values, Rule(scaling=1.0)), torch.tensor([[[2.0]]]))


@pytest.mark.parametrize("width", [16, 20, 64])
@pytest.mark.parametrize("window", [None, 5])
def test_bfloat16_is_read_as_the_numbers_it_stands_for(window: int | None, width: int) -> None:
    halves = [x.bfloat16() for x in drawn(4, rows=4, heads=6, kv_heads=2, width=width)]
    newest, rule = np.array([0, 7, 30, SLOT - 1]), Rule(window=window)
    query, keys, values = halves
    expected = Ragged(newest + 1).attend(query.float(), keys.float(), values.float(), rule)
    taken = Ragged(newest + 1).attend(query, keys, values, rule)
    assert ((taken.float() - expected).abs() <= expected.abs() / 256 + 1e-5).all()  # rounded once


def test_the_processor_reads_both_kinds_of_numbers_ragged() -> None:
    newest = np.array([3, 5])
    for kind in (torch.float32, torch.bfloat16):
        assert isinstance(reading(newest, frozenset({None}), CPU, kind), Ragged if AVAILABLE else Dense)
    assert isinstance(reading(newest, frozenset({None}), CPU, torch.float16), Dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_newest_entry_is_written_and_read_in_one_call(dtype: torch.dtype) -> None:
    query, keys, values = (x.to(dtype) for x in drawn(5, rows=3, heads=4, kv_heads=2, width=16))
    newest, rule = np.array([0, 9, SLOT - 1]), Rule(window=20)
    key, value = keys[[0, 1, 2], :, newest].clone(), values[[0, 1, 2], :, newest].clone()
    expected, before = Ragged(newest + 1).attend(query, keys, values, rule), (keys.clone(), values.clone())
    for cache in (keys, values):
        cache[[0, 1, 2], :, newest] = 7.0
    assert torch.equal(Ragged(newest + 1).attend(query, keys, values, rule, (key, value)), expected)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
