"""Promises: first come, first served; an answer is waiting, pending or running, and only one of them; nothing is lost.

A law, under Hypothesis: after any story of the five verbs every row and every answer is accounted for.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RefusedRequest
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.scheduler import Scheduler


def request(name: str, answers: int = 1, prompt: int = 4, max_tokens: int = 6) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens)
    return GenerateRequest(id=name, prompt_token_ids=(2,) * prompt, seeds=tuple(range(answers)), sampling=sampling)


def admitted(scheduler: Scheduler) -> list[tuple[str, int]]:
    return [(member.request.id, member.index) for _, member in scheduler.admit()]


def start_all(scheduler: Scheduler) -> list[int]:
    return scheduler.take_pending(dict.fromkeys(scheduler.pending, 1), 1000)


def test_the_story_of_the_docstring() -> None:
    scheduler = Scheduler(rows=2, cache_tokens=1000)
    scheduler.add(request("a", answers=3))
    assert admitted(scheduler) == [("a", 0), ("a", 1)]
    assert start_all(scheduler) == [0, 1]
    scheduler.finish(0)
    assert [(row, member.index) for row, member in scheduler.admit()] == [(0, 2)]
    scheduler.check_integrity()


def test_requests_are_served_in_the_order_of_their_arrival() -> None:
    scheduler = Scheduler(rows=3, cache_tokens=1000)
    for name in "abcd":
        scheduler.add(request(name))
    assert admitted(scheduler) == [("a", 0), ("b", 0), ("c", 0)]
    start_all(scheduler)
    scheduler.finish(1)
    assert admitted(scheduler) == [("d", 0)]


def test_an_answer_waits_until_the_cache_has_room_for_all_that_it_may_become() -> None:
    scheduler = Scheduler(rows=8, cache_tokens=25)  # two answers of 10 tokens, not three
    scheduler.add(request("a", answers=3))
    assert len(scheduler.admit()) == 2
    start_all(scheduler)
    scheduler.finish(0)
    assert len(scheduler.admit()) == 1
    scheduler.check_integrity()


def test_an_answer_that_can_never_fit_is_refused() -> None:
    with pytest.raises(RefusedRequest, match=r"sampling.max_tokens: 10 with the prompt.*cache_tokens = 9"):
        Scheduler(rows=8, cache_tokens=9).add(request("a"))


def test_an_id_that_is_in_use_is_refused_until_its_answers_have_ended() -> None:
    scheduler = Scheduler(rows=1, cache_tokens=1000)
    scheduler.add(request("a"))
    with pytest.raises(RefusedRequest, match="id: 'a'"):
        scheduler.add(request("a"))
    scheduler.admit()
    start_all(scheduler)
    scheduler.finish(0)
    assert scheduler.idle
    scheduler.add(request("a"))


def test_interrupted_answers_come_before_new_ones_in_a_budget_of_tokens() -> None:
    scheduler = Scheduler(rows=4, cache_tokens=1000)
    scheduler.add(request("a", answers=2))
    scheduler.admit()
    start_all(scheduler)
    scheduler.add(request("b", answers=2))
    scheduler.admit()
    scheduler.interrupt()
    costs = {0: 50, 1: 30, 2: 4, 3: 4}
    assert scheduler.take_pending(costs, 40) == [0]  # over the budget by itself: one row at least
    assert scheduler.take_pending(costs, 40) == [1, 2, 3]
    scheduler.check_integrity()


def test_aborting_forgets_waiting_pending_and_running_answers_of_that_request_only() -> None:
    scheduler = Scheduler(rows=3, cache_tokens=1000)
    scheduler.add(request("a", answers=2))
    scheduler.add(request("b", answers=3))
    scheduler.admit()
    scheduler.take_pending(dict.fromkeys(scheduler.pending, 10), 20)
    assert scheduler.abort("b") == [2]
    scheduler.check_integrity()
    assert (scheduler.waiting, scheduler.rows_in_use) == (0, 2)
    assert scheduler.abort("unknown") == []
    assert scheduler.abort("a") == [0, 1]
    assert scheduler.idle
    scheduler.check_integrity()


VERBS = st.sampled_from(["add", "admit", "take", "finish", "interrupt", "abort"])


@given(st.lists(st.tuples(VERBS, st.integers(0, 5)), max_size=80))
def test_every_row_and_every_answer_is_accounted_for_whatever_happens(story: list[tuple[str, int]]) -> None:
    scheduler, opened, ended, aborted = Scheduler(rows=4, cache_tokens=35), 0, 0, 0
    for at, (verb, number) in enumerate(story):
        before = scheduler.waiting + scheduler.rows_in_use
        if verb == "add":
            scheduler.add(request(f"{at}.{number}", answers=number + 1))
            opened += number + 1
        elif verb == "admit":
            scheduler.admit()
        elif verb == "take":
            scheduler.take_pending(dict.fromkeys(scheduler.pending, 5), 5 * number)
        elif verb == "finish" and scheduler.running:
            scheduler.finish(scheduler.running[number % len(scheduler.running)])
            ended += 1
        elif verb == "interrupt":
            scheduler.interrupt()
        elif verb == "abort":
            for name in {scheduler.member(row).request.id for row in (*scheduler.pending, *scheduler.running)}:
                scheduler.abort(name)
            aborted += before - scheduler.waiting - scheduler.rows_in_use
        scheduler.check_integrity()
        assert opened == ended + aborted + scheduler.waiting + scheduler.rows_in_use
        assert scheduler.idle == (opened == ended + aborted)
