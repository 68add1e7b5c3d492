"""What the recorder counts for the goodput budget: tokens that are lost and tokens that go on, seconds by activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.events import Span
from stretto.loop.records.recorder import EarlierTotals, Work
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import Totals, inspect_run
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.loop.test_checkpointing import Desk


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
    assert EarlierTotals.of(totals, kept=15).stopped == 5
    assert EarlierTotals.of(totals, kept=22).stopped == 0  # a killed engine had counted too few


def test_work_that_comes_before_the_first_prompt_is_in_no_activity(desk: Desk) -> None:
    desk.recorder.spans([Span("engine-0", "generate", 0.0, 9.0)])  # the first evaluation
    desk.recorder.rl_begins()
    desk.recorder.spans([Span("engine-0", "generate", 10.0, 12.0), Span("engine-0", "map", 10.0, 11.0)])
    desk.recorder.spans([Span("engine-0", "generate", 12.0, 12.5), Span("engine-0", "load", 12.5, 12.75)])
    assert desk.recorder.totals().activities == {"engine-0": {"generate": 2.5, "load": 0.25}}
