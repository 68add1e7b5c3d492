"""Runs of the real controller and ledger, without engines and without a trainer."""

import sqlite3
from contextlib import closing
from pathlib import Path

from stretto.core.records import Batch, Trajectory, trajectory_id
from stretto.rollout.controller import Controller, Ticket
from stretto.store.ledger.ledger import Ledger
from tests.store.make import Make, judged

RECIPE = """
[rollout]
batch_size = 2
group_size = 2
min_group_size = 1
max_staleness = 1.0
beyond_bound = "mask"
max_attempts = 3
"""
RECIPE_OF_ONE = RECIPE.replace("batch_size = 2", "batch_size = 1")


def trajectories(ticket: Ticket, version: int, engine: str = "") -> list[Trajectory]:
    """Those of a ticket, sampled by an engine, or by one that is not on record."""
    engines = ((engine, 2),) if engine else ()
    ids = [trajectory_id(ticket.group_id, member) for member in ticket.members]
    return [judged(id, versions=(version, version), engines=engines) for id in ids]


def train(control: Controller, ledger: Ledger) -> Batch:
    batch = control.take()
    assert batch is not None
    ledger.record_update(Make.update(batch.step, 8))
    control.publish(batch.step)
    control.load(batch.step)
    return batch


def steps(control: Controller, ledger: Ledger, count: int, engine: str = "") -> None:
    """The first `count` steps of a run, of two groups each, in the order of their admission."""
    for version in range(count):
        for _ in range(2):
            ticket = control.admit()
            assert ticket is not None
            control.finish(ticket, trajectories(ticket, version, engine))
        train(control, ledger)


def flip_a_bit(ledger: Path, state: str) -> str:
    """In the middle of the payload of the first trajectory in a state; its name."""
    with closing(sqlite3.connect(ledger)) as connection:
        name, key, payload = connection.execute(
            "SELECT id || '/' || member, payloads.key, payload FROM payloads"
            " JOIN trajectories ON trajectories.key = payloads.key JOIN groups ON groups.key = group_key"
            " WHERE state = ? ORDER BY payloads.key LIMIT 1",
            (state,),
        ).fetchone()
        place = len(payload) // 2
        bent = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
        connection.execute("UPDATE payloads SET payload = ? WHERE key = ?", (bent, key))
        connection.commit()
    return str(name)
