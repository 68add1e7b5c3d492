"""Promises: a row keeps its keys and values wherever it is moved; each slot has one owner; holes are closed; a budget
that the rows keep is kept by the memory, too.

A law, under Hypothesis: after any sequence of placing, stretching and releasing, every row reads back what it wrote.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import BoundViolated
from stretto.model.decode.length_buckets import CacheLayout, LengthBuckets

CPU = torch.device("cpu")


def shelves(context_length: int = 300, most_tokens: int | None = None) -> LengthBuckets:
    return LengthBuckets(CacheLayout(2, 1, 4, context_length, torch.float32, CPU), most_tokens)


def write(shelved: LengthBuckets, row: int) -> None:
    """Row r writes r + 1 everywhere."""
    shelf, slot = shelved.place_of(row)
    shelf.cache[:, :, slot] = row + 1.0


def reads_own(shelved: LengthBuckets, row: int, tokens: int) -> bool:
    shelf, slot = shelved.place_of(row)
    return bool((shelf.cache[:, :, slot, :, :tokens] == row + 1.0).all())


def test_a_row_goes_to_the_shortest_shelf_that_holds_it() -> None:
    shelved = shelves()
    lengths = [shelved.place(row, tokens)[0].length for row, tokens in enumerate((1, 64, 65, 128, 129, 300))]
    assert lengths == [64, 64, 128, 128, 256, 300]


def test_a_row_that_outgrows_its_shelf_takes_its_cache_along() -> None:
    shelved = shelves()
    shelved.place(7, 60)
    write(shelved, 7)
    shelved.stretch(7, 65)
    assert shelved.place_of(7)[0].length == 128
    assert reads_own(shelved, 7, 64)
    shelved.close_holes()
    assert [shelf.length for shelf in shelved.used()] == [128]
    shelved.check_integrity()


def test_the_last_row_moves_into_a_hole() -> None:
    shelved = shelves()
    for row in range(4):
        shelved.place(row, 10)
        write(shelved, row)
    shelved.release(1)
    shelved.close_holes()
    assert shelved.used()[0].owners == [0, 3, 2]
    assert reads_own(shelved, 3, 64)


def test_a_new_row_fills_a_hole_before_anything_moves() -> None:
    shelved = shelves()
    for row in range(3):
        shelved.place(row, 10)
    shelved.release(1)
    shelved.place(9, 10)
    shelved.close_holes()
    assert shelved.used()[0].owners == [0, 9, 2]


def test_a_shelf_grows_and_keeps_its_rows() -> None:
    shelved = shelves()
    for row in range(9):
        shelved.place(row, 10)
        write(shelved, row)
    assert all(reads_own(shelved, row, 64) for row in range(9))
    assert shelved.tokens_allocated() == 16 * 64


def test_rows_that_come_together_lengthen_a_shelf_once() -> None:
    shelved = shelves()
    for row in range(3):
        shelved.place(row, 10)
        write(shelved, row)
    (shelf,) = shelved.used()
    shelved.release(1)
    shelved.expect([10] * 20 + [100] * 9)
    held = shelf.cache
    for row in range(3, 23):
        shelved.place(row, 10)
    for row in range(23, 32):
        shelved.place(row, 100)
    assert shelf.cache is held
    assert [shelf.capacity for shelf in shelved.used()] == [22, 9]  # of three, one had gone
    assert all(reads_own(shelved, row, 10) for row in (0, 2))


@pytest.mark.parametrize(("most_tokens", "capacity"), [(None, 8), (64 * 7, 7), (64 * 5, 5)])
def test_what_is_taken_for_rows_that_come_is_spare_only_within_the_budget(
    most_tokens: int | None, capacity: int
) -> None:
    """Four slots are full and one more row comes: twice as many slots, unless the budget holds fewer."""
    shelved = shelves(most_tokens=most_tokens)
    for row in range(4):
        shelved.place(row, 10)
    shelved.expect([10])
    assert [shelf.capacity for shelf in shelved.used()] == [capacity]


def test_a_token_takes_the_bytes_of_its_keys_and_values_in_all_layers() -> None:
    layout = CacheLayout(layers=2, kv_heads=3, head_dim=4, context_length=300, dtype=torch.bfloat16, device=CPU)
    assert layout.bytes_per_token == 2 * 2 * 3 * 4 * 2
    assert [layout.slot(tokens) for tokens in (1, 64, 65, 256, 257, 300)] == [64, 64, 128, 256, 300, 300]


def test_spare_slots_are_given_back_when_another_shelf_needs_the_memory() -> None:
    shelved = shelves(most_tokens=8 * 64)
    for row in range(5):
        shelved.place(row, 10)
        write(shelved, row)
    assert shelved.tokens_allocated() == 8 * 64
    shelved.stretch(4, 65)
    shelved.close_holes()
    assert (shelved.tokens_allocated(), shelved.tokens_used()) == (8 * 64, 4 * 64 + 128)
    assert all(reads_own(shelved, row, 64) for row in range(5))


def test_clearing_forgets_rows_and_keeps_memory() -> None:
    shelved = shelves()
    shelved.place(0, 10)
    shelved.clear()
    assert (len(shelved), shelved.used(), shelved.tokens_allocated()) == (0, [], 4 * 64)
    shelved.check_integrity()


def test_more_tokens_than_the_context_are_a_violated_bound() -> None:
    with pytest.raises(BoundViolated, match="301 tokens do not fit the context of 300"):
        shelves().place(0, 301)


def test_a_slot_with_two_minds_about_its_owner_is_found() -> None:
    shelved = shelves()
    shelf, slot = shelved.place(0, 10)
    shelf.owners[slot] = 5
    with pytest.raises(BoundViolated, match="row 0 believes"):
        shelved.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["place", "stretch", "release", "close"]), st.integers(0, 11)), max_size=60),
    st.sampled_from([None, 12 * 300, 900]),
)
def test_every_row_reads_what_it_wrote_whatever_happens_to_the_others(
    story: list[tuple[str, int]], most_tokens: int | None
) -> None:
    shelved, held = shelves(most_tokens=most_tokens), dict[int, int]()
    for verb, row in story:
        if verb == "place" and row not in held:
            held[row] = 40
            shelved.place(row, 40)
            write(shelved, row)
        elif verb == "stretch" and 0 < held.get(row, 0) < 160:
            longest = shelved.place_of(row)[0].length
            shelved.stretch(row, longest + 1)
            assert reads_own(shelved, row, longest)
            write(shelved, row)
            held[row] = longest + 1
        elif verb == "release" and row in held:
            del held[row]
            shelved.release(row)
        elif verb == "close":
            shelved.close_holes()
            assert all(min(shelf.owners) >= 0 for shelf in shelved.used())
            assert most_tokens is None or shelved.tokens_allocated() <= max(most_tokens, shelved.tokens_used())
        shelved.check_integrity()
        assert all(reads_own(shelved, other, tokens) for other, tokens in held.items())


def test_shelves_without_rows_are_as_new() -> None:
    shelved = shelves()
    for row in (0, 1, 2):
        shelved.place(row, 10)
    for row in (1, 2, 0):
        shelved.release(row)
    assert [shelved.place(row, 10)[1] for row in (7, 5, 6)] == [0, 1, 2]
