"""Promises: whether a run goes on, finished, was stopped, failed or was killed is a fact of its ledger, whatever its
log says; only of a run without the fact, of an earlier stretto, the sentences of the log are asked.
"""

import os
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import StoreError
from stretto.store import lock
from stretto.store.ending import ENDING, Condition, Ending, branch_of, condition, read_ending
from stretto.store.run_folder import ORIGIN, Branch
from stretto_report.reading.inspection import inspect_run
from tests.store.make import run_at

BEGUN = "2026-11-22 03:08:40  starts at version 0\n"
GONE = "its process is gone without a word"


def written(path: Path, ending: Ending | None = None, log: str = "") -> Path:
    """A run that nobody writes any more."""
    with run_at(path) as (folder, ledger):
        folder.write("log.txt", log)
        if ending is not None:
            ledger.put(ENDING, ending)
    return path


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        (Ending.of_code(0), Condition("finished")),
        (Ending.of_code(143), Condition("stopped", "stopped by SIGTERM")),
        (Ending.of_code(130), Condition("stopped", "stopped by SIGINT")),
        (Ending.of_code(3), Condition("dead", "ended with exit code 3")),
        (Ending.of_error(StoreError("the disk is full")), Condition("dead", "the disk is full")),
        (Ending.of_error(AssertionError()), Condition("dead", "AssertionError")),
        (Ending.of_error(StoreError("x" * 10_000)), Condition("dead", "x" * 600 + "…")),
        (
            Ending("running"),
            Condition("dead", f"{GONE}; the log ends with: 2026-11-22 03:08:45  ends with exit code 0"),
        ),
    ],
)
def test_the_ledger_says_how_a_run_ended_whatever_a_log_says(tmp_path: Path, ending: Ending, found: Condition) -> None:
    run = written(tmp_path / "run", ending, f"{BEGUN}2026-11-22 03:08:45  ends with exit code 0\n")
    assert condition(run) == found
    seen = inspect_run(run)
    assert (seen.state, seen.reason) == (found.state, found.reason)


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (f"{BEGUN}2026-11-22 03:08:45  ends with exit code 0\n", Condition("finished")),
        (f"{BEGUN}2026-11-22 03:08:45  ends with exit code 129\n", Condition("stopped", "stopped by SIGHUP")),
        (
            f"{BEGUN}2026-11-22 03:08:45  failed: engine-0 is gone\nits log\n",
            Condition("dead", "engine-0 is gone\nits log"),
        ),
        (
            f"{BEGUN}2026-11-22 03:08:45  ends with exit code 0\n{BEGUN}",
            Condition("dead", f"{GONE}; the log ends with: {BEGUN.strip()}"),
        ),
        ("", Condition("dead", GONE)),
    ],
)
def test_of_an_earlier_stretto_the_log_is_asked(tmp_path: Path, log: str, found: Condition) -> None:
    run = written(tmp_path / "run", log=log)
    assert read_ending(run / "ledger.sqlite") is None
    assert condition(run) == found


@pytest.mark.parametrize("ending", [None, Ending("running"), Ending("finished")])
def test_a_run_that_is_written_runs_whatever_an_earlier_process_has_left(tmp_path: Path, ending: Ending | None) -> None:
    run = written(tmp_path / "run", ending)
    held = lock.acquire(run)
    assert condition(run) == Condition("running")
    os.close(held)


def test_a_branch_of_a_replay_is_finished_whatever_its_run_was(tmp_path: Path) -> None:
    run = written(tmp_path / "run", Ending("running"))
    (run / ORIGIN).write_text("{}")
    assert condition(run) == Condition("finished", "a replay")
    origin = Branch(run="runs/first", first_step=20, last_step=60, changes={"trainer.learning_rate": "was 1 and is 2"})
    (run / ORIGIN).write_bytes(msgspec.json.encode(origin))
    assert branch_of(run) == origin
    assert condition(run) == Condition("finished", "a replay of runs/first from step 20")
    assert inspect_run(run).replay == origin


def test_a_run_that_has_no_ledger_yet_was_killed(tmp_path: Path) -> None:
    assert read_ending(tmp_path / "ledger.sqlite") is None
    assert condition(tmp_path) == Condition("dead", GONE)


def test_a_ledger_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    run = written(tmp_path / "run", Ending("finished"))
    (run / "ledger.sqlite").write_bytes(b"no ledger" * 1000)
    with pytest.raises(StoreError, match=r"ledger\.sqlite"):
        condition(run)
