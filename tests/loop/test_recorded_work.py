"""What the recorder counts.

- For the goodput budget: tokens that are lost and tokens that go on, seconds by activity; and the bound that it notes
  of a step which a resume records.
- The accuracy of a training step counts every completion judged since the step before, by an earlier process of the run
  too; where there is none, the accuracy before it stands.
"""

import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from stretto.core.events import Span
from stretto.core.records import Outcome, Trajectory, Verdict
from stretto.launch.assemble.run import _record_again as record_again
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.records.totals import SPAN_AXIS, RunClock, Work, carried_over, span_offset
from stretto.rollout.adaptive import AdaptiveBound
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.prompts import PromptStream
from stretto.store.inspection import Inspection
from stretto.store.series.lines import Extent
from stretto.store.series.metrics import WRITTEN, SampledCompletion, read_metrics, rewind_metrics, rewind_samples
from stretto.store.totals import JUDGED, Judged, Totals
from stretto_report.reading.inspection import inspect_run
from stretto_report.reading.series import read_spans
from tests.loop.desk import BATCH, PROMPT, UPDATE, Desk
from tests.store.make import RIGHT, Make, buffered, run_at, sql


def counted(found: Inspection) -> dict[str, int]:
    """The tokens by category, of those that have any."""
    return {name: category.tokens for name, category in found.goodput.items() if category.tokens}


def test_what_the_end_of_a_run_cuts_off_waits_and_what_was_aborted_before_has_failed(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=6, stopped=3)  # lost with an engine
    desk.one_step()  # two tokens
    desk.recorder.gives_up()
    desk.work = Work(generated=9, stopped=7)
    assert counted(desk.concluded()) == {"trained": 2, "generated_and_waiting": 4, "failed": 3}


def test_an_answer_that_has_ended_and_whose_reply_is_lost_at_the_end_is_wasted_and_waits(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=5)
    desk.one_step()  # two tokens
    desk.recorder.gives_up()
    desk.work = Work(generated=9, stopped=3)  # an engine too slow to be waited for ended a turn of four tokens
    found = desk.concluded()
    assert counted(found) == {"trained": 2, "generated_and_waiting": 7}
    assert found.tokens.wasted == 7


def test_tokens_of_a_lost_engine_that_another_one_continued_are_wasted_and_generated_once(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=1, stopped=1)  # a token that was lost with its engine, and is trained all the same
    desk.one_step()  # two tokens
    found = desk.concluded()
    assert (found.tokens.generated, found.tokens.trained, found.tokens.wasted) == (2, 2, 0)


def test_the_ledger_knows_the_lines_up_to_its_newest_update(desk: Desk) -> None:
    metrics = desk.folder.metrics
    assert desk.ledger.get(WRITTEN, dict[str, Extent]) is None
    desk.one_step()
    before = metrics.stat().st_size
    written = desk.ledger.get(WRITTEN, dict[str, Extent])
    assert written is not None
    assert (written[metrics.name][0], desk.ledger.last_update()) == (before, 1)
    desk.recorder.updated(BATCH, replace(UPDATE, step=2))  # a kill loses it
    rewind_metrics(metrics, 1, written[metrics.name])
    assert metrics.stat().st_size == before


def test_a_kill_behind_an_evaluation_keeps_its_line_and_its_samples_or_neither(desk: Desk) -> None:
    desk.one_step()
    desk.recorder.held_out([SampledCompletion.of(PROMPT, (1,), "11", RIGHT)])
    desk.recorder.evaluated(Evaluation(version=1, prompts=1, right=1, undecided=0, tokens=2), step=1)
    ((updated,),) = sql(desk.folder.ledger, "SELECT count(published_version) FROM steps")  # what a kill leaves
    rewind_metrics(desk.folder.metrics, updated)
    rewind_samples(desk.folder.held_out, 1)  # its batch is on record
    assert len(read_metrics(desk.folder.metrics)[1]) == len(desk.folder.held_out.read_bytes().splitlines())


class _Told(SilentReporter):
    def __init__(self) -> None:
        self.said = list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_resumed_run_does_not_say_that_no_completion_was_ever_right(tmp_path: Path) -> None:
    reporter, earlier, wrong = _Told(), Totals(max_staleness=None), [Make.trajectory("0.17.0", right=False)]
    with run_at(tmp_path / "run") as (folder, ledger):
        ledger.put(JUDGED, Judged(wrong=8, accuracy=0.25))
        recorder = Recorder(folder, ledger, reporter, Work, 1, earlier, RunClock(earlier, time.monotonic()))
        for _ in range(64):
            recorder.judged(PROMPT, wrong)
    assert not reporter.said


def test_turns_that_no_trajectory_has_are_wasted_and_have_failed(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.work = Work(generated=9, stopped=3)
    desk.recorder.left_over(4)
    desk.one_step()  # two tokens
    found = desk.concluded()
    assert counted(found) == {"trained": 2, "failed": 7}
    assert found.tokens.wasted == 7


def test_a_run_that_dies_before_its_next_step_has_what_happened_on_record(desk: Desk) -> None:
    desk.recorder.evaluated(Evaluation(version=0, prompts=4, right=1, undecided=0, tokens=8), step=0)
    desk.ledger.flush()
    assert inspect_run(desk.folder.path).initial_accuracy == 0.25
    desk.recorder.rl_begins()
    for generated in (7, 12):
        desk.work = Work(generated=generated, recomputed=3, generated_by={"engine-0": generated})
        desk.ledger.event("a flush", "of whatever changed")
        desk.recorder.polled()
        found = inspect_run(desk.folder.path)
        assert (found.tokens.generated, found.tokens.recomputed, found.initial_accuracy) == (generated, 3, 0.25)
        desk.recorder.updated(BATCH, UPDATE)


def test_a_resumed_run_has_lost_what_is_neither_on_record_nor_goes_on() -> None:
    totals = Totals(max_staleness=1, generated=20, stopped=3, unfinished=4)
    assert carried_over(totals, kept=15).stopped == 5
    assert carried_over(totals, kept=22).stopped == 0  # a killed engine had counted too few


def test_work_that_comes_before_the_first_prompt_is_in_no_activity(desk: Desk) -> None:
    desk.recorder.spans([Span("engine-0", "generate", 0.0, 9.0)])  # the first evaluation
    desk.recorder.rl_begins()
    desk.recorder.spans([Span("engine-0", "generate", 10.0, 12.0), Span("engine-0", "map", 10.0, 11.0)])
    desk.recorder.spans([Span("engine-0", "generate", 12.0, 12.5), Span("engine-0", "load", 12.5, 12.75)])
    assert desk.recorder.totals().activities == {"engine-0": {"generate": 2.5, "load": 0.25}}
    assert desk.recorder.totals().beside == {"engine-0": {"load": 1.0}}  # the time of cores that loading takes


def test_a_step_that_a_resume_records_has_the_bound_under_which_it_was_trained(desk: Desk) -> None:
    """Its measurements raise the bound from 1 to 2, for the steps behind it."""
    buffered(desk.ledger, *BATCH.groups)
    desk.ledger.commit_batch(BATCH)
    config = RolloutConfig(batch_size=1, group_size=2, max_in_flight=3, max_staleness="auto", staleness_max=3)
    state = ControllerState(staleness=AdaptiveBound(1), starved=True)
    controller = Controller(config, PromptStream([PROMPT], seed=1), desk.ledger, seed=1, version=1, state=state)
    update = msgspec.structs.replace(UPDATE, metrics={"kl_behavior": 0.0})
    record_again(cast(Any, desk), [update], controller, desk.recorder)
    (step,), _ = read_metrics(desk.folder.metrics)
    assert (step.max_staleness, controller.max_staleness) == (1, 2)


def test_a_step_that_a_resume_records_counts_no_work_of_the_start(desk: Desk) -> None:
    buffered(desk.ledger, *BATCH.groups)
    desk.ledger.commit_batch(BATCH)
    earlier = Totals(max_staleness=1, generated=5, busy={"trainer": 2.0}, activities={"trainer": {"update": 2.0}})
    resumed = Desk(desk.folder, desk.ledger, earlier)
    resumed.work = Work(busy={"trainer": 9.0, "conductor": 9.0})  # imports, and steps that are trained again
    controller = Controller(RolloutConfig(batch_size=1, group_size=2), PromptStream([PROMPT], 1), desk.ledger, 1, 1)
    record_again(cast(Any, resumed), [UPDATE], controller, resumed.recorder)
    assert resumed.recorder.latest.busy == {"trainer": 2.0}
    resumed.recorder.rl_begins()
    totals = resumed.recorder.totals()
    assert (totals.generated, totals.activities) == (5, earlier.activities)


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
    Desk(desk.folder, desk.ledger).recorder.updated(BATCH, UPDATE)
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
    resumed.recorder.updated(BATCH, UPDATE)
    (step, _), _ = read_metrics(desk.folder.metrics)
    assert step.undecided == 6 / 8  # those that the process before has judged count too
    assert (step.undecided_reason, step.accuracy) == ("the reward raised KeyError: 'b'", 0.5)


def test_a_step_without_any_verdict_since_the_one_before_counts_nothing_twice(desk: Desk) -> None:
    judged(desk, Outcome.UNDECIDED, Outcome.UNDECIDED, reason="no number")
    desk.one_step()
    desk.recorder.updated(BATCH, UPDATE)
    steps, _ = read_metrics(desk.folder.metrics)
    assert [(step.undecided, step.undecided_reason) for step in steps] == [(1.0, "no number"), (None, "")]


def span(version: int, start: float) -> Span:
    return Span("trainer", "publish", start, start + 0.5, version)


@pytest.mark.parametrize(
    ("monotonic", "unix", "start"),
    [
        (5_100.0, 1_000_100.0, 5_100.0),  # the same machine, still running: its clock goes on
        (20.0, 1_000_100.0, 5_100.0),  # it was restarted, and began to count anew
        (66_000.0, 1_000_100.0, 5_100.0),  # another machine, which has run for longer
        (20.0, 400.0, 5_010.5),  # its Unix time is wrong: the spans go on after the newest one
    ],
)
def test_spans_of_a_run_have_one_time_axis_over_machine_restarts(monotonic: float, unix: float, start: float) -> None:
    """The first process began at 5,000 s of its clock, at 1,000,000 s of Unix time; its newest span ends at 5,010.5."""
    assert span_offset(None, 5_000.0, 1_000_000.0) == 0.0
    assert monotonic + span_offset((995_000.0, 5_010.5), monotonic, unix) == start


def test_a_resumed_recorder_goes_on_with_the_axis_of_its_spans(tmp_path: Path) -> None:
    """The clock of the first process was ten days ahead of this machine's: it has been restarted since."""
    ahead, now = 864_000.0, time.monotonic()
    with run_at(tmp_path / "run") as (folder, ledger):
        ledger.put(SPAN_AXIS, (time.time() - now - ahead, now + ahead - 1))
        desk = Desk(folder, ledger)
        desk.recorder.spans([span(3, now)])
        desk.concluded()
        (written,) = read_spans(folder.spans)
        assert written.start == pytest.approx(now + ahead, abs=60)
        axis = ledger.get(SPAN_AXIS, tuple[float, float])
        assert axis is not None
        assert axis[1] == written.end


def test_a_run_of_an_older_stretto_is_drawn_as_it_was(desk: Desk) -> None:
    desk.recorder.spans([span(1, 12.5)])
    assert read_spans(desk.folder.spans) == [span(1, 12.5)]


def test_a_step_that_a_resume_records_counts_its_batch_once(desk: Desk) -> None:
    """Seven of eight are right; the batch has the two right ones of them."""
    buffered(desk.ledger, *BATCH.groups)
    judged(desk, *[Outcome.RIGHT] * 7, Outcome.WRONG)
    desk.ledger.commit_batch(BATCH)
    resumed = Desk(desk.folder, desk.ledger)
    controller = Controller(RolloutConfig(batch_size=1, group_size=2), PromptStream([PROMPT], 1), desk.ledger, 1, 1)
    record_again(cast(Any, resumed), [UPDATE], controller, resumed.recorder)
    (step,), _ = read_metrics(desk.folder.metrics)
    assert step.accuracy == 7 / 8
