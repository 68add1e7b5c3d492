"""What a ledger of each format says of a run: formats 2 to 5 are read and checked, 3 to 5 resumed, others refused."""

import shutil
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Group, Prompt, Segment, StopReason
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto.store.totals import Membership
from stretto_report.audit.check import check_run
from stretto_report.reading.export import export_run, read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.audit.runs import RECIPE_OF_ONE, flip_a_bit
from tests.audit.test_check import written
from tests.store.conftest import as_format_2, as_format_3
from tests.store.make import Make, judged, ledger_at, prompts, sql, trained

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Without the engines, which segments had not before format 4."""
    return written(tmp_path, "")


def test_another_format_is_refused_with_both_numbers(run_dir: Path) -> None:
    sql(run_dir / "ledger.sqlite", "PRAGMA user_version = 1")
    with pytest.raises(StoreError, match="has format 1, this version of stretto checks formats 2 to 6"):
        check_run(run_dir)


def test_a_run_of_the_format_before_is_checked_and_read_and_not_gone_on_with(run_dir: Path, tmp_path: Path) -> None:
    before, shown = export_run(run_dir, tmp_path / "before.jsonl"), inspect_run(run_dir)
    as_format_2(run_dir / "ledger.sqlite")
    findings = check_run(run_dir)
    assert findings.kept, findings
    assert findings.notes[0] == "the ledger has format 2: it has no seals of its recipe and of its first policy"
    assert export_run(run_dir, tmp_path / "after.jsonl") == before
    assert (tmp_path / "after.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()
    assert inspect_run(run_dir) == shown
    with pytest.raises(StoreError, match="has format 2, this version of stretto resumes formats 3 to 6"):
        Ledger(run_dir / "ledger.sqlite", StoreConfig())
    sql(run_dir / "ledger.sqlite", "UPDATE groups SET admitted_version = 1 WHERE key = 18")
    assert check_run(run_dir).breaches["every checksum fits"]


def test_a_run_of_the_format_without_engines_is_read_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    (tmp_path / "recipe.toml").write_text(RECIPE_OF_ONE)
    for step, prompt in enumerate(prompts(2), 1):
        id, version = f"0.{prompt.id}.0", step - 1
        one = judged(f"{id}/0", versions=(version, version), engines=(("engine-0", 2),))
        with ledger_at(path) as ledger:
            trained(ledger, Batch(step, version, (Group(id, prompt, version, (one,)),)), tokens=2)
        if step == 1:
            as_format_3(path)
            assert [line.engines for line in read_trajectories(tmp_path)] == [()]
            assert check_run(tmp_path).kept
    assert [line.engines for line in read_trajectories(tmp_path)] == [(), ("engine-0",)]
    assert [len(batch.groups) for batch in read_batches(path, 0, 2)] == [1, 1]
    assert check_run(tmp_path).breaches["every token has its engine"] == (
        "0.1.0/0 has tokens of engine-0, which is not on the roster",
    )
    with ledger_at(path) as ledger:
        ledger.put("engines", [Membership("engine-0", "native", "here", version=1, joined_step=1)])
    assert check_run(tmp_path).kept


def test_a_ledger_that_format_4_wrote_is_checked_and_gone_on_with(tmp_path: Path) -> None:
    """`tests/data/format_4`: one group was trained, one waits, one is in flight, of which one completion has ended and
    two have not; of each group one trajectory has a tool's output between two turns."""
    path = tmp_path / "ledger.sqlite"
    shutil.copy(DATA / "format_4" / "ledger.sqlite", path)
    (tmp_path / "recipe.toml").write_text(RECIPE_OF_ONE)
    before = read_unfinished(path)
    assert [sorted(group.members) for group in before] == [[], [0, 1, 2]]
    assert before[1].members[1].segments[0].engines == (("engine-0", 2), ("engine-1", 1))
    assert before[1].members[2].segments[0].stop_reason is StopReason.STOP
    whole, turns = before[0].trajectories
    assert (whole.token_ids, [len(one.token_ids) for one in turns.segments]) == ((4, 5), [2, 2, 2])
    shown = list(read_trajectories(tmp_path))
    with ledger_at(path) as ledger:
        ledger.journal("0.3.0/1", Segment.of((2,), (-1.0,), (1,), stop_reason=StopReason.STOP))
        ledger.journal("0.3.0/1", Segment.of((9,), parent=0), node=1)
        ledger.begin_call("0.3.0/1", 0, b"2 + 2", durable=True)
    goes_on = read_unfinished(path)
    assert goes_on[0] == before[0]
    assert [one.token_ids for one in goes_on[1].members[1].segments] == [(4, 5, 6, 2), (9,)]
    assert [call.asked for call in goes_on[1].members[1].calls] == [b"2 + 2"]
    assert list(read_trajectories(tmp_path)) == shown
    assert [len(batch.groups) for batch in read_batches(path, 0, 1)] == [1]
    assert check_run(tmp_path).kept


def test_a_ledger_that_format_5_wrote_says_the_same_and_is_gone_on_with(tmp_path: Path) -> None:
    """`tests/data/format_5`: a group of branches and of a single turn was trained, one like it waits, one is in flight.
    The rows are those that the stretto of format 5 has exported."""
    path = tmp_path / "ledger.sqlite"
    shutil.copy(DATA / "format_5" / "ledger.sqlite", path)
    (tmp_path / "recipe.toml").write_text(RECIPE_OF_ONE)

    def kept() -> bytes:
        assert check_run(tmp_path).kept
        export_run(tmp_path, tmp_path / "rows.jsonl")
        return (tmp_path / "rows.jsonl").read_bytes()

    assert kept() == (DATA / "format_5" / "rows.jsonl").read_bytes()
    [waiting, in_flight] = read_unfinished(path)
    assert [one.token_ids for one in in_flight.members[0].segments] == [(4, 5, 6)]
    prompt = Prompt(id="b", token_ids=(3, 4), text="", answer="")
    group = Group(waiting.id, prompt, waiting.admitted_version, waiting.trajectories)
    with ledger_at(path) as ledger:
        ledger.journal("0.c.0/0", Segment.of((2,), (-1.0,), (1,), stop_reason=StopReason.STOP))
        ledger.commit_batch(Batch(step=2, version=1, groups=(group,)))
        ledger.record_update(Make.update(2, 10))
    kept()
    assert [batch.groups[0].id for batch in read_batches(path, 0, 2)] == ["0.a.0", "0.b.0"]
    assert next(iter(read_batches(path, 1, 2))).groups[0].trajectories == waiting.trajectories
    [in_flight] = read_unfinished(path)
    assert [one.token_ids for one in in_flight.members[0].segments] == [(4, 5, 6, 2)]
    flip_a_bit(path, "trained")
    assert check_run(tmp_path).breaches["every checksum fits"]
