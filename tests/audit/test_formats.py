"""What a ledger of each format says of a run: formats 2 to 4 are read and checked, 3 and 4 resumed, others refused; and
a trajectory of several turns is read, exported and checked as it was written.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Update, Verdict
from stretto.core.records import trajectory_id as name_of
from stretto.store.export import export_run, read_trajectories
from stretto.store.inspection import inspect_run
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto.store.totals import Membership
from stretto_report.audit.check import check_run
from tests.audit import test_check
from tests.audit.test_check import RECIPE, flip_a_bit
from tests.store.conftest import as_format_2, as_format_3

run_dir = test_check.run_dir
DATA = Path(__file__).parents[1] / "data"


def test_another_format_is_refused_with_both_numbers(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreError, match="has format 1, this version of stretto checks formats 2 to 6"):
        check_run(run_dir)


def test_a_run_of_the_format_before_is_checked_and_read_and_not_gone_on_with(run_dir: Path, tmp_path: Path) -> None:
    before, shown = export_run(run_dir, tmp_path / "before.jsonl"), inspect_run(run_dir)
    as_format_2(run_dir / "ledger.sqlite")
    findings = check_run(run_dir)
    assert findings.kept, findings
    assert findings.notes == ("the ledger has format 2: it has no seals of its recipe and of its first policy",)
    assert export_run(run_dir, tmp_path / "after.jsonl") == before
    assert (tmp_path / "after.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()
    assert inspect_run(run_dir) == shown
    with pytest.raises(StoreError, match="has format 2, this version of stretto resumes formats 3 to 6"):
        Ledger(run_dir / "ledger.sqlite", StoreConfig())
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection:
        connection.execute("UPDATE groups SET admitted_version = 1 WHERE key = 18")
        connection.commit()
    assert check_run(run_dir).breaches["every checksum fits"]


def test_a_run_of_the_format_without_engines_is_read_and_resumed(tmp_path: Path) -> None:
    def group(name: str, version: int) -> Group:
        prompt = Prompt(id=name, token_ids=(3, 4), text="", answer="")
        segment = Segment.of((5, 6), (-0.5, -0.25), (version, version), stop_reason=StopReason.STOP).written_by(
            "engine-0"
        )
        verdict = Verdict(outcome=Outcome.RIGHT, reward=1.0)
        whole = Trajectory(id=name_of(f"0.{name}.0", 0), segments=(segment,), verdict=verdict, text="x")
        return Group(f"0.{name}.0", prompt, version, (whole,))

    path, steps = (
        tmp_path / "ledger.sqlite",
        [Batch(step=k, version=k - 1, groups=(group("ab"[k - 1], k - 1),)) for k in (1, 2)],
    )
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("batch_size = 2", "batch_size = 1"))
    for batch in steps:
        with closing(Ledger(path, StoreConfig())) as ledger:
            (one,) = batch.groups
            ledger.issue(one.id, one.prompt, 1, one.admitted_version)
            ledger.buffer(one)
            ledger.commit_batch(batch)
            ledger.record_update(
                Update(step=batch.step, version=batch.step, trained_tokens=2, masked_tokens=0, metrics={})
            )
        if batch.step == 1:
            as_format_3(path)
            assert [line.engines for line in read_trajectories(tmp_path)] == [()]
            assert check_run(tmp_path).kept
    assert [line.engines for line in read_trajectories(tmp_path)] == [(), ("engine-0",)]
    assert [len(batch.groups) for batch in read_batches(path, 0, 2)] == [1, 1]
    assert check_run(tmp_path).breaches["every token has its engine"] == (
        "0.b.0/0 has tokens of engine-0, which is not on the roster",
    )
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.put("engines", [Membership("engine-0", "native", "here", version=1, joined_step=1)])
    assert check_run(tmp_path).kept


def test_a_trajectory_of_several_segments_is_read_exported_and_checked_as_it_was_written(tmp_path: Path) -> None:
    """Sampled, given, sampled: five sampled tokens, and a given span at places 2 and 3."""

    def turns(group: str, member: int, *versions: int) -> Trajectory:
        first = Segment.of(token_ids=(5, 6), behavior_logprobs=(-0.5, -0.25), versions=versions[:2], interrupted=1)
        tool = Segment.of(token_ids=(9, 9))
        last = Segment.of((7, 8, 2), (-1.0, -0.125, -2.0), versions[2:], stop_reason=StopReason.STOP)
        verdict = Verdict(outcome=Outcome.RIGHT, reward=1.0)
        return Trajectory(id=name_of(group, member), segments=(first, tool, last), verdict=verdict, text="a tool, 4")

    path = tmp_path / "ledger.sqlite"
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("batch_size = 2", "batch_size = 1"))
    prompts = [Prompt(id=id, token_ids=(3, 4), text="", answer="") for id in "ab"]
    trained, waiting = (
        Group(f"0.{prompt.id}.0", prompt, at, tuple(turns(f"0.{prompt.id}.0", k, *versions) for k in (0, 1)))
        for prompt, at, versions in zip(prompts, (0, 1), ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1)), strict=True)
    )
    batch = Batch(step=1, version=0, groups=(trained,))
    with closing(Ledger(path, StoreConfig())) as ledger:
        for group in (trained, waiting):
            ledger.issue(group.id, group.prompt, 2, group.admitted_version)
            ledger.buffer(group)
        ledger.commit_batch(batch)
        ledger.record_update(Update(step=1, version=1, trained_tokens=10, masked_tokens=0, metrics={}))
    assert list(read_batches(path, 0, 1)) == [batch]
    [unfinished] = read_unfinished(path)
    assert unfinished.trajectories == waiting.trajectories
    shown = list(read_trajectories(tmp_path))
    assert [one.given for one in shown] == [((2, 4),)] * 4
    assert (shown[0].token_ids, shown[0].versions) == ((5, 6, 9, 9, 7, 8, 2), (0,) * 5)
    assert shown[0].behavior_logprobs == (-0.5, -0.25, -1.0, -0.125, -2.0)
    findings = check_run(tmp_path)
    assert findings.kept, findings
    flip_a_bit(path, "trained")
    assert check_run(tmp_path).breaches["every checksum fits"]


def test_a_ledger_that_format_4_wrote_is_checked_and_gone_on_with(tmp_path: Path) -> None:
    """`tests/data/format_4`: one group was trained, one waits, one is in flight, of which one completion has ended and
    two have not; of each group one trajectory has a tool's output between two turns."""
    path = tmp_path / "ledger.sqlite"
    shutil.copy(DATA / "format_4" / "ledger.sqlite", path)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("batch_size = 2", "batch_size = 1"))
    before = read_unfinished(path)
    assert [sorted(group.members) for group in before] == [[], [0, 1, 2]]
    assert before[1].members[1].segments[0].engines == (("engine-0", 2), ("engine-1", 1))
    assert before[1].members[2].segments[0].stop_reason is StopReason.STOP
    whole, turns = before[0].trajectories
    assert (whole.token_ids, [len(one.token_ids) for one in turns.segments]) == ((4, 5), [2, 2, 2])
    shown = list(read_trajectories(tmp_path))
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.journal("0.3.0/1", Segment.of((2,), (-1.0,), (1,), stop_reason=StopReason.STOP))
        ledger.journal("0.3.0/1", Segment.of((9,), parent=0), node=1)
        ledger.begin_call("0.3.0/1", 0, b"2 + 2", durable=True)
    goes_on = read_unfinished(path)
    assert goes_on[0] == before[0]
    assert [one.token_ids for one in goes_on[1].members[1].segments] == [(4, 5, 6, 2), (9,)]
    assert [call.asked for call in goes_on[1].members[1].calls] == [b"2 + 2"]
    assert list(read_trajectories(tmp_path)) == shown
    assert [len(batch.groups) for batch in read_batches(path, 0, 1)] == [1]
    breaches = {law: found for law, found in check_run(tmp_path).breaches.items() if found}
    assert breaches == {}


def test_a_ledger_that_format_5_wrote_says_the_same_and_is_gone_on_with(tmp_path: Path) -> None:
    """`tests/data/format_5`: a group of branches and of a single turn was trained, one like it waits, one is in flight.
    The rows are those that the stretto of format 5 has exported."""
    path = tmp_path / "ledger.sqlite"
    shutil.copy(DATA / "format_5" / "ledger.sqlite", path)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("batch_size = 2", "batch_size = 1"))

    def kept() -> bytes:
        assert not any(check_run(tmp_path).breaches.values())
        export_run(tmp_path, tmp_path / "rows.jsonl")
        return (tmp_path / "rows.jsonl").read_bytes()

    assert kept() == (DATA / "format_5" / "rows.jsonl").read_bytes()
    [waiting, in_flight] = read_unfinished(path)
    assert [one.token_ids for one in in_flight.members[0].segments] == [(4, 5, 6)]
    prompt = Prompt(id="b", token_ids=(3, 4), text="", answer="")
    group = Group(waiting.id, prompt, waiting.admitted_version, waiting.trajectories)
    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.journal("0.c.0/0", Segment.of((2,), (-1.0,), (1,), stop_reason=StopReason.STOP))
        ledger.commit_batch(Batch(step=2, version=1, groups=(group,)))
        ledger.record_update(Update(step=2, version=2, trained_tokens=10, masked_tokens=0, metrics={}))
    kept()
    assert [batch.groups[0].id for batch in read_batches(path, 0, 2)] == ["0.a.0", "0.b.0"]
    assert next(iter(read_batches(path, 1, 2))).groups[0].trajectories == waiting.trajectories
    [in_flight] = read_unfinished(path)
    assert [one.token_ids for one in in_flight.members[0].segments] == [(4, 5, 6, 2)]
    flip_a_bit(path, "trained")
    assert check_run(tmp_path).breaches["every checksum fits"]
