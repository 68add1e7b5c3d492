"""Promises, on one real run: that it runs, was killed, stopped by a signal, ended by an error, finished, is what every
reader says, `stretto inspect`, the pages, Python and studies; it is resumed after each, and its log is not asked. Its
roles end within 5 seconds of their conductor, and nothing is lost, before the first checkpoint too. A run folder has
one owner. A stop ends within 10 seconds, with a checkpoint. What a killed run has left outside of its folder goes when
it goes on. A trainer that dies too often ends the run with a message that names it and how it died.
"""

import json
import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import stretto
from stretto.store.checkpoints import Checkpoints
from stretto.store.ledger.reading import last_step
from stretto_app.study.conduct import read_outcome
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.runs.run import WatchedRun
from tests.launch.running import TINY, Laboratory, assert_the_law, exported, said, steps_done, wait_for_step, wait_until

ENDLESS = ("trainer.steps=100000", "trainer.checkpoint_every=1000000")


def states(laboratory: Laboratory, run_dir: Path) -> tuple[str, str]:
    """The state and the reason of `inspect`; all others agree, also without a log."""
    found = json.loads(laboratory.run("inspect", run_dir, "--json").well())
    state, reason = found["state"], found["reason"]
    log = run_dir / "log.txt"
    log.rename(aside := run_dir / "aside.txt")
    try:
        how = WatchedRun("id", run_dir, "run", Cache(run_dir.with_suffix(".cache"))).condition()
        assert how.state == stretto.open_run(run_dir).state == state
        assert how.reason.startswith(reason.partition(";")[0])
        assert (read_outcome(run_dir, steps_done(run_dir), 1, "") is not None) is (state == "finished")
    finally:
        aside.rename(log)
    return state, reason


def checkpointed(run_dir: Path) -> int:
    """The step of the last checkpoint; 0 if there is none."""
    checkpoint = Checkpoints(run_dir / "checkpoints").latest()
    return checkpoint.step if checkpoint is not None else 0


def test_every_reader_says_how_a_run_ended_and_it_is_resumed_after_each(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *ENDLESS) as command:
        wait_for_step(command, 3)
        assert stretto.open_run(run_dir).state == "running"
        os.kill(command.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: not command.processes(), "the end of all roles")
        assert time.monotonic() - killed < 5
        command.process.wait(10)
        before = last_step(run_dir / "ledger.sqlite")
        assert before >= 3
        assert checkpointed(run_dir) == 0
        state, reason = states(laboratory, run_dir)
        assert (state, reason.partition(";")[0]) == ("dead", "its process is gone without a word")
        # The folder of the sockets; what is in shared memory goes as soon as any other run begins.
        assert list(command.temporary.iterdir()) != []

        shutil.rmtree(run_dir / "policy" / f"v{before:06d}", ignore_errors=True)  # as if killed between these two
        (run_dir / "policy" / f".v{before:06d}.4711.partial").mkdir()
        with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger, ledger:  # as if killed before this record
            ledger.execute("UPDATE steps SET published_version = NULL WHERE step = ?", (before,))
        with laboratory.train(run_dir, *ENDLESS, "--resume") as resumed:
            wait_for_step(resumed, steps_done(run_dir) + 1)
            assert stretto.open_run(run_dir).state == "running"
            another = laboratory.run("train", TINY, "--run-dir", run_dir)
            another.refused(f"{run_dir}: is in use by process {resumed.process.pid}", "choose another folder")
            resumed.stopped(signal.SIGTERM)
        command.assert_nothing_is_left()
    assert not (run_dir / ".sockets").exists()
    assert states(laboratory, run_dir) == ("stopped", "stopped by SIGTERM")
    assert checkpointed(run_dir) == assert_the_law(run_dir).steps

    with laboratory.train(run_dir, *ENDLESS, "deadlines.trainer_restarts=0", "--resume") as command:
        wait_for_step(command, steps_done(run_dir) + 1)
        os.kill(command.role("trainer"), signal.SIGKILL)
        command.end(30).failed("trainer was killed by SIGKILL", "logs/trainer.txt")
        command.assert_nothing_is_left()
    assert "failed: trainer was killed by SIGKILL" in said(run_dir)
    assert_the_law(run_dir)
    state, reason = states(laboratory, run_dir)
    assert (state, reason.startswith("trainer was killed by SIGKILL")) == ("dead", True)

    last = steps_done(run_dir) + 1
    laboratory.trained(run_dir, f"trainer.steps={last}", *ENDLESS[1:], "--resume")
    assert states(laboratory, run_dir) == ("finished", "")
    found = assert_the_law(run_dir)
    assert (found.steps, found.trajectories.failed) == (last, 0)
    assert sorted(path.name for path in (run_dir / "policy").iterdir()) == [f"v{at:06d}" for at in range(last + 1)]
    assert not list((run_dir / "checkpoints").glob(".*"))
    shown = [json.loads(row) for row in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert shown
    assert all(sample["prompt"] and sample["answer"] for sample in shown)
    trained = [one["trained_step"] for one in exported(laboratory, run_dir) if one["state"] == "trained"]
    assert sorted(trained) == [step for step in range(1, last + 1) for _ in range(2 * 4)]
