"""Promises of a run that changes its bounds itself:

- each change is on record with the groups that were admitted under it, and `check` judges each group by its own bound;
- a resume finds the bounds of the groups that it goes on with, and the state from which the next one follows;
- the bound of a group is looked up, however often the bound has changed;
- a bound that nobody set, one outside of the recipe's limits, and a token beyond the bound of its group are named.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stretto.core.admission import BoundChange
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.prompts import PromptStream
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto_report.audit.bounds import RecordedChange
from stretto_report.audit.check import check_run
from stretto_report.audit.history import in_force
from stretto_report.reading.inspection import inspect_run
from tests.audit.runs import RECIPE, steps, train, trajectories
from tests.store.make import ledger_at, prompts, sql

AUTO = RECIPE.replace("max_staleness = 1.0", 'max_staleness = "auto"\nstaleness_min = 1\nstaleness_max = 3')
CONFIG = RolloutConfig(batch_size=2, group_size=2, max_in_flight=3, max_staleness="auto", staleness_max=3)
PROMPTS = prompts(40)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Four steps of two groups; after the third the bound goes from 1 to 2. The group that waits then was admitted
    under 1; two are in flight, one of each bound."""
    (tmp_path / "recipe.toml").write_text(AUTO)
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        control = Controller(CONFIG, PromptStream(PROMPTS, seed=1), ledger, seed=1)
        ledger.watch("standing", control.state)
        steps(control, ledger, 3)
        slow, waits = control.admit(), control.admit()
        assert slow is not None
        assert waits is not None
        control.finish(waits, trajectories(waits, 3))
        control.observe(3, {"kl_behavior": 0.0})
        ticket = control.admit()
        assert ticket is not None
        control.finish(ticket, trajectories(ticket, 3))
        train(control, ledger)
        assert control.admit() is not None
    return tmp_path


def test_each_group_is_judged_by_the_bound_of_its_admission(run_dir: Path) -> None:
    assert check_run(run_dir).kept, check_run(run_dir)
    told = inspect_run(run_dir).bounds
    assert [(one.step, one.name, one.before, one.after) for one in told] == [(3, "max_staleness", 1, 2)]
    assert told[0].reason == "mismatch 0.00 of its limit (kl_behavior 0)"
    [(detail,)] = sql(run_dir / "ledger.sqlite", "SELECT detail FROM events WHERE name = 'bound'")
    assert detail.startswith("max_staleness 1 -> 2 after step 3: mismatch")


def test_a_resume_finds_the_bounds_of_its_groups_and_the_state_of_the_controller(run_dir: Path) -> None:
    unfinished = read_unfinished(run_dir / "ledger.sqlite")
    assert [group.max_staleness for group in unfinished] == [None, 2]
    with ledger_at(run_dir / "ledger.sqlite") as ledger:
        state = ledger.get("standing", ControllerState)
        assert state is not None
        control = Controller(CONFIG, PromptStream(PROMPTS, 1, state.position), ledger, 1, version=4, state=state)
        for group in unfinished:
            control.restore(group.id, group.admitted_version, group.trajectories, 0, group.max_staleness)
        assert control.max_staleness == 2
        assert [ticket.due for ticket in control.tickets] == [4, 6]
        control.observe(3, {"kl_behavior": 9.0})  # seen before the run ended
        assert control.state() == state


class Counted(int):
    """A key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)


def test_the_bound_of_a_group_is_looked_up_among_many_changes() -> None:
    """Change i of 1,024 holds from key 2 i on."""
    changes = [RecordedChange(i, "max_staleness", i - 1, i, "", 2 * i) for i in range(1, 1025)]
    found = [in_force(changes, key, 0.5) for key in (0, 1, 2, 3, 4, 2047, 2048, 9999)]
    assert found == [0.5, 0.5, 1, 1, 2, 1023, 1024, 1024]
    Counted.compared = 0
    assert in_force(changes, Counted(700), 0.5) == 350
    assert 0 < Counted.compared <= 11


PLANTED: dict[str, Callable[[list[BoundChange]], object]] = {
    "a bound above the recipe's": lambda changes: changes.append(BoundChange(4, "max_staleness", 2, 9, "", 99)),
    "one that was another before": lambda changes: changes.append(BoundChange(4, "max_staleness", 3, 1, "", 99)),
    "two changes after one step": lambda changes: changes.append(BoundChange(3, "max_staleness", 2, 3, "", 99)),
    "a key that the recipe fixes": lambda changes: changes.append(BoundChange(4, "batch_size", 2, 3, "", 99)),
}


@pytest.mark.parametrize("change", PLANTED.values(), ids=PLANTED)
def test_a_planted_change_is_named(run_dir: Path, change: Callable[[list[BoundChange]], object]) -> None:
    [(text,)] = sql(run_dir / "ledger.sqlite", "SELECT value FROM meta WHERE name = 'bounds'")
    change(changes := msgspec.json.decode(text, type=list[BoundChange]))
    written = msgspec.json.encode(changes).decode()
    sql(run_dir / "ledger.sqlite", "UPDATE meta SET value = ? WHERE name = 'bounds'", written)
    assert check_run(run_dir).breaches["bounds change as recorded"]


def test_a_group_that_starts_under_a_bound_that_never_was_is_named(run_dir: Path) -> None:
    """Under the bound of 1 the last group could not have started."""
    ledger, law = run_dir / "ledger.sqlite", "no group starts before its turn"
    sql(ledger, "UPDATE groups SET admitted_version = 2 WHERE key = (SELECT max(key) FROM groups)")
    assert "behind" not in str(check_run(run_dir).breaches[law])
    sql(ledger, "UPDATE meta SET value = '[]' WHERE name = 'bounds'")
    assert check_run(run_dir).breaches[law]


def test_a_token_beyond_the_bound_of_its_group_is_named(run_dir: Path) -> None:
    """The groups of step 4 are taken for ones that were admitted, and sampled, two versions before."""
    ledger = run_dir / "ledger.sqlite"
    sql(ledger, "UPDATE trajectories SET oldest_version = 1 WHERE trained_step = 4; DELETE FROM payloads;")
    sql(ledger, "UPDATE steps SET oldest_trainable = 0")
    [(text,)] = sql(ledger, "SELECT batch FROM steps WHERE step = 4")
    batch = [(name, members) for name, members, *_ in json.loads(text)]
    sql(ledger, "UPDATE steps SET batch = ? WHERE step = 4", json.dumps(batch))
    (younger, _), (older, _) = batch
    found = check_run(run_dir).breaches["no bound is broken"]
    assert [line.split("/")[0] for line in found] == [younger, younger]
    assert found[0].endswith("was trained at 3 with a token of 1; max_staleness 1")
    assert older not in " ".join(found)  # its bound was 2


def test_a_batch_of_several_bounds_is_read_back_as_it_was_trained(run_dir: Path) -> None:
    [batch] = read_batches(run_dir / "ledger.sqlite", 3, 4)
    assert [batch.oldest_of(group.id) for group in batch.groups] == [2, 1]
    assert (batch.oldest_trainable, list(batch.oldest_by_group.values())) == (1, [2])
