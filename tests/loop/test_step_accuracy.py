"""The accuracy of a training step counts every completion judged since the step before, by an earlier process of the
run too; where there is none, the accuracy before it stands."""

from __future__ import annotations

import pytest

from stretto.core.records import Outcome, Trajectory, Verdict
from stretto.store.series.metrics import read_metrics
from tests.loop.test_checkpointing import PROMPT, UPDATE, Desk, batch, desk

__all__ = ["desk"]  # a fixture


def judged(desk: Desk, *outcomes: Outcome, reason: str = "") -> None:
    rewards = {Outcome.RIGHT: 1.0, Outcome.WRONG: 0.0, Outcome.UNDECIDED: None}
    trajectories = [
        Trajectory(f"0.17.1/{member}", (), Verdict(outcome, rewards[outcome], reason), "")
        for member, outcome in enumerate(outcomes)
    ]
    desk.recorder.judged(PROMPT, trajectories)


@pytest.mark.parametrize(
    ("before", "after", "accuracy"),
    [
        ((Outcome.WRONG, Outcome.WRONG, Outcome.RIGHT), (Outcome.RIGHT, Outcome.UNDECIDED), 0.5),
        ((Outcome.WRONG, Outcome.RIGHT, Outcome.RIGHT, Outcome.RIGHT), (), 0.75),
    ],
)
def test_the_accuracy_of_a_step_counts_what_an_earlier_process_has_judged(
    desk: Desk, before: tuple[Outcome, ...], after: tuple[Outcome, ...], accuracy: float
) -> None:
    judged(desk, *before)
    desk.ledger.event("a flush", "of whatever changed")
    desk.ledger.flush()
    resumed = Desk(desk.folder, desk.ledger)
    judged(resumed, *after)
    resumed.one_step()
    (step,), _ = read_metrics(desk.folder.metrics)
    assert step.accuracy == accuracy


def test_the_accuracy_stands_where_nothing_was_judged_since_also_over_a_resume(desk: Desk) -> None:
    judged(desk, Outcome.RIGHT, Outcome.WRONG)
    desk.one_step()
    desk.ledger.flush()
    resumed = Desk(desk.folder, desk.ledger)
    resumed.recorder.updated(batch(), UPDATE)
    steps, _ = read_metrics(desk.folder.metrics)
    assert [step.accuracy for step in steps] == [0.5, 0.5]


def test_a_step_has_the_share_of_undecided_completions_and_the_most_frequent_reason(desk: Desk) -> None:
    judged(desk, Outcome.UNDECIDED, Outcome.RIGHT, reason="timeout after 1 s")
    desk.ledger.event("a flush", "of whatever changed")
    desk.ledger.flush()
    resumed = Desk(desk.folder, desk.ledger)
    judged(resumed, Outcome.UNDECIDED, reason="timeout after 1 s")
    judged(resumed, Outcome.UNDECIDED, Outcome.WRONG, Outcome.UNDECIDED, reason="the reward raised KeyError: 'a'")
    judged(resumed, Outcome.UNDECIDED, Outcome.UNDECIDED, reason="the reward raised KeyError: 'b'")
    resumed.one_step()
    resumed.recorder.updated(batch(), UPDATE)
    (step, _), _ = read_metrics(desk.folder.metrics)
    assert step.undecided == 6 / 8  # those that the process before has judged count too
    assert step.undecided_reason == "the reward raised KeyError: 'b'"
    assert step.accuracy == 0.5


def test_a_step_without_any_verdict_since_the_one_before_counts_nothing_twice(desk: Desk) -> None:
    judged(desk, Outcome.UNDECIDED, Outcome.UNDECIDED, reason="no number")
    desk.one_step()
    desk.recorder.updated(batch(), UPDATE)
    steps, _ = read_metrics(desk.folder.metrics)
    assert [(step.undecided, step.undecided_reason) for step in steps] == [(1.0, "no number"), (None, "")]
