"""What a run came to, and its export.

Promises: the JSON has exactly the fields that others rely on; trajectories add up; staleness is over trained tokens; an
unbounded run says null; an export has every trajectory once, with the log-probabilities bit by bit and the spans of
given tokens. Of a ledger with a flipped bit both say what was written, or refuse it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.canary import CANARY, CanaryRecord, Proof
from stretto.core.errors import RunFolderError, StoreError
from stretto.core.records import Outcome, State, Verdict
from stretto.store.inspection import WeightsSummary
from stretto.store.ledger.reading import read_batches
from stretto.store.ledger.schema import PAGE, once_at_rest, reading
from stretto.store.run_folder import RunFolder
from stretto.store.totals import CATEGORIES, ENGINES, TOTALS, Carried, Membership, Totals
from stretto_report.reading import export
from stretto_report.reading.export import export_run, read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.store.make import Make, buffered, ledger_at, run_at, sql


def small_run(path: Path, make: Make, max_staleness: float = 4) -> None:
    """Two steps; trained: 4 tokens at ages 0 1 1 2, one of 6 tokens masked; one filtered, one failed, one in flight."""
    with run_at(path) as (_, ledger):
        first = make.group("0.1.0", make.trajectory("0.1.0", 0, versions=(0, 0)))
        second = make.group("0.2.0", make.trajectory("0.2.0", 0, versions=(0, 1, 2, 3), right=False))
        buffered(ledger, first, second)
        ledger.issue("0.3.0", make.prompt, 3, 1)
        ledger.settle("0.3.0/0", State.FILTERED, "all right", make.trajectory("0.3.0", 0, versions=(1, 1, 1)))
        ledger.settle("0.3.0/1", State.FAILED, "engine-0 was lost")
        ledger.commit_batch(make.batch(1, first, version=1))
        ledger.record_update(make.update(1))
        ledger.commit_batch(make.batch(2, second, version=3, oldest_trainable=2))
        ledger.record_update(make.update(2))
        pulls, written = ((10, 0.5), (30, 0.1), (20, 0.3)), ((20, 0.2), (20, 0.6))
        totals = Totals(
            max_staleness=max_staleness,
            generated=30,
            recomputed=7,
            busy={"trainer": 5.0, "engine-0": 9.0},
            wall_seconds=12.0,
            rl_seconds=10.0,
            initial_accuracy=0.25,
            final_accuracy=0.75,
            generated_by={"engine-0": 28, "engine-1": 2},
            carried=Carried("http", pulls, pauses=(0.02, 0.04), copied=(20, 20, 20), written=written),
        )
        ledger.put(TOTALS, totals)
        stayed = Membership("engine-0", "native", "node-1", version=2, joined_step=0)
        vanished = Membership("engine-1", "vllm", "node-2", 1, joined_step=1, left_step=1, reason="lost")
        ledger.put(ENGINES, [stayed, vanished])


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def seconds(**spent: float) -> dict[str, Any]:
    return {name: near(spent.get(name, 0.0)) for name in CATEGORIES}


# 9 of 30 sampled tokens are on record; each has 0.3 s of the engine's 9 s. The trainer has trained 4 tokens and
# masked 2 in 5 s. Both wait for the rest of the 10 s of RL; 2 s of the run were before or behind it.
BUDGET: dict[str, Any] = {
    "goodput": {
        "trained": {"seconds": near(9 * 4 / 30 + 5 * 4 / 6), "tokens": 4},
        "generated_and_waiting": {"seconds": near(9 * 21 / 30), "tokens": 21},
        "masked": {"seconds": near(9 * 2 / 30 + 5 * 2 / 6), "tokens": 2},
        "expired": {"seconds": 0.0, "tokens": 0},
        "filtered": {"seconds": near(9 * 3 / 30), "tokens": 3},
        "recomputed": {"seconds": 0.0, "tokens": 7},
        "failed": {"seconds": 0.0, "tokens": 0},
        "idle": {"seconds": near(1 + 5 + 2 * 2), "tokens": 0},
    },
    "goodput_roles": {
        "engine-0": seconds(trained=1.2, generated_and_waiting=6.3, masked=0.6, filtered=0.9, idle=3.0),
        "trainer": seconds(trained=5 * 4 / 6, masked=5 * 2 / 6, idle=7.0),
    },
    "idle": {"engine-0": {"admission": 1.0, "ending": 2.0}, "trainer": {"batch": 5.0, "ending": 2.0}},
}


WEIGHTS = {
    "medium": "http", "bytes": 20, "seconds_pull_median": 0.3, "seconds_pause_median": 0.03, "copies": 2.0,
    "seconds_publish_median": 0.4,
}  # fmt: skip


TRAJECTORIES = {
    "issued": 5, "trained": 2, "buffered": 0, "in_flight": 1, "filtered": 1, "expired": 0, "failed": 1, "undecided": 0,
    "undecided_reason": "",
}  # fmt: skip


ENGINE = ("name", "kind", "host", "version", "joined_step", "left_step", "reason", "generated")


def test_the_json_is_what_others_rely_on(tmp_path: Path, make: Make) -> None:
    small_run(tmp_path, make)
    found = json.loads(msgspec.json.encode(inspect_run(tmp_path)))
    assert found == {
        "steps": 2,
        "version": 2,
        "wall_seconds": 12.0,
        "rl_seconds": 10.0,
        "initial_accuracy": 0.25,
        "final_accuracy": 0.75,
        # wasted: 3 of the filtered answer, 2 that were masked
        "tokens": {"generated": 30, "trained": 4, "recomputed": 7, "wasted": 5},
        "trajectories": TRAJECTORIES,
        # two tokens of version 0 trained at 1; one each of versions 2 and 3 trained at 3
        "staleness": {"bound": 4.0, "max": 1, "mean": 0.75, "histogram": {"0": 1, "1": 3}},
        "interrupted": 1,
        "multi_version": 1,
        "busy": {"engine-0": 0.9, "trainer": 0.5},
        "engines": [
            dict(zip(ENGINE, ("engine-0", "native", "node-1", 2, 0, None, "", 28), strict=True)),
            dict(zip(ENGINE, ("engine-1", "vllm", "node-2", 1, 1, 1, "lost", 2), strict=True)),
        ],
        "weights": WEIGHTS,
        "rewards": {},
        "gateway": None,
        **BUDGET,
        "selection_bias": {name: {"statistic": 0.0, "p": 1.0} for name in ("length", "difficulty", "latency")},
        "masked_groups": None,
        "bounds": [],
        "canary": [],
        "canary_proofs": [],
        "state": "dead",  # nobody has said how it ended
        "reason": "its process is gone without a word",
        "replay": None,
        "changed": [],
    }


def test_failed_trajectories_without_a_verdict_are_undecided_with_the_common_reason(tmp_path: Path, make: Make) -> None:
    reasons = ["timeout after 1 s", "the reward raised KeyError: 'a'", "the reward raised KeyError: 'b'"]
    with run_at(tmp_path / "run") as (folder, ledger):
        folder.write("recipe.toml", "")
        ledger.issue("0.17.0", make.prompt, 5, 0)
        for member, reason in enumerate(reasons):
            verdict = Verdict(Outcome.UNDECIDED, None, reason)
            judged = msgspec.structs.replace(make.trajectory("0.17.0", member), verdict=verdict)
            ledger.settle(judged.id, State.FAILED, reason, judged)
        ledger.settle("0.17.0/3", State.FAILED, "engine-0 is lost")
    counts = inspect_run(tmp_path / "run").trajectories
    assert (counts.issued, counts.in_flight, counts.failed, counts.undecided) == (5, 1, 4, 3)
    assert counts.undecided_reason == reasons[2]


def test_a_run_without_a_bound_says_null(tmp_path: Path, make: Make) -> None:
    small_run(tmp_path, make, max_staleness=math.inf)
    assert json.loads(msgspec.json.encode(inspect_run(tmp_path)))["staleness"]["bound"] is None


def test_a_run_can_be_inspected_before_its_first_step_and_while_it_writes(tmp_path: Path, make: Make) -> None:
    with RunFolder.create(tmp_path) as folder, ledger_at(folder.ledger, flush_seconds=0) as ledger:
        assert inspect_run(tmp_path).steps == 0
        ledger.issue("0.1.0", make.prompt, 4, 0)
        seen = inspect_run(tmp_path)
    assert (seen.trajectories.issued, seen.trajectories.in_flight) == (4, 4)
    assert (seen.staleness.max, seen.staleness.mean, seen.staleness.histogram) == (0, 0.0, {})
    assert seen.final_accuracy is None
    assert (seen.engines, seen.weights) == ((), WeightsSummary(None, None, None, None))


def test_a_ledger_that_does_not_add_up_is_an_error(tmp_path: Path, make: Make) -> None:
    small_run(tmp_path, make)
    sql(tmp_path / "ledger.sqlite", "DELETE FROM trajectories WHERE state = 'failed'")
    with pytest.raises(StoreError, match="5 trajectories were issued, and 4 have a row"):
        inspect_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        inspect_run(tmp_path / "nowhere")


WRITTEN: dict[str, Any] = {
    "token_ids": [4, 5, 6, 7],
    "behavior_logprobs": [-0.25, -0.5, -0.75, -1.0],
    "versions": [0, 1, 2, 3],
}
EXPORTED = {
    "id": "0.2.0/0", "group": "0.2.0", "prompt_id": "17", "prompt_token_ids": [5, 12, 8, 13], **WRITTEN, "given": [],
    "engines": [], "reward": 0.0, "verdict": "wrong", "state": "trained", "reason": "", "admitted_version": 0,
    "trained_step": 2, "stop_reason": "stop", "text": "11", "prompt": "3+8=", "answer": "11", "row": "rows.jsonl:17",
    "source": "", "segments": [{"sampled": True, **WRITTEN}], "rewards": {}, "session": "",
}  # fmt: skip
FIELDS = list(EXPORTED)


def test_an_export_has_every_trajectory_once(tmp_path: Path, make: Make) -> None:
    small_run(tmp_path / "run", make)
    question = {"id": "17", "prompt": "3+8=", "answer": "11", "row": "rows.jsonl:17"}
    (tmp_path / "run" / "questions.jsonl").write_text(json.dumps(question) + "\n")
    assert export_run(tmp_path / "run", tmp_path / "out.jsonl") == 5
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(set(line) == set(FIELDS) for line in lines)
    assert [line["id"] for line in lines] == ["0.1.0/0", "0.2.0/0", "0.3.0/0", "0.3.0/1", "0.3.0/2"]
    assert lines[1] == EXPORTED
    assert (lines[3]["state"], lines[3]["reason"], lines[3]["token_ids"]) == ("failed", "engine-0 was lost", [])
    assert lines[3]["verdict"] is lines[3]["reward"] is lines[3]["trained_step"] is None
    assert lines[3]["prompt_token_ids"] == [5, 12, 8, 13]


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("flipped")
    small_run(path, Make())
    return path, (path / "ledger.sqlite").read_bytes()


def damaged(folder: Path, ledger: bytes) -> None:
    for leftover in ("-wal", "-shm"):
        (folder / f"ledger.sqlite{leftover}").unlink(missing_ok=True)
    (folder / "ledger.sqlite").write_bytes(ledger)


@given(st.data())
def test_a_flipped_bit_of_a_ledger_changes_neither_its_export_nor_its_inspection(
    flipped: tuple[Path, bytes], data: st.DataObject
) -> None:
    folder, whole = flipped
    damaged(folder, whole)
    readers: tuple[Callable[[], object], ...] = (lambda: list(read_trajectories(folder)), lambda: [inspect_run(folder)])
    expected = [reader() for reader in readers]
    at = data.draw(st.sampled_from([place for place, byte in enumerate(whole) if byte]))
    damaged(folder, whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :])
    for reader, wanted in zip(readers, expected, strict=True):
        try:
            found = reader()
        except StoreError:
            continue
        assert found == wanted


def test_a_page_of_zeros_is_refused_by_name(flipped: tuple[Path, bytes]) -> None:
    folder, whole = flipped
    for page in range(1, len(whole) // PAGE):
        damaged(folder, whole[: page * PAGE] + bytes(PAGE) + whole[(page + 1) * PAGE :])
        with pytest.raises(StoreError, match=r"ledger\.sqlite: "):
            inspect_run(folder)
        with pytest.raises(StoreError, match=r"ledger\.sqlite: "):
            list(read_trajectories(folder))


def test_a_run_that_begins_to_write_while_its_ledger_is_read_is_read_again(tmp_path: Path, make: Make) -> None:
    """A ledger that nobody writes to is read without locks. An integrity check found an undamaged one damaged when a
    run was resumed meanwhile."""
    small_run(tmp_path / "run", make)
    folder, beginning, found = RunFolder.open(tmp_path / "run"), ["9.1.0"], list[int]()

    def read() -> int:
        with reading(folder.ledger) as connection:
            before: int = connection.execute("SELECT count(*) FROM groups").fetchone()[0]
            if beginning:
                with RunFolder.resume(folder.path), ledger_at(folder.ledger) as ledger:
                    ledger.issue(beginning.pop(), make.prompt, 3, 1)
                if found:
                    raise StoreError("it is damaged")
            found.append(before)
            return before

    assert once_at_rest(folder.ledger, read) == 4
    beginning.append("9.2.0")
    with pytest.raises(StoreError, match=r"ledger\.sqlite: a run began to write while it was read: try again"):
        read()
    beginning.append("9.3.0")
    assert once_at_rest(folder.ledger, read) == 6
    assert found == [3, 4, 6]


def test_no_reader_takes_a_part_for_the_whole_when_a_run_begins_to_write_meanwhile(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path / "run", make)
    folder = RunFolder.open(tmp_path / "run")

    def resume(step: int) -> None:
        group = make.group(f"1.{step}.0", make.trajectory(f"1.{step}.0", 0, versions=(2, 2)))
        with RunFolder.resume(folder.path), ledger_at(folder.ledger) as ledger:
            buffered(ledger, group)
            ledger.commit_batch(make.batch(step, group, version=3))
            ledger.record_update(make.update(step))

    with pytest.raises(StoreError, match="began to write while it was read: try again"), reading(folder.ledger):
        resume(3)
    monkeypatch.setattr(export, "_PORTION", 1)
    rows, batches = read_trajectories(folder.path), read_batches(folder.ledger, 0, 3)
    first, step = next(rows), next(batches)
    resume(4)
    assert [first, *rows] == [*read_trajectories(folder.path)]
    assert [step, *batches] == [*read_batches(folder.ledger, 0, 3)]


def test_an_export_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, make: Make) -> None:
    small_run(tmp_path / "run", make)
    with pytest.raises(RunFolderError, match=r"nowhere/out\.jsonl: cannot be written.*; .*/nowhere: no such folder"):
        export_run(tmp_path / "run", tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(RunFolderError):
        export_run(tmp_path / "none", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("failed", "worst"), [(False, "engine-1"), (True, "engine-2")])
def test_the_worst_proof_is_one_that_failed_or_the_farthest_for_its_tolerance(
    tmp_path: Path, make: Make, failed: bool, worst: str
) -> None:
    distances = ((2e-5, 1e-4), (4e-5, 1e-4), (1e-5, 1e-4))
    proofs = tuple(
        Proof(f"engine-{number}", "native float32", 1, *of, 1e-6, proven=not failed or number < 2)
        for number, of in enumerate(distances)
    )
    with run_at(tmp_path / "run") as (_, ledger):
        ledger.put(CANARY, CanaryRecord(newest=proofs, worst=proofs))
    found = inspect_run(tmp_path / "run").canary_proofs
    assert [(one.engine, one.which) for one in found] == [
        *((f"engine-{number}", "newest") for number in range(3)),
        (worst, "worst"),
    ]
