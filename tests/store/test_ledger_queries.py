"""Long runs: what is asked of the ledger again and again is found by key, and what is forgotten on the way is what is
forgotten at once.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.records import State
from stretto.store.ledger import forgetting, reading
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.store.make import Make

HOLD_BACK = StoreConfig(flush_seconds=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def rows(path: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


STATEMENTS = {
    "the trajectories of a batch": (reading._TRAJECTORIES, (0, 8)),
    "what ended untrained is forgotten": (forgetting.FORGET_UNTRAINED, (0,)),
    "what was trained is forgotten": (forgetting.FORGET_TRAINED, (0, 1)),
    "prompts are forgotten": (forgetting.FORGET_PROMPTS, (0, 1)),
    "what is not settled": (forgetting.UNSETTLED, (0, 1)),
}


@pytest.mark.parametrize(("statement", "parameters"), STATEMENTS.values(), ids=STATEMENTS)
def test_what_is_done_again_and_again_never_reads_a_whole_table(
    path: Path, statement: str, parameters: tuple[int, ...]
) -> None:
    with closing(Ledger(path, HOLD_BACK)) as ledger:
        plan = [row[-1] for row in ledger._execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert plan
    assert not [step for step in plan if step.startswith("SCAN")]


def test_what_is_forgotten_on_the_way_is_what_is_forgotten_at_once(path: Path, make: Make, tmp_path: Path) -> None:
    """Groups of two, trained out of order, some of them filtered, one of them never ending."""
    config = StoreConfig.model_validate({"keep_payloads": "none", "flush_seconds": 0})
    kept = []
    for often, file in ((True, path), (False, tmp_path / "other.sqlite")):
        with closing(Ledger(file, config)) as ledger:
            for number in range(12):
                name = f"0.{number}.0"
                ledger.issue(name, make.prompt, 2, 0)
                if number % 5 == 3:
                    ledger.settle(f"{name}/0", State.FILTERED, "too long", make.trajectory(name, 0))
                    ledger.settle(f"{name}/1", State.EXPIRED, "too old", make.trajectory(name, 1))
                elif number != 4:
                    ledger.buffer(make.group(name, *(make.trajectory(name, member) for member in range(2))))
            trained = [1, 0, 2, 7, 6, 5, 9, 11]
            for step, number in enumerate(trained, start=1):
                name = f"0.{number}.0"
                ledger.commit_batch(make.batch(step, make.group(name, *(make.trajectory(name, m) for m in range(2)))))
                if often and step > 2:
                    ledger.forget(step - 2)
            ledger.forget(len(trained) - 2)
        kept.append(
            rows(file, "SELECT key FROM payloads ORDER BY key")
            + rows(file, "SELECT id FROM groups WHERE prompt_token_ids IS NOT NULL ORDER BY key")
        )
    assert kept[0] == kept[1]
    assert ("0.0.0",) not in kept[0]
    assert ("0.9.0",) in kept[0]
