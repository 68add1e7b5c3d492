"""Promises of a run that finds its number of groups in flight itself:

- each change is on record, `check` judges each group by the number in force when it was issued, and inspect shows it;
- a resume finds the number and the window that was being measured;
- `check` names more groups in flight than the number allows, whether the run has counted them or they are there still.
"""

from pathlib import Path

import pytest

from stretto.loop.engines.in_flight import restore
from stretto.rollout.adaptive import AdaptiveInFlight, Pressure
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.store.ledger.reading import read_unfinished
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.audit.runs import RECIPE, train, trajectories
from tests.audit.test_bounds import PROMPTS
from tests.store.make import ledger_at, sql

KEYS = 'max_staleness = 8.0\nmax_in_flight = "auto"\nmax_in_flight_min = 2\nmax_in_flight_max = 6'
AUTO = RECIPE.replace("max_staleness = 1.0", KEYS)
CONFIG = RolloutConfig(
    batch_size=2, group_size=2, max_staleness=8, max_in_flight="auto", max_in_flight_min=2, max_in_flight_max=6
)
LAW = "no more are in flight than allowed"


def admitted(control: Controller) -> list[Ticket]:
    """As many as may."""
    return list(iter(control.admit, None))


def finish(control: Controller, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        control.finish(ticket, trajectories(ticket, ticket.admitted_version))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two groups at a time, then four, on an engine of which a tenth is needed; one step; then three, because all that
    ended were preempted. At the end four are in flight, that were issued before."""
    (tmp_path / "recipe.toml").write_text(AUTO)
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        control = Controller(CONFIG, PromptStream(PROMPTS, seed=1), ledger, seed=1)
        ledger.watch("standing", control.state)
        tickets = admitted(control)
        assert len(tickets) == 2
        finish(control, tickets)
        control.observe_pressure(Pressure(0.1))  # nothing waits for the number: it stays
        tickets = admitted(control)
        finish(control, tickets)
        tickets = admitted(control)
        control.observe_pressure(Pressure(0.1))
        assert control.max_in_flight == 4
        tickets += admitted(control)
        assert len(tickets) == 4
        train(control, ledger)
        finish(control, tickets)
        tickets = admitted(control)
        control.observe_pressure(Pressure(0.9))  # the window after it was doubled does not count
        train(control, ledger)
        finish(control, tickets)
        assert len(admitted(control)) == 4
        control.observe_pressure(Pressure(0.9, preempted=8))
        assert (control.max_in_flight, control.in_flight) == (3, 4)
        control.observe_pressure(Pressure(0.8))
    return tmp_path


def test_each_change_is_on_record_and_the_run_keeps_its_laws(run_dir: Path) -> None:
    assert check_run(run_dir).kept, check_run(run_dir)
    told = inspect_run(run_dir).bounds
    assert [(one.step, one.name, one.before, one.after) for one in told] == [
        (0, "max_in_flight", 2, 4),
        (2, "max_in_flight", 4, 3),
    ]
    assert told[1].reason == "0.90 of the fullest engine needed, 8 completions preempted"
    [(counted,)] = sql(run_dir / "ledger.sqlite", "SELECT value FROM meta WHERE name = 'in_flight'")
    assert counted == "[[0,2],[12,4]]"  # by the key of the first group; none was issued after the last change


def test_a_resume_finds_the_number_and_the_window_that_was_being_measured(run_dir: Path) -> None:
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        state = ledger.get("standing", ControllerState)
        assert state is not None
        assert state.in_flight == AdaptiveInFlight(
            3, probing=False, settling=True, ended=0, moments=1, needed=0.8, least=0.8
        )
        control = Controller(CONFIG, PromptStream(PROMPTS, 1, state.position), ledger, 1, version=2, state=state)
        assert control.max_in_flight == 3
        assert control.state().in_flight == state.in_flight


def test_a_number_that_grew_before_a_kill_holds_for_the_groups_that_are_issued_after_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(AUTO)
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        control = Controller(CONFIG, PromptStream(PROMPTS, seed=1), ledger, seed=1)
        ledger.watch("standing", control.state)
        finish(control, admitted(control))
        admitted(control)
        control.observe_pressure(Pressure(0.1))
        assert control.max_in_flight == 4
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        state = ledger.get("standing", ControllerState)
        assert state is not None
        control = Controller(CONFIG, PromptStream(PROMPTS, 1, state.position), ledger, 1, state=state)
        restore(control, state, read_unfinished(tmp_path / "ledger.sqlite"))
        ledger.watch("standing", control.state)
        assert (len(admitted(control)), control.in_flight) == (2, 4)
    assert check_run(tmp_path).kept, check_run(tmp_path)


@pytest.mark.parametrize("still_there", [True, False])
def test_more_groups_in_flight_than_the_number_allows_are_named(run_dir: Path, *, still_there: bool) -> None:
    """The change from two to four never was. The run has counted four; four are in flight still."""
    removed, ledger = "in_flight" if still_there else "no fact", run_dir / "ledger.sqlite"
    sql(ledger, "UPDATE meta SET value = '[]' WHERE name IN ('bounds', ?)", removed)
    if not still_there:
        sql(ledger, "UPDATE trajectories SET state = 'failed', reason = 'x' WHERE state = 'in_flight'")
    found = check_run(run_dir).breaches[LAW]
    assert [int(line.split()[0]) for line in found] == ([3, 4] if still_there else [4])
    assert found[-1].startswith("4 groups were in flight when ")
    assert found[-1].endswith("was issued; max_in_flight 2")
