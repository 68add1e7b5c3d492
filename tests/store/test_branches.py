"""A trajectory that branches, with rewards of turns, named parts of its reward and a session.

Promises: it is read back as it was written, for a resume and for a replay; its export says where each segment stands;
the seal of a batch covers where its segments stand and the rewards of turns; what a single turn writes has the seal of
format 4.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stretto.core.errors import StoreError
from stretto.core.records import NOTHING, Group, Outcome, Segment, StopReason, Trajectory, Verdict
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_unfinished
from stretto.store.ledger.rows import encode_payload
from stretto.store.ledger.seals import batch_seal, seal
from stretto.store.run_folder import RunFolder
from stretto_report.audit.checksums import broken_checksums
from stretto_report.reading.export import export_run
from stretto_report.reading.inspection import inspect_run
from tests.store.make import Make, buffered, run_at, sampled, sql


def turn(*versions: int, **further: Any) -> Segment:
    return sampled(versions, behavior_logprobs=(-0.5,) * len(versions), **further)


BRANCHES = (
    turn(2, 3, reward=0.25, interrupted=1, engines=(("engine-0", 1), ("engine-1", 1))),
    Segment.of((9, 9)),
    turn(3, parent=0),
    Segment.of((8,), parent=NOTHING, cause="subagent"),
    turn(0, 1, reward=-1.0, stop=StopReason.LENGTH, engines=(("engine-1", 2),)),
)
VERDICT = Verdict(outcome=Outcome.RIGHT, reward=0.5, rewards={"format": 1.0, "answer": 0.25})


def agent(group: str, *segments: Segment) -> Group:
    return Make.group(group, Trajectory(f"{group}/0", segments, VERDICT, "done", session="agent-7"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """One group was trained, one waits."""
    with run_at(tmp_path / "run") as (folder, ledger):
        groups = [agent(name, *BRANCHES) for name in ("0.1.0", "0.2.0")]
        buffered(ledger, *groups)
        ledger.commit_batch(Make.batch(1, groups[0], version=3))
    return folder


def test_a_branching_trajectory_is_read_back_as_it_was_written(run: RunFolder) -> None:
    (batch,) = read_batches(run.ledger, 0, 1)
    assert batch.groups[0].trajectories == agent("0.1.0", *BRANCHES).trajectories
    (waiting,) = read_unfinished(run.ledger)
    assert waiting.trajectories == agent("0.2.0", *BRANCHES).trajectories


def test_the_versions_of_a_row_are_the_oldest_and_the_newest_of_any_segment(run: RunFolder) -> None:
    assert sql(run.ledger, "SELECT tokens, oldest_version, newest_version FROM trajectories") == [(5, 0, 3)] * 2


def test_the_export_says_where_each_segment_stands(run: RunFolder, tmp_path: Path) -> None:
    assert export_run(run.path, tmp_path / "out.jsonl") == 2
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    names = ("sampled", "token_ids", "behavior_logprobs", "versions")
    first = dict(zip(names, (True, [4, 5], [-0.5, -0.5], [2, 3]), strict=True)) | {"reward": 0.25}
    given = dict(zip(names, (False, [9, 9], [], []), strict=True))
    branch = dict(zip(names, (True, [4], [-0.5], [3]), strict=True)) | {"parent": 0}
    subagent = given | {"token_ids": [8], "parent": -2, "cause": "subagent"}
    last = first | {"versions": [0, 1], "reward": -1.0}
    assert row["segments"] == [first, given, branch, subagent, last]
    assert (row["rewards"], row["session"]) == ({"format": 1.0, "answer": 0.25}, "agent-7")
    assert row["token_ids"] == [4, 5, 9, 9, 4, 8, 4, 5]
    assert (row["versions"], row["given"]) == ([2, 3, 3, 0, 1], [[2, 4], [5, 6]])
    assert (row["behavior_logprobs"], row["stop_reason"]) == ([-0.5] * 5, "length")
    assert row["engines"] == ["engine-0", "engine-1"]
    assert inspect_run(run.path).staleness.histogram == {0: 2, 1: 1, 2: 1, 3: 1}  # of the sampled tokens alone


@pytest.mark.parametrize("change", [{"parent": 1}, {"reward": 0.5}, {"parent": None}], ids=str)
def test_the_seal_of_a_batch_covers_where_segments_stand_and_the_rewards_of_turns(
    run: RunFolder, change: dict[str, object]
) -> None:
    """Although the payload has its own seal, which fits."""
    bent = replace(BRANCHES[2], **change)
    (other,) = agent("0.1.0", *BRANCHES[:2], bent, *BRANCHES[3:]).trajectories
    sql(run.ledger, "UPDATE payloads SET payload = ? WHERE key = 0", encode_payload(other))
    with pytest.raises(StoreError, match="the batch of step 1 is not what was written"):
        list(read_batches(run.ledger, 0, 1))
    with closing(sqlite3.connect(run.ledger)) as connection:
        assert [one.partition(" is ")[0] for one in broken_checksums(connection, 5)] == ["the batch of step 1"]


def test_a_single_turn_has_the_seals_of_format_4() -> None:
    """Worked out from what docs and `audit.checksums` say of format 4: five fields of a segment."""
    batch = Make.batch(1, Make.group("0.1.0", Make.trajectory("0.1.0")))
    sealed = ["0.1.0/0", [[[4, 5], [-0.25, -0.5], [0, 0], 0, "stop"]], "right", 1.0]
    assert batch_seal(batch, 5) == seal(1, 0, 0, [["0.1.0", [5, 12, 8, 13], [sealed]]])


def test_a_group_that_waits_goes_on_with_nothing_that_is_damaged(run: RunFolder) -> None:
    cut = "substr(payload, 1, length(payload) - 1)"
    sql(run.ledger, f"UPDATE payloads SET payload = CAST({cut} || x'00' AS BLOB) WHERE key = 1")
    with pytest.raises(StoreError, match=r"trajectory 0\.2\.0/0 is not what was written"):
        read_unfinished(run.ledger)
    sql(run.ledger, "UPDATE trajectories SET tokens = 6 WHERE key = 1")
    with pytest.raises(StoreError, match="row 1 of trajectories is not what was written"):
        Ledger(run.ledger, StoreConfig())
