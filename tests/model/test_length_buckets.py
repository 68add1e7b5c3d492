"""Promises: a row keeps its keys and values wherever it is moved; each slot has one owner; free slots are closed; the
memory stays within a budget that the rows keep.

A law, under Hypothesis: after any sequence of placing, moving and releasing, every row reads back what it wrote.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import BoundViolated
from stretto.model.decode.length_buckets import CacheLayout, LengthBuckets
from stretto_kernels.large_pages import zeros
from tests.trainer.scale.counting import LiveBytes

CPU = torch.device("cpu")


def buckets(context_length: int = 300, most_tokens: int | None = None) -> LengthBuckets:
    return LengthBuckets(CacheLayout(2, 1, 4, context_length, torch.float32, CPU), most_tokens)


def write(cache: LengthBuckets, row: int) -> None:
    """Row r writes r + 1 everywhere."""
    bucket, slot = cache.place_of(row)
    for held in (*bucket.keys, *bucket.values):
        held[slot] = row + 1.0


def reads_own(cache: LengthBuckets, row: int, tokens: int) -> bool:
    bucket, slot = cache.place_of(row)
    return all(bool((held[slot, :, :tokens] == row + 1.0).all()) for held in (*bucket.keys, *bucket.values))


def tokens_used(cache: LengthBuckets) -> int:
    return sum(cache.place_of(row)[0].length for row in cache.rows())


def test_a_row_goes_to_the_shortest_bucket_that_holds_it() -> None:
    cache = buckets()
    lengths = [cache.place(row, tokens)[0].length for row, tokens in enumerate((1, 64, 65, 128, 129, 300))]
    assert lengths == [64, 64, 128, 128, 256, 300]


def test_a_row_that_outgrows_its_bucket_takes_its_cache_along() -> None:
    cache = buckets()
    cache.place(7, 60)
    write(cache, 7)
    cache.move(7, 65)
    assert cache.place_of(7)[0].length == 128
    assert reads_own(cache, 7, 64)
    cache.compact()
    assert [bucket.length for bucket in cache.used()] == [128]
    cache.check_integrity()


def test_the_last_row_moves_into_a_free_slot() -> None:
    cache = buckets()
    for row in range(4):
        cache.place(row, 10)
        write(cache, row)
    cache.release(1)
    cache.compact()
    assert cache.used()[0].owners == [0, 3, 2]
    assert reads_own(cache, 3, 64)


def test_a_new_row_fills_a_free_slot_before_anything_moves() -> None:
    cache = buckets()
    for row in range(3):
        cache.place(row, 10)
    cache.release(1)
    cache.place(9, 10)
    cache.compact()
    assert cache.used()[0].owners == [0, 9, 2]


def test_a_bucket_grows_and_keeps_its_rows() -> None:
    cache = buckets()
    for row in range(9):
        cache.place(row, 10)
        write(cache, row)
    assert all(reads_own(cache, row, 64) for row in range(9))
    assert cache.tokens_allocated() == 16 * 64


def test_rows_that_come_together_lengthen_a_bucket_once() -> None:
    cache = buckets()
    for row in range(3):
        cache.place(row, 10)
        write(cache, row)
    (bucket,) = cache.used()
    cache.release(1)
    cache.expect([10] * 20 + [100] * 9)
    held = bucket.keys[1]
    for row in range(3, 23):
        cache.place(row, 10)
    for row in range(23, 32):
        cache.place(row, 100)
    assert bucket.keys[1] is held
    assert [bucket.capacity for bucket in cache.used()] == [22, 9]  # of three, one had gone
    assert all(reads_own(cache, row, 10) for row in (0, 2))


def test_memory_in_large_pages_is_zeros_of_its_own() -> None:
    first, second = (zeros((2, 1 << 19), torch.float32, CPU) for _ in range(2))
    first += 1
    assert first.sum() == 1 << 20
    assert not second.any()


def test_a_cache_grows_and_shrinks_with_one_layer_there_twice_at_most() -> None:
    """Counted on tensors without numbers, at the shape of an 8B model: of 36 layers one's keys or values are there
    twice; all of them would be twice 288 MiB more."""
    layout = CacheLayout(36, 8, 128, 1 << 15, torch.bfloat16, torch.device("meta"))
    with LiveBytes() as bytes_:
        cache = LengthBuckets(layout)
        for row in range(16):
            cache.place(row, 100)
        (bucket,) = cache.used()
        assert bytes_.now == cache.tokens_allocated() * layout.bytes_per_token == 16 * 128 * layout.bytes_per_token
        for slots in (32, 20):
            bytes_.peak = 0
            held = bytes_.now
            bucket.resize(slots)
            one = max(held, bytes_.now) // (2 * layout.layers)
            assert bytes_.now == slots * 128 * layout.bytes_per_token
            assert bytes_.peak <= max(held, bytes_.now) + one


@pytest.mark.parametrize(("most_tokens", "capacity"), [(None, 8), (64 * 7, 7), (64 * 5, 5)])
def test_what_is_taken_for_rows_that_come_is_spare_within_the_budget(most_tokens: int | None, capacity: int) -> None:
    """Four slots are full and one more row comes: twice as many slots, unless the budget holds fewer."""
    cache = buckets(most_tokens=most_tokens)
    for row in range(4):
        cache.place(row, 10)
    cache.expect([10])
    assert [bucket.capacity for bucket in cache.used()] == [capacity]


def test_a_token_takes_the_bytes_of_its_keys_and_values_in_all_layers() -> None:
    layout = CacheLayout(layers=2, kv_heads=3, head_dim=4, context_length=300, dtype=torch.bfloat16, device=CPU)
    assert layout.bytes_per_token == 2 * 2 * 3 * 4 * 2
    assert [layout.slot(tokens) for tokens in (1, 64, 65, 256, 257, 300)] == [64, 64, 128, 256, 300, 300]


def test_spare_slots_are_given_back_when_another_bucket_needs_the_memory() -> None:
    cache = buckets(most_tokens=8 * 64)
    for row in range(5):
        cache.place(row, 10)
        write(cache, row)
    assert cache.tokens_allocated() == 8 * 64
    cache.move(4, 65)
    cache.compact()
    assert (cache.tokens_allocated(), tokens_used(cache)) == (8 * 64, 4 * 64 + 128)
    assert all(reads_own(cache, row, 64) for row in range(5))


def test_clearing_forgets_rows_and_keeps_memory() -> None:
    cache = buckets()
    cache.place(0, 10)
    cache.clear()
    assert (len(cache), cache.used(), cache.tokens_allocated()) == (0, [], 4 * 64)
    cache.check_integrity()


def test_more_tokens_than_the_context_are_a_violated_bound() -> None:
    with pytest.raises(BoundViolated, match="301 tokens do not fit the context of 300"):
        buckets().place(0, 301)


def test_a_slot_with_two_minds_about_its_owner_is_found() -> None:
    cache = buckets()
    bucket, slot = cache.place(0, 10)
    bucket.owners[slot] = 5
    with pytest.raises(BoundViolated, match="row 0 has slot 0"):
        cache.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["place", "move", "release", "close"]), st.integers(0, 11)), max_size=60),
    st.sampled_from([None, 12 * 300, 900]),
)
def test_every_row_reads_what_it_wrote_whatever_happens_to_the_others(
    story: list[tuple[str, int]], most_tokens: int | None
) -> None:
    cache, held = buckets(most_tokens=most_tokens), dict[int, int]()
    for verb, row in story:
        if verb == "place" and row not in held:
            held[row] = 40
            cache.place(row, 40)
            write(cache, row)
        elif verb == "move" and 0 < held.get(row, 0) < 160:
            longest = cache.place_of(row)[0].length
            cache.move(row, longest + 1)
            assert reads_own(cache, row, longest)
            write(cache, row)
            held[row] = longest + 1
        elif verb == "release" and row in held:
            del held[row]
            cache.release(row)
        elif verb == "close":
            cache.compact()
            assert all(min(bucket.owners) >= 0 for bucket in cache.used())
            assert most_tokens is None or cache.tokens_allocated() <= max(most_tokens, tokens_used(cache))
        cache.check_integrity()
        assert all(reads_own(cache, other, tokens) for other, tokens in held.items())


def test_buckets_without_rows_are_as_new() -> None:
    cache = buckets()
    for row in (0, 1, 2):
        cache.place(row, 10)
    for row in (1, 2, 0):
        cache.release(row)
    assert [cache.place(row, 10)[1] for row in (7, 5, 6)] == [0, 1, 2]
