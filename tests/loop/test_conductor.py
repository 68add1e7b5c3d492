"""The conductor's loops, with the real controller, ledger, recorder and checkpointing; engines and trainer are toys.

- Every step trains a batch, publishes a version, loads it; the run ends after the last step.
- A stop ends after the step in progress, or without it when that takes too long.
- The failure of any of them ends the run with that error; a lost engine does not.
"""

import asyncio
import contextlib
import io
import math
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.core.errors import (
    DeadlineExceeded,
    EngineLost,
    NothingMoves,
    RefusedRequest,
    RoleDied,
    StoreError,
    StrettoError,
    TrainingDiverged,
)
from stretto.core.events import Span
from stretto.core.records import Batch, Completion, GenerateRequest, Update, Verdict
from stretto.loop.evaluation import BestPolicy
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.reporter import RunLog
from stretto.rollout.controller import TooManyFailures
from stretto.store.checkpoints import Checkpoints
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import read_metrics
from stretto_report.audit.alarms import AlarmWatch
from stretto_report.dashboard.terminal.progress import LineDisplay
from stretto_report.reading.inspection import inspect_run
from stretto_report.reading.series import read_spans
from tests.loop.conducting import OUTCOMES, Stage, ToyFleet, ToyTrainer
from tests.store.make import ledger_at


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with RunFolder.create(tmp_path / "run") as folder:
        with ledger_at(folder.ledger) as ledger:
            yield Stage(folder, ledger)
        found, balance = inspect_run(folder.path).trajectories, ledger.balance()
        assert (found.issued, found.trained) == (balance.issued, balance.trained)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles are asked how they are fifty times a second."""
    monkeypatch.setattr("stretto.loop.conductor._POLL_SECONDS", 0.02)


def test_a_run_whose_accuracy_no_longer_grows_ends_and_keeps_the_best_policy(stage: Stage) -> None:
    best = BestPolicy(stage.folder, stage.say, keeps=True, patience=2)
    controller = stage.play(steps=50, evaluate_every=1, best=best)
    # The first evaluation is the best; the second and third are as good, and end it a step or more later.
    assert 3 <= controller.published < 50
    assert stage.evaluations >= 3
    assert [text for text in stage.said if text.startswith("stops early: 2 evaluations in a row were not better")]
    assert (stage.folder.policies / "best").is_dir()


def test_an_evaluation_under_way_at_the_end_of_the_training_is_not_aborted(stage: Stage) -> None:
    stage.fleet.open = frozenset({"evaluation.held_out.h3", "0.7.0"})
    stage.play()
    assert stage.fleet.gave_up == {"0.7.0"}


def test_every_step_trains_a_batch_and_publishes_a_version_and_checkpoints_are_where_due(stage: Stage) -> None:
    controller = stage.play()
    assert [(batch.step, batch.version) for batch in stage.trainer.batches] == [(at + 1, at) for at in range(6)]
    assert (controller.published, controller.live, stage.fleet.version) == (6, 6, 6)
    assert stage.ledger.balance().trained == 6 * 2 * 2
    steps, _ = read_metrics(stage.folder.metrics)
    assert [step.version for step in steps] == [1, 2, 3, 4, 5, 6]
    trained = accumulate(step.trained_tokens for step in steps)
    assert all(step.generated_tokens >= tokens > 0 for step, tokens in zip(steps, trained, strict=True)), (
        "tokens that are trained were generated, although no engine has been asked yet how many it has"
    )
    assert read_spans(stage.folder.spans)[-1].role == "engine-0"
    assert Checkpoints(stage.folder.checkpoints).steps() == [3, 6]
    assert stage.trainer.saved == ["v000003", "v000006"]
    assert [path.name for path in stage.folder.policies.iterdir()] == ["v000006"]


def test_steps_go_on_while_a_version_is_written_and_engines_hear_of_it_when_it_is(stage: Stage) -> None:
    """Writing takes as long as ten steps, and one version is written after the other."""
    heard: list[tuple[int, int]] = []

    class Fleet(ToyFleet):
        def publish(self, version: int) -> None:
            heard.append((version, len(stage.trainer.batches)))
            super().publish(version)

    stage.fleet, stage.trainer = Fleet(), ToyTrainer(writing=0.02)
    controller = stage.play(max_staleness=4, steps=8)
    assert [version for version, _ in heard] == list(range(1, 9)), "one after the other, to the last"
    assert all(steps >= version for version, steps in heard)
    assert any(steps > version for version, steps in heard), "a later step was trained while it was written"
    assert (controller.published, controller.live) == (8, 8)


def test_an_evaluation_begins_when_the_version_can_be_loaded(stage: Stage) -> None:
    measured: list[int] = []

    class Measured(Stage):
        async def evaluate(self) -> Evaluation:
            measured.append(self.fleet.version)
            return await super().evaluate()

    one = Measured(stage.folder, stage.ledger, trainer=ToyTrainer(writing=0.02))
    one.play(max_staleness=4, steps=6, evaluate_every=2)
    _, evaluations = read_metrics(stage.folder.metrics)
    assert measured == [2, 4]
    assert [evaluation.step for evaluation in evaluations] == [2, 4]


def test_whoever_goes_on_asks_what_was_not_trained_and_nothing_else(stage: Stage) -> None:
    stage.play(steps=3)
    left = stage.ledger.balance()
    asked = set(stage.fleet.asked)
    stage.fleet = ToyFleet(version=3)
    stage.play(steps=8)
    assert left.buffered + left.in_flight > 0
    again = set(stage.fleet.asked) & asked
    assert len(again) * 2 == left.in_flight, "what was in flight is asked again, what was buffered is not"
    trained = [group.id for batch in stage.trainer.batches for group in batch.groups]
    assert [batch.step for batch in stage.trainer.batches] == list(range(1, 9))
    assert len(set(trained)) == len(trained) == 16
    assert stage.ledger.balance().failed == 0


def test_a_stop_ends_after_the_step_in_progress(stage: Stage) -> None:
    stage.trainer.seconds = 0.1
    stage.fleet.seconds = 0.01
    assert stage.play(stop_after=0.05, steps=1000).published == 1
    assert [batch.step for batch in stage.trainer.batches] == [1]


def test_a_stop_does_not_wait_for_a_step_for_ever(stage: Stage) -> None:
    stage.trainer.seconds = 20
    assert stage.play(stop_after=0.05, deadlines={"stop": 0.05}).published == 0
    assert stage.trainer.batches == []


def test_a_stop_cuts_off_the_answers_in_flight(stage: Stage) -> None:
    stage.fleet.seconds = 20
    stage.play(stop_after=0.05)
    assert stage.fleet.cut_off == stage.ledger.balance().in_flight / 2 == 4


@pytest.mark.parametrize(
    "ill", [RoleDied("trainer", "was killed by SIGKILL"), TrainingDiverged(3, 5)], ids=["died", "diverged"]
)
def test_what_the_trainer_fails_of_ends_the_run(stage: Stage, ill: StrettoError) -> None:
    stage.trainer.ill = ill
    with pytest.raises(type(ill)):
        stage.play()
    assert [batch.step for batch in stage.trainer.batches] == [1, 2]


def test_what_an_answer_fails_of_ends_the_run(stage: Stage) -> None:
    stage.fleet.ills = [DeadlineExceeded("the client of engine-0", "the next answer", 600)]
    with pytest.raises(DeadlineExceeded, match="the next answer"):
        stage.play()


def test_what_the_ledger_refuses_while_the_next_group_is_admitted_ends_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue, issued = stage.ledger.issue, []

    def refuses(group: str, *rest: Any, **named: Any) -> None:
        issued.append(group)
        if len(issued) > 4:  # two at the start, two when these end, and one while the trainer has the first batch
            raise StoreError("the disk is full")
        issue(group, *rest, **named)

    monkeypatch.setattr(stage.ledger, "issue", refuses)
    stage.trainer.seconds = 60
    with pytest.raises(StoreError, match="the disk is full"):
        stage.play(batch_size=1, max_in_flight=2, max_staleness=4)


LOST = EngineLost("engine-0", "broke off in the middle of a reply")


def test_a_group_whose_engine_is_lost_is_asked_again_under_its_name(stage: Stage) -> None:
    stage.fleet.ills = [LOST] * 3
    stage.play(max_attempts=1, max_failures_in_a_row=1)
    assert len(stage.trainer.batches) == 6
    assert stage.ledger.balance().failed == 0
    trained = {group.id for batch in stage.trainer.batches for group in batch.groups}
    assert set(stage.fleet.asked[:4]) <= trained


def test_a_group_that_many_engines_are_lost_with_is_asked_anew_and_is_no_failure_of_its_prompt(stage: Stage) -> None:
    stage.fleet.ills = [LOST] * 60
    stage.play(max_attempts=1, max_failures_in_a_row=5)
    assert len(stage.trainer.batches) == 6
    assert 0 < stage.ledger.balance().failed <= 60 // 4 * 2
    first = {name.rpartition(".")[0] for name in stage.fleet.asked[:4]}
    trained = {group.id.rpartition(".")[0] for batch in stage.trainer.batches for group in batch.groups}
    assert first <= trained, "a group that lost its engine is generated again before a new one"


def test_refused_requests_are_given_up_and_too_many_of_them_end_the_run(stage: Stage) -> None:
    stage.fleet.ills = [RefusedRequest("prompt_token_ids", "99", "allowed: 0 to 15")] * 60
    with pytest.raises(TooManyFailures, match="6 groups failed in a row"):
        stage.play(max_failures_in_a_row=5)


def test_a_batch_that_does_not_come_is_a_named_end(stage: Stage) -> None:
    stage.fleet.seconds = 20
    expected = r"trainer waited 0\.1 s for a batch at version 0: 4 groups in flight, 0 buffered, 0 filtered and gave up"
    with pytest.raises(DeadlineExceeded, match=expected):
        stage.play(deadlines={"batch": 0.1})


def test_a_run_in_which_nothing_moves_says_who_waits_for_what(stage: Stage, quick: None) -> None:
    stage.fleet.seconds = 20
    expected = r"nothing has moved for 0\.2 s: trainer has waited 0 s of 1800 s for a batch at version 0"
    with pytest.raises(NothingMoves, match=expected):
        stage.play(deadlines={"still": 0.2})


def test_a_run_that_hangs_says_its_alarms_by_a_clock(
    stage: Stage, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ill(AlarmWatch):
        def sentences(self) -> dict[str, str]:
            return {"ill": "alarm  ill"}

    output = io.StringIO()
    display = LineDisplay(6, Console(file=output), seconds=0.0, alarms=Ill(stage.folder.path, {}))
    monkeypatch.setattr(stage, "refresh", RunLog(stage.folder.log, display).refresh)
    stage.fleet.seconds = 20
    with pytest.raises(NothingMoves):
        stage.play(deadlines={"still": 0.2})
    assert output.getvalue() == "alarm  ill\n"


def test_an_engine_without_a_word_holds_up_nobody(stage: Stage, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.fleet.seconds = 20

    async def poll(patience: float | None) -> list[Span]:
        await asyncio.sleep(600 if patience is None else patience)
        return []

    monkeypatch.setattr(stage.fleet, "poll", poll)
    with pytest.raises(NothingMoves):
        stage.play(deadlines={"still": 0.2})
    assert len(stage.fleet.written_for) > 3, "the journal goes on"


def test_a_long_step_of_a_trainer_that_works_is_no_standstill(stage: Stage, quick: None) -> None:
    stage.trainer.seconds = 0.5
    stage.progress = time.monotonic  # a role works
    stage.play(deadlines={"still": 0.2}, steps=1)
    assert len(stage.trainer.batches) == 1


def test_a_run_in_which_every_group_is_filtered_says_so_with_the_filter_and_its_reason(stage: Stage) -> None:
    why = r"zero_variance: all rewards are [01]"
    ended = rf"\d+ groups in flight, 0 buffered, \d\d+ filtered \(most often {why}\) and gave up"
    with pytest.raises(DeadlineExceeded, match=ended):
        stage.play(group_size=1, filter="zero_variance", deadlines={"batch": 0.2})
    for groups, said in zip((8, 16), stage.said, strict=False):
        told = rf"{groups} groups were filtered since the last batch \(most often {why}\): see the filters of .*"
        assert re.fullmatch(told, said)


def test_filters_that_refuse_most_groups_are_told_again_only_when_twice_as_many_were_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = count(1)

    async def rare(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        return [OUTCOMES[min(next(groups) % 12, 1)], OUTCOMES[1]]  # one group of twelve has a right completion

    monkeypatch.setattr("tests.loop.conducting.score", rare)
    stage.play(filter="zero_variance")
    assert [text.partition(" ")[0] for text in stage.said if "were filtered" in text] == ["8", "16"]


def test_records_are_written_while_nothing_happens(stage: Stage, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.fleet.seconds = 20
    on_file: list[int] = []

    async def poll(patience: float | None) -> list[Span]:
        on_file.append(inspect_run(stage.folder.path).trajectories.in_flight)
        return []

    monkeypatch.setattr(stage.fleet, "poll", poll)
    stage.play(stop_after=0.2)
    assert on_file[-1] == 4 * 2


@pytest.mark.parametrize("ticks", range(12))
def test_an_overdue_group_that_fails_at_that_moment_ends_the_run_with_its_own_error(stage: Stage, ticks: int) -> None:
    """However many turns of the event loop lie between the update and the failure."""
    trained = asyncio.Event()

    class Straggling(ToyFleet):
        async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
            if not self.asked:
                self.asked.append(request.id)
                await trained.wait()
                for _ in range(ticks):
                    await asyncio.sleep(0)
                raise DeadlineExceeded("the client of engine-0", "the next answer", 600)
            async for completion in super().generate(request):
                yield completion

    class Trainer(ToyTrainer):
        async def train(self, batch: Batch) -> Update:
            if batch.step == 2:
                trained.set()
            return await super().train(batch)

    stage.fleet, stage.trainer = Straggling(), Trainer(seconds=0.0)
    with contextlib.suppress(DeadlineExceeded):  # where the group is stopped first, the run goes on
        stage.play(beyond_bound="expire", steps=3)


def test_overdue_answers_are_cut_off_and_asked_again(stage: Stage) -> None:
    class Straggling(ToyFleet):
        """Its first answer takes for ever."""

        async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
            self.seconds = 0.001 if self.asked else 20
            async for completion in super().generate(request):
                yield completion

    stage.fleet = Straggling()
    stage.play(beyond_bound="expire")
    assert stage.fleet.cut_off >= 1
    assert stage.ledger.balance().expired >= 2
    assert f"{stage.fleet.asked[0].rpartition('.')[0]}.1" in stage.fleet.asked


def test_a_bound_that_the_run_finds_itself_is_on_record_and_goes_on_after_a_resume(stage: Stage) -> None:
    """Without mismatch it goes from 1 to 2 after step 1, to 4 after step 4, and is held for 5 steps: across the end of
    the first run and the start of the second."""
    stage.fleet.seconds = 0.02  # the trainer waits for it
    stage.trainer.measured = {"kl_behavior": 0.001}
    assert stage.play(steps=6, max_staleness="auto", max_in_flight=2).max_staleness == 4
    stage.fleet = ToyFleet(seconds=0.02, version=6)
    assert stage.play(steps=9, max_staleness="auto", max_in_flight=2).max_staleness == 8
    told = inspect_run(stage.folder.path)
    assert [(one.step, one.before, one.after) for one in told.bounds] == [(1, 1, 2), (4, 2, 4), (9, 4, 8)]
    assert told.staleness.bound == 8  # the largest that the recipe allows
    steps, _ = read_metrics(stage.folder.metrics)
    assert [one.max_staleness for one in steps] == [1, 2, 2, 2, 4, 4, 4, 4, 4]  # when the batch was taken


def test_a_number_in_flight_that_a_run_finds_is_on_record(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of which a tenth is needed has room for twice as many groups. The run that goes on has an evaluation's
    completion in its engine: how full it is says nothing of the groups then."""
    monkeypatch.setattr("stretto.loop.conductor._POLL_SECONDS", 0.2)
    settings: dict[str, Any] = {"max_in_flight": "auto", "max_in_flight_min": 2, "max_staleness": math.inf}
    stage.fleet.seconds = 0.05  # the trainer waits for it
    assert stage.play(steps=10_000, **settings).max_in_flight == 4
    begins = stage.ledger.last_step() or 0
    stage.fleet = ToyFleet(seconds=0.05, version=begins)
    stage.fleet.open = frozenset({"evaluation.0"})
    assert stage.play(steps=10_000, **settings).max_in_flight == 4
    steps, _ = read_metrics(stage.folder.metrics)
    assert [steps[at].queues["max_in_flight"] for at in (0, begins)] == [2, 4]
    told = inspect_run(stage.folder.path)
    assert [(one.name, one.before, one.after) for one in told.bounds] == [("max_in_flight", 2, 4)]
    assert told.bounds[0].reason == "0.10 of the fullest engine needed"
