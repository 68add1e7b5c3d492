"""The ledger.

Promises: issued is the sum of all states at any moment; a final state never changes; a batch is on record, whole and in
order, when `commit_batch` returns; what a crash would need is there, until it is forgotten; another format is refused.
A kill at any moment leaves a file that keeps these promises: `tests/faults/test_files.py`. In long runs what is asked
of it again and again is found by key, and what is forgotten on the way is what is forgotten at once.
"""

import math
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Outcome, State, Verdict
from stretto.store.config import StoreConfig
from stretto.store.ledger import reading, schema
from stretto.store.ledger.ledger import Ledger, put_fact
from stretto.store.ledger.reading import read_batches, read_fact, read_unfinished
from stretto.store.ledger.rows import Balance
from stretto.store.ledger.schema import FORMAT
from tests.store.make import Make, buffered, ledger_at, sql, trained


def states(path: Path) -> dict[str, int]:
    return dict(sql(path, "SELECT state, count(*) FROM trajectories GROUP BY state"))


def test_the_story_of_a_group_of_three(path: Path, make: Make) -> None:
    ledger = Ledger(path, StoreConfig(flush_seconds=60))
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


def test_a_token_from_the_future_is_refused(path: Path, make: Make) -> None:
    with ledger_at(path, flush_seconds=0) as ledger:
        group = make.group("0.1.0", make.trajectory("0.1.0", 0, versions=(3, 9)), admitted_version=3)
        buffered(ledger, group)
        with pytest.raises(BoundViolated, match="newer than its version 7"):
            ledger.commit_batch(make.batch(8, group))
        assert ledger.balance() == Balance(buffered=1)


def test_a_final_state_never_changes(path: Path, make: Make) -> None:
    with ledger_at(path, flush_seconds=0) as ledger:
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
    with ledger_at(path, flush_seconds=0) as ledger:
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
    ledger = Ledger(path, StoreConfig(flush_seconds=60))
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


@pytest.mark.parametrize(
    ("keep", "before", "after"), [("all", 5, 5), ("trained", 4, 3), ("none", 4, 2)], ids=["all", "trained", "none"]
)
def test_payloads_are_kept_as_the_recipe_says(path: Path, make: Make, keep: str, before: int, after: int) -> None:
    with ledger_at(path, keep_payloads=keep, flush_seconds=0) as ledger:
        for step in (1, 2):
            trained(ledger, make.batch(step, make.group(f"0.{step}.0", make.trajectory(f"0.{step}.0", 0))))
        ledger.issue("0.3.0", make.prompt, 2, 0)
        ledger.settle("0.3.0/1", State.FILTERED, "too long", make.trajectory("0.3.0", 1))
        ledger.buffer(make.group("0.3.0", make.trajectory("0.3.0", 0)))
        buffered(ledger, make.group("0.4.0", make.trajectory("0.4.0", 0)))
        ledger.settle("0.4.0/0", State.EXPIRED, "too old")
        ledger.flush()
        assert sql(path, "SELECT count(*) FROM payloads") == [(before,)]
        ledger.forget(1)
        assert sql(path, "SELECT count(*) FROM payloads") == [(after,)]
        kept = sql(path, "SELECT id FROM groups WHERE prompt_token_ids IS NOT NULL ORDER BY key")
        assert kept == ([("0.2.0",), ("0.3.0",)] if keep == "none" else [(f"0.{n}.0",) for n in (1, 2, 3, 4)])


def test_batches_are_read_back_as_they_were_trained_on(path: Path, make: Make) -> None:
    batches = []
    with ledger_at(path, flush_seconds=60) as ledger:
        for step in (1, 2):
            name = f"0.{step}.0"
            answers = [make.trajectory(name, member, versions=(0, step - 1), right=bool(member)) for member in (1, 0)]
            batches.append(make.batch(step, make.group(name, *answers), oldest_trainable=step - 1))
            trained(ledger, batches[-1])
        bare = replace(make.prompt, text="", answer="")
        expected = [replace(b, groups=tuple(replace(g, prompt=bare) for g in b.groups)) for b in batches]
        assert list(read_batches(path, 0, 2)) == expected
        assert list(read_batches(path, 1, 2)) == expected[1:]
        with pytest.raises(StoreError, match=r"steps 2 to 3 are wanted, on record are \[2\]"):
            list(read_batches(path, 1, 3))
        ledger._execute("DELETE FROM payloads WHERE key = 0")
        with pytest.raises(StoreError, match=r"the tokens of group 0\.1\.0 were not kept"):
            list(read_batches(path, 0, 2))


def test_what_belongs_to_the_states_is_written_with_them(path: Path, make: Make) -> None:
    standing = [0]
    with ledger_at(path, flush_seconds=60) as ledger:
        ledger.watch("standing", lambda: standing[0])
        ledger.issue("0.1.0", make.prompt, 1, 0)
        standing[0] = 7
        ledger.flush()
        standing[0] = 8
        ledger.flush()
        assert ledger.get("standing", int) == 7, "nothing has changed since"


def test_two_changes_that_belong_together_are_never_parted(path: Path, make: Make) -> None:
    with ledger_at(path, flush_seconds=0) as ledger:
        ledger.issue("0.1.0", make.prompt, 2, 0)
        ledger.settle("0.1.0/0", State.FAILED, "lost")
        assert states(path) == {"in_flight": 2}
        ledger.issue("0.2.0", make.prompt, 1, 0)
        assert states(path) == {"failed": 1, "in_flight": 2}


def test_rows_wait_for_a_fact_that_cannot_be_written(path: Path, make: Make) -> None:
    ledger, found = Ledger(path, StoreConfig(flush_seconds=60)), [math.nan, 1.0]
    ledger.watch("share", lambda: found.pop(0))
    ledger.issue("0.1.0", make.prompt, 2, 0)
    with pytest.raises(StoreError, match="cannot be written"):
        ledger.flush()
    ledger.buffer(make.group("0.1.0", make.trajectory("0.1.0")))
    ledger.close()
    assert states(path) == {"buffered": 1, "in_flight": 1}


def test_many_payloads_do_not_wait_for_the_next_second(path: Path, make: Make) -> None:
    ledger, told = Ledger(path, StoreConfig(flush_seconds=60)), []
    for number, megabytes in enumerate((1, 32, 1)):
        name = f"0.{number}.0"
        buffered(ledger, make.group(name, replace(make.trajectory(name), text="x" * (megabytes << 20))))
        ledger.relieve()
        told.append(states(path))
    ledger.close()
    assert told == [{}, {"buffered": 2}, {"buffered": 2}]


def test_facts_are_kept_and_read_back(path: Path, make: Make) -> None:
    with ledger_at(path, flush_seconds=60) as ledger:
        ledger.put("seed", 4)
        ledger.put("seed", 5)
        assert ledger.get("seed", int) == 5
        ledger.put("update", make.update(3))
        ledger.event("engine lost", "engine-1")
    with ledger_at(path, flush_seconds=60) as ledger:
        assert ledger.get("seed", int) == 5
        assert ledger.get("update", type(make.update(3))) == make.update(3)
        assert ledger.get("nothing", int) is None
    assert sql(path, "SELECT name, detail FROM events") == [("engine lost", "engine-1")]


def test_a_reward_of_minus_nothing_is_read_as_it_was_sealed(path: Path, make: Make) -> None:
    """SQLite keeps no sign of a zero."""
    answer = make.trajectory("0.1.0")
    group = make.group("0.1.0", replace(answer, verdict=Verdict(outcome=Outcome.WRONG, reward=-0.0)))
    with ledger_at(path, flush_seconds=0) as ledger:
        buffered(ledger, group)
        ledger.flush()
        assert read_unfinished(path)[0].trajectories == group.trajectories
        ledger.commit_batch(make.batch(1, group))
    (batch,) = read_batches(path, 0, 1)
    assert batch.groups[0].trajectories == group.trajectories


@pytest.mark.parametrize("successor", [False, True])
def test_a_ledger_that_is_taken_away_ends_the_writing_and_another_one_in_its_place_is_left_alone(
    path: Path, make: Make, successor: bool
) -> None:
    ledger = Ledger(path, StoreConfig(flush_seconds=0))
    ledger.flush()
    folder = path.parent
    folder.rename(folder.with_name(f"{folder.name}-moved"))
    other = None
    if successor:
        folder.mkdir()
        other = Ledger(path, StoreConfig(flush_seconds=0))
        other.issue("0.9.0", make.prompt, 1, 0)
        other.flush()
    for attempt in (ledger.flush, lambda: ledger.issue("0.1.0", make.prompt, 1, 0), ledger.sync):
        with pytest.raises(StoreError, match=f"{path}: the ledger, or its folder, was moved or removed"):
            attempt()
    ledger.close()
    if other is not None:
        assert sql(path, "SELECT id FROM groups") == [("0.9.0",)], "its log is still there"
        other.issue("0.10.0", make.prompt, 1, 0)
        other.close()
        assert sql(path, "SELECT id FROM groups ORDER BY key") == [("0.9.0",), ("0.10.0",)]


def test_another_format_is_refused_with_both_numbers(path: Path) -> None:
    Ledger(path, StoreConfig(flush_seconds=0)).close()
    sql(path, f"PRAGMA user_version = {FORMAT + 1}")
    with pytest.raises(StoreError, match=f"format {FORMAT + 1}, this version of stretto resumes formats 3 to {FORMAT}"):
        Ledger(path, StoreConfig(flush_seconds=0))


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreError, match="cannot be opened as a ledger"):
        Ledger(path, StoreConfig(flush_seconds=0))


MOVES = st.lists(
    st.tuples(st.sampled_from(["issue", "buffer", "filter", "expire", "fail", "train"]), st.integers(0, 5)), max_size=40
)


@given(MOVES, st.integers(0, 40))
def test_whatever_happens_issued_is_the_sum_of_all_states(moves: list[tuple[str, int]], again: int) -> None:
    """A resume comes before the move `again`; once with the counts of that time, as an earlier version leaves them."""
    make, issued, steps = Make(), set[int](), 0
    ends = {"filter": State.FILTERED, "expire": State.EXPIRED, "fail": State.FAILED}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk takes milliseconds for each sync
        path = Path(folder) / "ledger.sqlite"
        ledger = Ledger(path, StoreConfig(flush_seconds=60))
        stale = sql(path, "SELECT * FROM meta WHERE name = 'counted'")
        for at, (move, number) in enumerate(moves):
            if at == again:
                ledger.close()
                stale = sql(path, "SELECT * FROM meta WHERE name = 'counted'")
                ledger = Ledger(path, StoreConfig(flush_seconds=60))
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
        balance, tokens = ledger.balance(), ledger.on_record
        ledger.close()
        assert Counter(states(path)) == Counter({state.value: getattr(balance, state.value) for state in State})
        for known in (None, [], stale):
            if known is not None:
                sql(path, "DELETE FROM meta WHERE name = 'counted'")
                for row in known:
                    sql(path, "INSERT INTO meta VALUES (?, ?, ?)", *row)
            with ledger_at(path) as resumed:
                assert (resumed.balance(), resumed.on_record) == (balance, tokens)


def test_a_resume_reads_no_trajectory_that_has_ended(path: Path, make: Make) -> None:
    with ledger_at(path) as ledger:
        for step in (1, 2):
            trained(ledger, make.batch(step, make.group(f"0.{step}.0", make.trajectory(f"0.{step}.0"))))
        buffered(ledger, make.group("0.3.0", make.trajectory("0.3.0")))
    sql(path, "UPDATE trajectories SET state = 'lost', tokens = 99 WHERE state = 'trained'")
    with ledger_at(path) as ledger:
        assert ledger.balance() == Balance(trained=2, buffered=1)
        assert ledger.on_record.trained == 4
    assert [group.id for group in read_unfinished(path)] == ["0.3.0"]


def test_a_disk_that_is_full_ends_the_run_with_the_path(path: Path, make: Make) -> None:
    ledger = Ledger(path, StoreConfig(flush_seconds=60))
    ledger._execute("PRAGMA max_page_count = 40")
    for number in range(1000):
        ledger.issue(f"0.{number}.0", make.prompt, 8, 0)
    with pytest.raises(StoreError, match=r"ledger\.sqlite: cannot be written: database or disk is full"):
        ledger.flush()
    with pytest.raises(StoreError, match="disk is full"):
        ledger.flush()
    ledger.close()
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


STATEMENTS = {
    "the trajectories of a batch": (reading._TRAJECTORIES, (0, 8)),
    "what ended untrained is forgotten": (schema.FORGET_UNTRAINED, (0,)),
    "what was trained is forgotten": (schema.FORGET_TRAINED, (0, 1)),
    "prompts are forgotten": (schema.FORGET_PROMPTS, (0, 1)),
    "what is not settled": (schema.UNSETTLED, (0, 1)),
}


@pytest.mark.parametrize(("statement", "parameters"), STATEMENTS.values(), ids=STATEMENTS)
def test_what_is_done_often_never_reads_a_whole_table(path: Path, statement: str, parameters: tuple[int, ...]) -> None:
    with ledger_at(path) as ledger:
        plan = [row[-1] for row in ledger._execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert plan
    assert not [step for step in plan if step.startswith("SCAN")]


def test_what_is_forgotten_on_the_way_is_what_is_forgotten_at_once(path: Path, make: Make, tmp_path: Path) -> None:
    """Groups of two, trained out of order, some of them filtered, one of them never ending."""

    kept = []
    for often, file in ((True, path), (False, tmp_path / "other.sqlite")):
        with ledger_at(file, keep_payloads="none", flush_seconds=0) as ledger:
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
        with ledger_at(file, keep_payloads="none") as ledger:
            ledger.forget(len(trained) - 2)
        kept.append(
            sql(file, "SELECT key FROM payloads ORDER BY key")
            + sql(file, "SELECT id FROM groups WHERE prompt_token_ids IS NOT NULL ORDER BY key")
        )
    assert kept[0] == kept[1]
    assert ("0.0.0",) not in kept[0]
    assert ("0.9.0",) in kept[0]


def test_a_fact_is_stored_without_a_look_at_the_trajectories(path: Path) -> None:
    Ledger(path, StoreConfig()).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE trajectories")
    put_fact(path, "seed", 3)
    put_fact(path, "seed", 4)
    assert read_fact(path, "seed", int) == 4
    with pytest.raises(StoreError):
        Ledger(path, StoreConfig())


def test_a_fact_for_what_is_no_ledger_is_refused(path: Path) -> None:
    path.write_text("no database at all, but a text that is long enough")
    with pytest.raises(StoreError, match="cannot be opened as a ledger"):
        put_fact(path, "seed", 3)


def test_a_fact_for_a_ledger_that_was_moved_away_leaves_its_log_where_it_is_found_again(path: Path, make: Make) -> None:
    """A reader keeps the log from being folded into the file when its writer ends."""
    ledger = Ledger(path, StoreConfig())
    ledger.issue("0.1.0", make.prompt, 2, 0)
    ledger.flush()
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM groups").fetchall()
        path.rename(away := path.with_name("away"))
        with pytest.raises(StoreError, match="was moved"):
            ledger.close()
        with pytest.raises(StoreError, match="is missing"):
            put_fact(path, "seed", 3)
    away.rename(path)
    assert states(path) == {"in_flight": 2}


def test_a_new_ledger_holds_nothing_of_the_log_of_one_that_was_deleted(path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    with closing(schema.open_for_writing(path)) as connection:
        connection.execute("INSERT INTO events VALUES (1.0, 'old', '')")
        left = log.read_bytes()
    path.unlink()
    log.write_bytes(left)
    with closing(schema.open_for_writing(path)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchall() == [(0,)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_file_with_a_header_and_no_table_becomes_a_ledger(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size > 0
    with closing(schema.open_for_writing(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchall() == [(FORMAT,)]
        assert connection.execute("SELECT count(*) FROM trajectories").fetchall() == [(0,)]


def test_a_ledger_of_large_batches_has_large_pages(path: Path, make: Make) -> None:
    with closing(Ledger(path, StoreConfig(), page=schema.page_for(1 << 22))) as ledger:
        buffered(ledger, make.group("0.1.0", make.trajectory("0.1.0")))
        ledger.commit_batch(make.batch(1, make.group("0.1.0", make.trajectory("0.1.0"))))
        assert sql(path, "PRAGMA page_size") == [(65536,)]
        schema.check_log(path)
    assert [[group.id for group in batch.groups] for batch in read_batches(path, 0, 1)] == [["0.1.0"]]


@pytest.mark.parametrize("page", [4096, schema.page_for(1 << 22)])
def test_a_ledger_with_other_pages_is_continued(path: Path, make: Make, page: int) -> None:
    with ledger_at(path, flush_seconds=0) as ledger:
        assert sql(path, "PRAGMA page_size") == [(8192,)]
        buffered(ledger, make.group("0.1.0", make.trajectory("0.1.0")))
    sql(path, f"PRAGMA journal_mode = DELETE; PRAGMA page_size = {page}; VACUUM; PRAGMA journal_mode = WAL;")
    with ledger_at(path, flush_seconds=0) as ledger:
        assert sql(path, "PRAGMA page_size") == [(page,)]
        ledger.commit_batch(make.batch(1, make.group("0.1.0", make.trajectory("0.1.0"))))
    assert [[group.id for group in batch.groups] for batch in read_batches(path, 0, 1)] == [["0.1.0"]]
