"""Which answers are asked for together, and who is to blame when a worker is lost.

Promises: a call is cut into chunks that cover each answer once; of what a lost worker owed, each answer is found again
exactly once, and only the one that was being judged is blamed.
"""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stretto.rewards.service.queueing import Call, Chunk, blame, chunks
from stretto.rewards.service.wire import ScoreItem


async def _call(size: int, answer: str) -> Call:
    return Call([ScoreItem(prompt="", completion=str(index), answer=answer) for index in range(size)])


def call_of(size: int, answer: str = "") -> Call:
    return asyncio.run(_call(size, answer))


def test_a_quick_group_travels_whole_and_slow_answers_one_by_one() -> None:
    call = call_of(8)
    assert [chunk.indices for chunk in chunks(call, 0.0001)] == [tuple(range(8))]
    assert [chunk.indices for chunk in chunks(call, 0.007)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert len(chunks(call, 3.0)) == 8


@given(st.integers(1, 300), st.floats(0, 10))
def test_chunks_cover_a_call_once_and_in_order(size: int, seconds: float) -> None:
    assert [index for chunk in chunks(call_of(size), seconds) for index in chunk.indices] == list(range(size))


def test_the_answer_that_was_being_judged_is_blamed_alone() -> None:
    first, second = call_of(3), call_of(2)
    # 10 answers replied, 11 finished since the start, the 12th begun: index 1 of the first chunk.
    found = blame([Chunk(first, (0, 1, 2)), Chunk(second, (0, 1))], judged=10, progress=23)
    assert found.culprit == Chunk(first, (1,), losses=1)
    assert found.innocent == (Chunk(first, (0, 2)), Chunk(second, (0, 1)))


def test_nobody_is_blamed_for_a_worker_that_died_between_two_answers() -> None:
    call = call_of(3)
    found = blame([Chunk(call, (0, 1, 2))], judged=0, progress=4)
    assert found.culprit is None
    assert found.innocent == tuple([Chunk(call, (index,), losses=1) for index in (0, 1, 2)])


def test_items_with_large_tests_go_in_chunks_that_a_frame_holds() -> None:
    assert [len(chunk.indices) for chunk in chunks(call_of(7, answer="x" * (20 << 20)), 0.0)] == [3, 3, 1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 50), st.data())
def test_of_what_was_owed_each_answer_is_found_again_once(sizes: list[int], answered: int, data: st.DataObject) -> None:
    outstanding = [Chunk(call_of(size), tuple(range(size))) for size in sizes]
    begun = data.draw(st.integers(0, sum(sizes) - 1))
    found = blame(outstanding, answered, 2 * (answered + begun) + data.draw(st.integers(0, 1)))
    parts = [*found.innocent, *([found.culprit] if found.culprit else [])]
    owed = sorted((id(chunk.call), index) for chunk in outstanding for index in chunk.indices)
    assert sorted((id(chunk.call), index) for chunk in parts for index in chunk.indices) == owed
