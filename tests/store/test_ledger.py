"""The ledger.

Promises: issued is the sum of all states at any moment; a final state never changes; a batch is on record, whole and in
order, when `commit_batch` returns; a kill at any moment leaves a file that keeps these promises; after a rewind each
trajectory is trained once at most; another format is refused.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import State
from stretto.store.config import StoreConfig
from stretto.store.ledger import Balance, Ledger
from stretto.store.schema import FORMAT
from tests.store.conftest import Make

KEEP_ALL = StoreConfig(flush_seconds=0)
HOLD_BACK = StoreConfig(flush_seconds=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def states(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())


def rows(path: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


def test_the_story_of_a_group_of_three(path: Path, make: Make) -> None:
    ledger = Ledger(path, HOLD_BACK)
    first, second, third = (make.trajectory("0.17.0", member) for member in range(3))
    ledger.issue("0.17.0", make.prompt, 3, admitted_version=0)
    assert ledger.balance() == Balance(in_flight=3)
    ledger.settle(third.id, State.FAILED, "timeout after 1 s", third)
    group = make.group("0.17.0", first, second)
    ledger.buffer(group)
    assert ledger.balance() == Balance(buffered=2, failed=1)
    assert states(path) == {}, "held back until the batch is committed"
    ledger.commit_batch(make.batch(1, group))
    assert states(path) == {"trained": 2, "failed": 1}
    assert ledger.balance() == Balance(trained=2, failed=1)
    assert ledger.balance().issued == 3
    ledger.close()


def test_membership_and_order_of_a_batch_are_on_record(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        groups = [make.group(name, make.trajectory(name, 1), make.trajectory(name, 0)) for name in ("0.9.0", "0.2.0")]
        for group in groups:
            ledger.issue(group.id, make.prompt, 2, 0)
            ledger.buffer(group)
        ledger.commit_batch(make.batch(1, *groups))
        [(batch,)] = rows(path, "SELECT batch FROM steps")
    assert json.loads(str(batch)) == [["0.9.0", [1, 0]], ["0.2.0", [1, 0]]]


def test_a_batch_counts_staleness_over_the_tokens_that_are_trained(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        group = make.group("0.1.0", make.trajectory("0.1.0", 0, versions=(3, 3, 5, 6)))
        ledger.issue(group.id, make.prompt, 1, 3)
        ledger.buffer(group)
        ledger.commit_batch(make.batch(8, group, version=7, oldest_trainable=5))
        [(staleness, trained, masked)] = rows(path, "SELECT staleness, trained_tokens, masked_tokens FROM steps")
    assert json.loads(str(staleness)) == {"1": 1, "2": 1}
    assert (trained, masked) == (2, 2)


def test_a_token_from_the_future_is_refused(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        group = make.group("0.1.0", make.trajectory("0.1.0", 0, versions=(3, 9)))
        ledger.issue(group.id, make.prompt, 1, 3)
        ledger.buffer(group)
        with pytest.raises(BoundViolated, match="newer than its version 7"):
            ledger.commit_batch(make.batch(8, group))
        assert ledger.balance() == Balance(buffered=1)


def test_a_final_state_never_changes(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        ledger.issue("0.1.0", make.prompt, 1, 0)
        group = make.group("0.1.0", make.trajectory("0.1.0"))
        ledger.settle("0.1.0/0", State.FILTERED, "all right")
        with pytest.raises(StoreError, match="never issued, or its state is final"):
            ledger.buffer(group)
        with pytest.raises(StoreError, match="never issued, or its state is final"):
            ledger.commit_batch(make.batch(1, group))
        with pytest.raises(StoreError, match="only commit_batch trains"):
            ledger.settle("0.1.0/0", State.TRAINED, "")
        assert ledger.balance() == Balance(filtered=1)


def test_only_what_is_buffered_can_be_trained_and_only_once(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        group = make.group("0.1.0", make.trajectory("0.1.0"))
        ledger.issue("0.1.0", make.prompt, 1, 0)
        with pytest.raises(StoreError, match="is in_flight and cannot be trained"):
            ledger.commit_batch(make.batch(1, group))
        ledger.buffer(group)
        with pytest.raises(StoreError, match="is buffered and cannot become buffered"):
            ledger.buffer(group)
        ledger.commit_batch(make.batch(1, group))
        with pytest.raises(StoreError, match="its state is final"):
            ledger.commit_batch(make.batch(2, group))


def test_a_group_is_issued_once(path: Path, make: Make) -> None:
    ledger = Ledger(path, HOLD_BACK)
    ledger.issue("0.1.0", make.prompt, 1, 0)
    with pytest.raises(StoreError, match="was issued before"):
        ledger.issue("0.1.0", make.prompt, 1, 0)
    ledger.settle("0.1.0/0", State.FAILED, "lost")
    ledger.flush()
    ledger.issue("0.1.0", make.prompt, 1, 0)
    with pytest.raises(StoreError, match="UNIQUE"):
        ledger.flush()
    with pytest.raises(StoreError, match="UNIQUE"):
        ledger.flush()
    ledger.close()
    assert states(path) == {"failed": 1}


@pytest.mark.parametrize(("keep", "kept"), [("all", 2), ("trained", 1), ("none", 0)])
def test_payloads_are_kept_as_the_recipe_says(path: Path, make: Make, keep: str, kept: int) -> None:
    config = StoreConfig.model_validate({"keep_payloads": keep, "flush_seconds": 0})
    with closing(Ledger(path, config)) as ledger:
        ledger.issue("0.1.0", make.prompt, 2, 0)
        group = make.group("0.1.0", make.trajectory("0.1.0", 0))
        ledger.settle("0.1.0/1", State.FILTERED, "too long", make.trajectory("0.1.0", 1))
        ledger.buffer(group)
        ledger.commit_batch(make.batch(1, group))
    assert rows(path, "SELECT count(*) FROM payloads") == [(kept,)]


def test_what_a_dead_run_left_is_failed_and_can_be_asked_again(path: Path, make: Make) -> None:
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        for name in ("0.1.0", "0.2.0", "0.3.0"):
            ledger.issue(name, make.prompt, 2, 0)
        ledger.buffer(make.group("0.2.0", make.trajectory("0.2.0", 0), make.trajectory("0.2.0", 1)))
        ledger.settle("0.3.0/0", State.FAILED, "lost")
        ledger.settle("0.3.0/1", State.FAILED, "lost")
    with closing(Ledger(path, KEEP_ALL)) as ledger:
        assert ledger.balance() == Balance(in_flight=2, buffered=2, failed=2)
        assert ledger.abandon() == ["0.1.0", "0.2.0"]
        assert ledger.balance() == Balance(failed=6)
    assert set(rows(path, "SELECT DISTINCT reason FROM trajectories")) == {("run ended",), ("lost",)}
    assert rows(path, "SELECT count(*) FROM payloads") == [(2,)]


def test_after_a_rewind_the_surviving_lineage_holds_each_id_once(path: Path, make: Make) -> None:
    def train(ledger: Ledger, step: int, name: str) -> None:
        group = make.group(name, make.trajectory(name, 0))
        ledger.issue(name, make.prompt, 1, 0)
        ledger.buffer(group)
        ledger.commit_batch(make.batch(step, group))
        ledger.record_update(make.update(step))

    with closing(Ledger(path, HOLD_BACK)) as ledger:
        for step in (1, 2, 3):
            train(ledger, step, f"0.{step}.0")
    with closing(Ledger(path, HOLD_BACK)) as ledger:
        assert ledger.rewind(1) == ["0.2.0", "0.3.0"]
        assert ledger.balance() == Balance(trained=1, failed=2)
        assert ledger.last_step() == 1
        train(ledger, 2, "0.3.0")  # asked again under its old name: what was left behind gives the name up
        assert ledger.balance() == Balance(trained=2, failed=2)
    found = rows(
        path, "SELECT groups.id, state, trained_step, reason FROM groups JOIN trajectories USING (key) ORDER BY key"
    )
    assert found == [
        ("0.1.0", "trained", 1, ""),
        ("0.2.0", "failed", None, "rewound to step 1"),
        ("0.3.0~2", "failed", None, "rewound to step 1"),
        ("0.3.0", "trained", 2, ""),
    ]


def test_an_id_that_was_trained_on_is_never_given_up(path: Path, make: Make) -> None:
    with closing(Ledger(path, HOLD_BACK)) as ledger:
        group = make.group("0.1.0", make.trajectory("0.1.0", 0))
        ledger.issue("0.1.0", make.prompt, 1, 0)
        ledger.buffer(group)
        ledger.commit_batch(make.batch(1, group))
    ledger = Ledger(path, HOLD_BACK)
    ledger.issue("0.1.0", make.prompt, 1, 0)
    with pytest.raises(StoreError, match="UNIQUE"):
        ledger.flush()
    ledger.close()


def test_facts_are_kept_and_read_back(path: Path, make: Make) -> None:
    with closing(Ledger(path, HOLD_BACK)) as ledger:
        ledger.put("seed", 4)
        ledger.put("seed", 5)
        ledger.put("update", make.update(3))
        ledger.event("engine lost", "engine-1")
    with closing(Ledger(path, HOLD_BACK)) as ledger:
        assert ledger.get("seed", int) == 5
        assert ledger.get("update", type(make.update(3))) == make.update(3)
        assert ledger.get("nothing", int) is None
    assert rows(path, "SELECT name, detail FROM events") == [("engine lost", "engine-1")]


def test_another_format_is_refused_with_both_numbers(path: Path) -> None:
    Ledger(path, KEEP_ALL).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    with pytest.raises(StoreError, match=f"format {FORMAT + 1}, this version of stretto reads format {FORMAT}"):
        Ledger(path, KEEP_ALL)


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreError, match="cannot be opened as a ledger"):
        Ledger(path, KEEP_ALL)


MOVES = st.lists(
    st.tuples(st.sampled_from(["issue", "buffer", "filter", "expire", "fail", "train"]), st.integers(0, 5)),
    max_size=40,
)


@given(MOVES)
def test_whatever_happens_issued_is_the_sum_of_all_states(moves: list[tuple[str, int]]) -> None:
    make, issued, steps = Make(), set[int](), 0
    ends = {"filter": State.FILTERED, "expire": State.EXPIRED, "fail": State.FAILED}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = Ledger(path, HOLD_BACK)
        for move, number in moves:
            name = f"0.{number}.0"
            group = make.group(name, make.trajectory(name, 0), make.trajectory(name, 1))
            try:
                if move == "issue" and number not in issued:
                    ledger.issue(name, make.prompt, 2, 0)
                    issued.add(number)
                elif move == "buffer":
                    ledger.buffer(group)
                elif move in ends:
                    for trajectory in group.trajectories:
                        ledger.settle(trajectory.id, ends[move], move, trajectory)
                elif move == "train":
                    ledger.commit_batch(make.batch(steps + 1, group))
                    steps += 1
            except StoreError:
                pass
            assert ledger.balance().issued == 2 * len(issued)
        balance = ledger.balance()
        ledger.close()
        assert Counter(states(path)) == Counter({state.value: getattr(balance, state.value) for state in State})


_WRITER = """
import itertools, sys
from pathlib import Path
from stretto.core.records import State
from stretto.store.config import StoreConfig
from stretto.store.ledger import Ledger
from tests.store.conftest import Make
make, ledger = Make(), Ledger(Path(sys.argv[1]), StoreConfig(flush_seconds=0.001))
for step in itertools.count(1):
    for n in range(4):
        name = f"0.{4 * step + n}.0"
        ledger.issue(name, make.prompt, 4, 0)
        groups = make.group(name, *[make.trajectory(name, m) for m in range(3)])
        ledger.settle(f"{name}/3", State.FAILED, "lost")
        ledger.buffer(groups)
    ledger.commit_batch(make.batch(step, groups))
    print(step, flush=True)
"""


@pytest.mark.parametrize("moment", [0.02, 0.11, 0.23])
def test_a_kill_at_any_moment_leaves_a_ledger_that_balances(path: Path, moment: float) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(moment)
        writer.kill()
        told = [int(line) for line in writer.stdout.read().split()]
    ledger = Ledger(path, KEEP_ALL)
    balance, last = ledger.balance(), ledger.last_step()
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows(path, "SELECT sum(members) FROM groups") == [(balance.issued,)]
    assert last is not None
    assert last >= max(told, default=1), "what commit_batch returned for is in the file"
    assert balance.trained == 3 * last == rows(path, "SELECT sum(trajectories) FROM steps")[0][0]
    ledger.abandon()
    assert ledger.balance().in_flight == ledger.balance().buffered == 0
    assert ledger.balance().issued == balance.issued
    ledger.close()


def test_a_disk_that_is_full_ends_the_run_with_the_path(path: Path, make: Make) -> None:
    ledger = Ledger(path, HOLD_BACK)
    ledger._execute("PRAGMA max_page_count = 40")
    for number in range(1000):
        ledger.issue(f"0.{number}.0", make.prompt, 8, 0)
    with pytest.raises(StoreError, match=r"ledger\.sqlite: cannot be written: database or disk is full"):
        ledger.flush()
    with pytest.raises(StoreError, match="disk is full"):
        ledger.flush()
    ledger.close()
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
