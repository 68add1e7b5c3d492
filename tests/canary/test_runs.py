"""Whole runs in which engines load weights wrongly and report success (`tests.canary.sabotage`).

- The run ends with an exit code above 0 and a sentence that names engine and version; no token of that version was
  trained on; `stretto inspect` shows the proof that failed, and `stretto check` finds every law kept. A resume whose
  engine is still wrong ends as well; with an honest engine it goes on to its end, with the text that it began with.
- So in float32, in bfloat16 where the mailbox hands over something else, and with adapters.
- Weights that change after their proof are found at the next load: the engine is replaced, and the second time the run
  ends. What was trained on meanwhile breaks the law on record; what was not is sampled anew. An engine that keeps its
  cache unlike the run asks is refused.
- So where the fault begins with the process that replaces a killed engine; and of two engines the wrong one is named.
- A machine whose engine is wrong leaves, and the run goes on without it.
- An engine whose weights are right, and that tells other log-probabilities than those it samples with, is replaced;
  where its replacement does the same, the run ends with the engine's name: within a few steps, whatever the bound on
  staleness.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from stretto.core.canary import CANARY, CanaryRecord
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.cluster.test_whole_runs import machine
from tests.faults.test_company import end_well
from tests.launch.running import Ended, Laboratory, exported, said, steps_done, wait_for_step, wait_until
from tests.launch.running import laboratory as laboratory

SECONDS = 300.0  # that a run may take, beside others
FIRST = 3  # version from which on something is wrong
pytestmark = pytest.mark.timeout(900)
LORA = ("trainer.lora.rank=2", "trainer.lora.alpha=4")


def sabotaged(what: str = "skips", first: int = FIRST, engine: str = "", during: str = "") -> tuple[str, ...]:
    """What a command has to do without: honest engines."""
    return "sabotaged", json.dumps([what, first, engine, during])


def record_of(run_dir: Path) -> CanaryRecord:
    ledger = Ledger(run_dir / "ledger.sqlite", StoreConfig())
    try:
        record = ledger.get(CANARY, CanaryRecord)
    finally:
        ledger.close()
    assert record is not None
    return record


def canary_of(laboratory: Laboratory, run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(laboratory.run("inspect", run_dir, "--json").well())["canary"]
    return found


def assert_refused(
    ended: Ended, laboratory: Laboratory, run_dir: Path, engine: str = "engine-0", *, alone: bool = True
) -> int:
    """The version that the engine has not proven; of an engine `alone` no token of it was trained on."""
    assert ended.code == 1, ended.out + ended.err
    assert (named := re.search(rf"{engine}: has not proven version (\d+): ", ended.err)), ended.err
    newest = {one.engine: one for one in inspect_run(run_dir).canary_proofs if one.which == "newest"}[engine]
    # The replacement may find a newer version than the engine that was replaced.
    assert (newest.version, newest.proven) == (int(named[1]), False)
    proven = {one.engine: one.ranges for one in record_of(run_dir).proven}[engine]
    # A replacement may be refused at the version that the engine before it had proven.
    assert max(last for _, last in proven) < newest.version + (not alone)
    assert not alone or all(
        max(trajectory["versions"], default=0) < newest.version
        for trajectory in exported(laboratory, run_dir)
        if trajectory["state"] == "trained"
    )
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    return newest.version


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        pytest.param("skips", (), id="float32"),
        pytest.param("hands", ("engine.dtype=bfloat16",), id="bfloat16", marks=pytest.mark.long),
        pytest.param("skips", LORA, id="adapters", marks=pytest.mark.long),
    ],
)
def test_a_run_ends_before_one_token_of_unproven_weights_is_trained_on(
    laboratory: Laboratory, tmp_path: Path, what: str, settings: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *settings, poor=sabotaged(what)) as command:
        ended = command.end(SECONDS)
        command.assert_nothing_is_left()
    assert assert_refused(ended, laboratory, run_dir) >= FIRST
    newest, worst = canary_of(laboratory, run_dir)
    assert set(newest) == set(worst) == {"engine", "version", "distance", "tolerance", "proven"}
    assert (newest["engine"], newest["proven"], worst["proven"]) == ("engine-0", False, False)
    whole = inspect_run(run_dir).canary_proofs
    assert [one.which for one in whole] == ["newest", "worst"]
    assert 0 < whole[0].compared == whole[0].tensors
    if settings == ():
        assert newest["distance"] > newest["tolerance"], "in float32 the text alone shows it"


@pytest.mark.parametrize(
    ("what", "staleness"),
    [("late", 2), pytest.param("after", 0, marks=pytest.mark.long), pytest.param("late", 0, marks=pytest.mark.long)],
)
def test_weights_that_change_after_their_proof_end_the_run_and_break_the_law_on_record(
    laboratory: Laboratory, tmp_path: Path, what: str, staleness: int
) -> None:
    run_dir = tmp_path / "run"
    settings = ("trainer.steps=40", f"rollout.max_staleness={staleness}")
    with laboratory.train(run_dir, *settings, poor=sabotaged(what)) as command:
        ended = command.end(SECONDS)
        command.assert_nothing_is_left()
    assert ended.code == 1, ended.out + ended.err
    changed = r"engine-0:? has changed its weights after it had proven version \d+: model\."
    assert re.search(changed, ended.err), ended.err
    assert re.search(rf"{changed}.*: it is replaced", ended.out), ended.out
    record = record_of(run_dir)
    assert len(record.withdrawn) == record.refused == 2
    spoilt = {one.version for one in record.withdrawn}
    with_them = [one for one in exported(laboratory, run_dir) if spoilt & set(one["versions"])]
    assert {one["state"] for one in with_them} <= {"trained", "failed"}, "nothing of them waits for a batch"
    broken = {law: told for law, told in check_run(run_dir).breaches.items() if told}
    assert set(broken) == {"every token was sampled by proven weights"}
    named = {sentence.partition(" ")[0] for sentence in broken.popitem()[1]}
    assert named == {one["id"] for one in with_them if one["state"] == "trained"}


@pytest.mark.long
def test_a_cache_that_is_kept_unlike_asked_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=40", "rollout.max_staleness=2", poor=sabotaged("keeps")) as command:
        out = command.end(SECONDS).out
    assert re.search(r"engine-0 has not proven version \d+ and loads it again: .*the KV cache of \d+ completions", out)
    assert check_run(run_dir).kept, check_run(run_dir).breaches


@pytest.mark.long
def test_a_resume_whose_engine_is_wrong_ends_and_an_honest_one_goes_on(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, "trainer.steps=3")
    text, steps = record_of(run_dir).token_ids, steps_done(run_dir)
    more = ("train", "--resume", run_dir, "trainer.steps=6")
    with laboratory.start(*more, run_dir=run_dir, poor=sabotaged(first=0)) as again:
        ended = again.end(SECONDS)
    assert ended.code == 1, ended.out + ended.err
    assert "engine-0: has not proven version 3: " in ended.err
    assert steps_done(run_dir) == steps == 3, "nothing was trained"
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    laboratory.run(*more).well()
    assert check_run(run_dir).kept, check_run(run_dir).breaches
    assert all(one.proven for one in inspect_run(run_dir).canary_proofs if one.which == "newest")
    assert record_of(run_dir).token_ids == text, "the text of a run stays"
    assert record_of(run_dir).refused >= 2


@pytest.mark.long
def test_an_engine_that_is_wrong_from_its_replacement_on_ends_the_run(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, now = tmp_path / "run", tmp_path / "now"
    settings = ("trainer.steps=100000", "trainer.keep_versions=1")
    with laboratory.train(run_dir, *settings, poor=sabotaged("skips", 0, during=str(now))) as command:
        wait_for_step(command, 2, SECONDS)
        engine = command.role("engine")
        os.kill(engine, signal.SIGSTOP)  # this one loads nothing more
        now.touch()
        os.kill(engine, signal.SIGKILL)
        assert_refused(command.end(SECONDS), laboratory, run_dir, alone=False)
    assert said(run_dir).count("a new one is started") == 2


@pytest.mark.long
def test_of_two_engines_the_wrong_one_is_named(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = ("trainer.steps=100000", "trainer.keep_versions=1", "engine.count=2")
    with laboratory.train(run_dir, *settings, poor=sabotaged(engine="engine-1")) as command:
        assert_refused(command.end(SECONDS), laboratory, run_dir, "engine-1", alone=False)
    assert all(one.proven for one in inspect_run(run_dir).canary_proofs if one.engine == "engine-0")


@pytest.mark.long
@pytest.mark.parametrize("what", ["skips", "prove"])
def test_a_machine_whose_engine_is_wrong_leaves_and_the_run_goes_on(
    laboratory: Laboratory, tmp_path: Path, what: str
) -> None:
    """It gets its weights over the network. Another one, which is honest, stays."""
    run_dir = tmp_path / "run"
    listening = ("cluster.listen=127.0.0.1:0", "trainer.steps=100000", "trainer.keep_versions=1")
    train = laboratory.train(run_dir, *listening)
    with train as command, machine(laboratory, run_dir, sees_the_folder=False) as honest:
        wait_until(lambda: "engine-1 has joined, at version" in said(run_dir), "an honest engine", command, SECONDS)
        with machine(laboratory, run_dir, sees_the_folder=False, poor=sabotaged(what, first=0)) as wrong:
            wait_until(lambda: "engine-2 has left: " in said(run_dir), "the departure of the other", command, SECONDS)
            wrong.stop(signal.SIGTERM)
        wait_for_step(command, steps_done(run_dir) + 3, SECONDS)
        end_well(command, laboratory, run_dir)
        honest.stop(signal.SIGTERM)
    assert re.search(
        r"engine-2 has left: .*has not (proven version \d+|loaded version \d+: MemoryError)", said(run_dir)
    )
    newest = {one.engine: one.proven for one in inspect_run(run_dir).canary_proofs if one.which == "newest"}
    assert not newest.pop("engine-2", False)
    assert newest == {"engine-0": True, "engine-1": True}
    assert "engine-2" not in {one.engine for one in record_of(run_dir).proven}


@pytest.mark.parametrize("staleness", [0, pytest.param(4, marks=pytest.mark.long)])
def test_an_engine_that_tells_other_log_probabilities_is_replaced_and_then_ends_the_run(
    laboratory: Laboratory, tmp_path: Path, staleness: int
) -> None:
    run_dir = tmp_path / "run"
    settings = ("trainer.steps=40", f"rollout.max_staleness={staleness}", "trainer.minibatches=1")
    with laboratory.train(run_dir, *settings, poor=sabotaged("logprobs")) as command:
        ended = command.end(SECONDS)
    assert ended.code == 1, ended.out + ended.err
    judge = "the trainer" if staleness == 0 else "(the trainer|its own forward)"
    differs = rf"differs from {judge} by 0.01\d* nats a token, 0.001 allowed"
    assert re.search(f"engine-0: {differs}", ended.err), ended.err
    assert re.search(f"engine-0 {differs}: it is replaced", ended.out), ended.out
    found = inspect_run(run_dir)
    assert all(one.proven for one in found.canary), "the weights were right"
    assert found.steps <= (6 if staleness == 0 else 36)  # with 4, steps go on while the engine is replaced


RAISED, AGAIN = r"has not loaded version (\d+)", " and loads it again"
ROOM = ": MemoryError: no room for it"


@pytest.mark.parametrize(("what", "told"), [("load", RAISED), ("prove", RAISED), ("add", "failed at a request")])
def test_an_engine_whose_load_proof_or_acceptance_raises_is_replaced_and_then_ends_the_run(
    laboratory: Laboratory, tmp_path: Path, what: str, told: str
) -> None:
    run_dir = tmp_path / "run"
    settings = ("trainer.steps=40", "deadlines.batch=1800", "deadlines.step=1800", "deadlines.engine_restarts=1")
    with laboratory.train(run_dir, *settings, poor=sabotaged(what)) as command:
        ended = command.end(SECONDS)
    assert ended.code == 1, ended.out + ended.err
    assert re.search(f"engine-0 .*{told}{ROOM}", ended.err), ended.err
    assert re.search(rf"engine-0 was killed by SIGKILL \({told}{ROOM}\): a new one is started", said(run_dir))
    assert said(run_dir).count("a new one is started") == 1
    again = re.search(f"engine-0 {told}{AGAIN}{ROOM}", said(run_dir))
    assert what == "add" or (again and int(again[1]) >= FIRST)
    assert "in _fail" in (run_dir / "logs" / "engine-0.txt").read_text()
    assert check_run(run_dir).kept, check_run(run_dir).breaches


def test_a_load_that_raises_once_costs_a_line_and_no_engine(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, once = tmp_path / "run", tmp_path / "once"
    once.touch()
    with laboratory.train(run_dir, poor=sabotaged("load", during=str(once))) as command:
        command.end(SECONDS).well()
    assert len(re.findall(f"engine-0 {RAISED}{AGAIN}{ROOM}", said(run_dir))) == 1
    assert "a new one" not in said(run_dir)
    assert check_run(run_dir).kept, check_run(run_dir).breaches
