"""Every change of the controller is one transaction of the ledger, whatever is said meanwhile.

An alarm of the selection bias is an event, in the midst of a change. Wherever the ledger is flushed, a kill leaves a
file with which the run goes on: no group of it is in flight in part, and the controller can end each of them.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stretto.core.records import Group, State, Trajectory
from stretto.loop.engines.in_flight import restore
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import CONTROLLER, Controller, ControllerState, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_unfinished
from tests.store.make import judged, prompts

CONFIG = RolloutConfig(
    batch_size=1, group_size=4, min_group_size=2, max_in_flight=3, max_staleness=1, beyond_bound="expire"
)


class Alarmed(Ledger):
    """Something is said after every single change. `copies`: the file as a kill after each flush would leave it."""

    copies: list[Path]

    def buffer(self, group: Group) -> None:
        super().buffer(group)
        self._say()

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        super().settle(id, state, reason, trajectory)
        self._say()

    def _say(self) -> None:
        self.event("role", "selection bias")
        self.put("said", 1)

    def flush(self) -> None:
        super().flush()
        self.copies.append(self._path.with_name(f"{len(self.copies)}.sqlite"))
        with closing(sqlite3.connect(self._path)) as now, closing(sqlite3.connect(self.copies[-1])) as copy:
            now.backup(copy)


def answers(ticket: Ticket, *rewards: float | None) -> list[Trajectory]:
    return [judged(f"{ticket.group_id}/{member}", reward) for member, reward in enumerate(rewards)]


CHANGES: dict[str, Callable[[Controller, Ticket], Any]] = {
    "expire": lambda control, ticket: control.expire(ticket),
    "lose": lambda control, ticket: control.lose(ticket, "lost"),
    "fail": lambda control, ticket: control.fail(ticket, "refused"),
    "finish": lambda control, ticket: control.finish(ticket, answers(ticket, 1.0, None, 0.0, 1.0)),
    "undecided": lambda control, ticket: control.finish(ticket, answers(ticket, 1.0, None, None, None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_after_any_flush_leaves_groups_with_which_the_run_goes_on(tmp_path: Path, change: str) -> None:
    now = [0.0]
    Alarmed.copies = []
    ledger = Alarmed(tmp_path / "ledger.sqlite", StoreConfig(flush_seconds=0), clock=lambda: now[0])
    control = Controller(CONFIG, PromptStream(prompts(8), 1), ledger, 1)
    ledger.watch(CONTROLLER, control.state)
    first, second = control.admit(), control.admit()
    assert first is not None
    assert second is not None
    now[0] += 1.0
    CHANGES[change](control, first)
    control.admit()
    control.publish(1)
    control.finish(second, answers(second, 1.0, 0.0, 1.0, 0.0))
    control.take()
    ledger.close()
    assert len(ledger.copies) > 3
    for path in ledger.copies:
        resumed(path)


def resumed(path: Path) -> None:
    with closing(Ledger(path, StoreConfig())) as ledger:
        state = ledger.get(CONTROLLER, ControllerState) or ControllerState()
        again = Controller(CONFIG, PromptStream(prompts(8), 1, state.position), ledger, 1, version=1, state=state)
        restore(again, state, read_unfinished(path))
        for ticket in again.tickets:
            again.expire(ticket)
        ledger.flush()
