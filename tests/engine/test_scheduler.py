"""Promises: first come, first served; an answer is waiting, pending or running, and only one of them; nothing is lost;
a full cache preempts the newest answers, and the oldest only under a lowered limit, which no step exceeds.

Laws, under Hypothesis: after any story of the verbs every row and every answer is accounted for; with any cache that
holds its answers one by one, however they grow and are interrupted, all of them end, and the oldest grows every time.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RefusedRequest
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.native.scheduler import Scheduler


def request(name: str, answers: int = 1, prompt: int = 4, max_tokens: int = 6) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens)
    return GenerateRequest(id=name, prompt_token_ids=(2,) * prompt, seeds=tuple(range(answers)), sampling=sampling)


def admitted(scheduler: Scheduler) -> list[tuple[str, int]]:
    return [(member.request.id, member.index) for _, member in scheduler.admit()]


def lengths(rows: int, tokens: int = 4) -> npt.NDArray[np.int64]:
    return np.full(rows, tokens, np.int64)


def start_all(scheduler: Scheduler) -> list[int]:
    return scheduler.take_pending(dict.fromkeys(scheduler.pending, 1), 1000, lengths(16))


def exactly(tokens: int) -> int:
    """Slots as long as what they hold."""
    return tokens


def doubling(tokens: int) -> int:
    """Slots of 4, 8, 16 ... tokens."""
    return max(4, 1 << (tokens - 1).bit_length())


def test_the_story_of_the_docstring() -> None:
    scheduler = Scheduler(rows=2, cache_tokens=1000, slot=exactly)
    scheduler.add(request("a", answers=3))
    assert admitted(scheduler) == [("a", 0), ("a", 1)]
    assert start_all(scheduler) == [0, 1]
    scheduler.finish(0)
    assert [(row, member.index) for row, member in scheduler.admit()] == [(0, 2)]
    scheduler.check_integrity()


def test_requests_are_served_in_the_order_of_their_arrival() -> None:
    scheduler = Scheduler(rows=3, cache_tokens=1000, slot=exactly)
    for name in "abcd":
        scheduler.add(request(name))
    assert admitted(scheduler) == [("a", 0), ("b", 0), ("c", 0)]
    start_all(scheduler)
    scheduler.finish(1)
    assert admitted(scheduler) == [("d", 0)]


def test_an_answer_waits_until_the_cache_has_capacity_for_what_it_is_now_and_for_some_growth() -> None:
    scheduler = Scheduler(rows=8, cache_tokens=32, slot=exactly)  # room for 8 of 4 tokens, 2 of them left to growth
    scheduler.add(request("a", answers=8))
    scheduler.admit()
    assert start_all(scheduler) == [0, 1, 2, 3, 4, 5, 6]
    assert not scheduler.has_capacity(lengths(8))
    scheduler.finish(0)
    assert start_all(scheduler) == [7]
    scheduler.check_integrity()


def test_when_the_cache_is_full_the_newest_answers_make_room_and_come_back_in_their_order() -> None:
    scheduler = Scheduler(rows=4, cache_tokens=17, slot=exactly)
    scheduler.add(request("a", answers=4))
    scheduler.admit()
    assert start_all(scheduler) == [0, 1, 2, 3]
    assert scheduler.grow(lengths(4, 4)) == []
    assert scheduler.grow(lengths(4, 6)) == [3, 2]  # 24 tokens, 18, 12
    assert (scheduler.running, scheduler.pending) == ([0, 1], (2, 3))
    scheduler.check_integrity()
    assert scheduler.grow(lengths(4, 9)) == [1]
    assert start_all(scheduler) == [1]
    scheduler.finish(0)
    assert start_all(scheduler) == [2, 3]
    scheduler.check_integrity()


def test_the_newest_makes_room_for_its_own_growth_too() -> None:
    scheduler = Scheduler(rows=2, cache_tokens=12, slot=exactly)
    scheduler.add(request("a", answers=2))
    scheduler.admit()
    start_all(scheduler)
    assert scheduler.grow(np.array([4, 9])) == [1]


def test_an_answer_that_can_never_fit_is_refused() -> None:
    with pytest.raises(RefusedRequest, match=r"sampling.max_tokens: 10 with the prompt.*holds 9 tokens.*cache_gib"):
        Scheduler(rows=8, cache_tokens=9, slot=exactly).add(request("a"))
    with pytest.raises(RefusedRequest, match="10 with the prompt"):
        Scheduler(rows=8, cache_tokens=15, slot=doubling).add(request("a"))


def test_an_id_that_is_in_use_is_refused_until_its_answers_have_ended() -> None:
    scheduler = Scheduler(rows=1, cache_tokens=1000, slot=exactly)
    scheduler.add(request("a"))
    with pytest.raises(RefusedRequest, match="id: 'a'"):
        scheduler.add(request("a"))
    scheduler.admit()
    start_all(scheduler)
    scheduler.finish(0)
    assert scheduler.idle
    scheduler.add(request("a"))


def test_interrupted_answers_come_before_new_ones_in_a_budget_of_tokens() -> None:
    scheduler = Scheduler(rows=4, cache_tokens=1000, slot=exactly)
    scheduler.add(request("a", answers=2))
    scheduler.admit()
    start_all(scheduler)
    scheduler.add(request("b", answers=2))
    scheduler.admit()
    scheduler.interrupt()
    costs = {0: 50, 1: 30, 2: 4, 3: 4}
    assert scheduler.take_pending(costs, 40, lengths(4)) == [0]  # over the budget by itself: one row at least
    assert scheduler.take_pending(costs, 40, lengths(4)) == [1, 2, 3]
    scheduler.check_integrity()


def test_what_is_needed_is_the_larger_share_of_rows_and_cache_and_above_one_something_waits() -> None:
    scheduler = Scheduler(rows=4, cache_tokens=100, slot=exactly)
    assert scheduler.needed(lengths(4)) == 0
    scheduler.add(request("a", answers=3))
    assert scheduler.needed(lengths(4)) == 3 / 4  # rows; nothing is cached
    scheduler.admit()
    tokens = np.array([30, 40, 10, 0])
    assert scheduler.needed(tokens) == 0.8  # pending ones: what they hold
    scheduler.take_pending(dict.fromkeys(scheduler.pending, 10), 20, tokens)
    # Two run with 70 tokens, 35 in the mean, which the third will come to need.
    assert scheduler.needed(tokens) == pytest.approx(1.05)
    scheduler.add(request("b", answers=2))
    assert scheduler.needed(tokens) == 5 / 4


def test_aborting_forgets_waiting_pending_and_running_answers_of_that_request_only() -> None:
    scheduler = Scheduler(rows=3, cache_tokens=1000, slot=exactly)
    scheduler.add(request("a", answers=2))
    scheduler.add(request("b", answers=3))
    scheduler.admit()
    scheduler.take_pending(dict.fromkeys(scheduler.pending, 10), 20, lengths(3))
    assert scheduler.abort("b") == [2]
    scheduler.check_integrity()
    assert (scheduler.waiting, len(scheduler.members)) == (0, 2)
    assert scheduler.abort("unknown") == []
    assert scheduler.abort("a") == [0, 1]
    assert scheduler.idle
    scheduler.check_integrity()


VERBS = st.sampled_from(["add", "admit", "take", "grow", "finish", "interrupt", "abort", "limit"])


@given(st.lists(st.tuples(VERBS, st.integers(0, 5)), max_size=80))
def test_every_row_and_every_answer_is_accounted_for_whatever_happens(story: list[tuple[str, int]]) -> None:
    scheduler, opened, ended, aborted = Scheduler(rows=4, cache_tokens=35, slot=doubling), 0, 0, 0
    tokens = lengths(4)
    for at, (verb, number) in enumerate(story):
        before = scheduler.waiting + len(scheduler.members)
        if verb == "add":
            scheduler.add(request(f"{at}.{number}", answers=number + 1))
            opened += number + 1
        elif verb == "admit":
            tokens[[row for row, _ in scheduler.admit()]] = 4
        elif verb == "take":
            scheduler.take_pending(dict.fromkeys(scheduler.pending, 5), 5 * number, tokens)
        elif verb == "grow":
            tokens[scheduler.running] += 3 * number
            tokens = tokens.clip(max=10)
            scheduler.grow(tokens)
        elif verb == "finish" and scheduler.running:
            scheduler.finish(scheduler.running[number % len(scheduler.running)])
            ended += 1
        elif verb == "interrupt":
            scheduler.interrupt()
        elif verb == "limit":
            scheduler.limit(7 * number)
        elif verb == "abort":
            for name in {scheduler.members[row].request.id for row in (*scheduler.pending, *scheduler.running)}:
                scheduler.abort(name)
            aborted += before - scheduler.waiting - len(scheduler.members)
        scheduler.check_integrity()
        assert opened == ended + aborted + scheduler.waiting + len(scheduler.members)
        assert scheduler.idle == (opened == ended + aborted)


@given(
    wanted=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 24)), min_size=1, max_size=8),
    spare=st.integers(0, 40),
    rows=st.integers(1, 5),
    prefill=st.integers(1, 60),
    updates=st.sets(st.integers(0, 60)),
)
def test_all_answers_end_and_the_oldest_grows_in_every_step(
    wanted: list[tuple[int, int, int]], spare: int, rows: int, prefill: int, updates: set[int]
) -> None:
    most = max(doubling(prompt + answer) for _, prompt, answer in wanted)
    scheduler, tokens, limits = Scheduler(rows, most + spare, doubling), lengths(rows), lengths(rows)
    for at, (answers, prompt, answer) in enumerate(wanted):
        scheduler.add(request(str(at), answers=answers, prompt=prompt, max_tokens=answer))
    todo, step = sum(answers * answer for answers, _, answer in wanted), 0
    arrival: list[tuple[str, int]] = []
    while not scheduler.idle:
        for row, member in scheduler.admit():
            tokens[row], limits[row] = len(member.request.prompt_token_ids), member.tokens
            arrival.append((member.request.id, member.index))
        scheduler.grow(tokens)
        scheduler.take_pending({row: int(tokens[row]) for row in scheduler.pending}, prefill, tokens)
        scheduler.check_integrity()
        running = {(m.request.id, m.index): row for row in scheduler.running for m in [scheduler.members[row]]}
        assert arrival[0] in running  # the oldest of all that have not ended
        for name, row in running.items():
            tokens[row] += 1
            if tokens[row] == limits[row]:
                scheduler.finish(row)
                arrival.remove(name)
        if step in updates:
            scheduler.interrupt()
        step += 1
        assert step <= todo
    scheduler.check_integrity()
