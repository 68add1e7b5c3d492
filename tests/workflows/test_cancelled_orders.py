"""Promises about a workflow that stops to wait: a turn that it did not get is none of its turns and counts for no
limit, whether it was sampled or not, and is sampled no further; a call that was not made leaves a result on record, so
that a resume does not take it for one that a crash has cut short."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.core.forest import TurnRequest
from stretto.core.records import Outcome
from tests.workflows.benches import Bench, encode


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_turn_that_the_workflow_stopped_to_wait_for_is_not_among_its_turns(
    bench: Callable[..., Bench], seconds: float
) -> None:
    # With 0.5 the turn has ended when it is cancelled. The limits leave room for one turn.
    made = bench("Hurries", {"seconds": seconds}, max_turns=1, max_tokens=2)
    made.members = 1
    [trajectory] = made.run()
    assert trajectory.verdict.outcome is Outcome.RIGHT
    [turn] = [segment for segment in trajectory.segments if segment.sampled]
    assert turn.reward == 0.25
    [prompt] = [segment.token_ids for segment in trajectory.segments if not segment.sampled]
    assert prompt == encode("5+6=")


def test_a_turn_that_nobody_waits_for_is_sampled_no_further(bench: Callable[..., Bench], tmp_path: Path) -> None:
    broken_off, begun = asyncio.Event(), tmp_path / "begun"

    async def one_after_the_other(request: TurnRequest) -> None:
        if request.prompt[-4:] == encode("5+6="):
            await asyncio.wait_for(broken_off.wait(), 20)
            return
        try:
            begun.touch()
            await asyncio.sleep(60)
        finally:
            broken_off.set()

    made = bench("Hurries", {"begun": str(begun)})
    made.members, made.model.on_turn = 1, one_after_the_other
    [trajectory] = made.run()
    assert trajectory.verdict.outcome is Outcome.RIGHT


def test_a_turn_whose_sampler_takes_time_to_break_off_counts_for_no_limit(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    async def slow_to_leave(request: TurnRequest) -> None:
        if request.prompt[-4:] == encode("5+6="):
            return
        begun.touch()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    made = bench("Hurries", {"begun": str(begun)}, max_turns=1, max_tokens=2)
    made.members, made.model.on_turn = 1, slow_to_leave
    [trajectory] = made.run()
    assert trajectory.verdict.outcome is Outcome.RIGHT


def test_a_call_that_was_cancelled_before_it_was_made_is_on_record_as_that(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    made = bench("Hesitates", {"paid": str(tmp_path / "paid")})
    made.members = 1
    assert [one.verdict.outcome for one in made.run()] == [Outcome.RIGHT]
    assert [(call.reply or b"").partition(b":")[0] for call in made.records[0].calls] == [b"CancelledError"]
    assert not (tmp_path / "paid").exists()
    assert [one.verdict.outcome for one in made.run()] == [Outcome.RIGHT]  # after a crash
