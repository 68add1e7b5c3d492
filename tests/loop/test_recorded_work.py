"""What the recorder counts for the goodput budget: tokens that are lost and tokens that go on, seconds by activity; and
the bound that it notes of a step which a resume records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest

from stretto.core.events import Span
from stretto.launch.assemble.run import RunContext
from stretto.launch.assemble.run import _record_again as record_again
from stretto.loop.records.totals import Work, carried_over
from stretto.rollout.adaptive import AdaptiveBound
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.prompts import PromptStream
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import inspect_run
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import read_metrics
from stretto.store.totals import Totals
from tests.loop.test_checkpointing import PROMPT, UPDATE, Desk, batch


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with RunFolder.create(tmp_path / "run") as folder, closing(Ledger(folder.ledger, StoreConfig())) as ledger:
        yield Desk(folder, ledger)


def test_what_the_end_of_a_run_cuts_off_waits_and_what_was_aborted_before_has_failed(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.counters.work = Work(generated=6, stopped=3)  # lost with an engine
    desk.one_step()  # two tokens
    desk.recorder.gives_up()
    desk.counters.work = Work(generated=9, stopped=7)
    desk.recorder.rl_ends()
    desk.recorder.conclude()
    desk.ledger.flush()
    tokens = {name: category.tokens for name, category in inspect_run(desk.folder.path).goodput.items()}
    assert {name: count for name, count in tokens.items() if count} == {
        "trained": 2,
        "generated_and_waiting": 4,
        "failed": 3,
    }


def test_turns_that_no_trajectory_has_are_wasted_and_have_failed(desk: Desk) -> None:
    desk.recorder.rl_begins()
    desk.counters.work = Work(generated=9, stopped=3)
    desk.recorder.left_over(4)
    desk.one_step()  # two tokens
    desk.recorder.rl_ends()
    desk.recorder.conclude()
    desk.ledger.flush()
    found = inspect_run(desk.folder.path)
    tokens = {name: category.tokens for name, category in found.goodput.items() if category.tokens}
    assert tokens == {"trained": 2, "failed": 7}
    assert found.tokens.wasted == 7


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


def test_a_step_that_a_resume_records_has_the_bound_under_which_it_was_trained(desk: Desk) -> None:
    """Its measurements raise the bound from 1 to 2, for the steps behind it."""
    (group,) = batch().groups
    desk.ledger.issue(group.id, PROMPT, 1, 0)
    desk.ledger.buffer(group)
    desk.ledger.commit_batch(batch())
    config = RolloutConfig(batch_size=1, group_size=2, max_in_flight=3, max_staleness="auto", staleness_max=3)
    state = ControllerState(staleness=AdaptiveBound(1), starved=True)
    controller = Controller(config, PromptStream([PROMPT], seed=1), desk.ledger, seed=1, version=1, state=state)
    update = msgspec.structs.replace(UPDATE, metrics={"kl_behavior": 0.0})
    record_again(cast(RunContext, desk), [PROMPT], [update], controller, desk.recorder)
    (step,), _ = read_metrics(desk.folder.metrics)
    assert (step.max_staleness, controller.max_staleness) == (1, 2)
