"""Promises, with the package tensorboard: a run that is killed twice, and resumed after each, has each step and
each evaluation in TensorBoard once, in order; so has a tool whose process died between having points and noting it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.store import lock
from stretto.store.series.metrics import read_metrics, rewind_metrics
from stretto_report.outlets.role import MODULE
from tests.outlets.curves import curve
from tests.outlets.recorded import RecordedRun, evaluation, follow_to_the_end, step
from tests.store.make import ledger_at

KILLS, FURTHER_STEPS = 2, 10
_ENDLESS = 100_000
_PATIENCE = 100.0


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    made = RecordedRun(tmp_path / "run")
    with ledger_at(made.folder.ledger):
        return made


def training(run: RecordedRun, last: int = _ENDLESS) -> subprocess.Popen[bytes]:
    """The run in a process of its own, from its newest checkpoint on."""
    words = (sys.executable, "-m", "tests.outlets.killed_run", str(run.folder.path), str(last), "tensorboard")
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


def followers(run: RecordedRun) -> list[bytes]:
    """The command lines of the processes that follow a run."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes()
        except OSError:  # it has ended
            continue
        if MODULE.encode() in words and str(run.folder.path).encode() in words:
            found.append(words)
    return found


def test_a_run_that_is_killed_twice_has_each_step_once_and_in_order(run: RecordedRun) -> None:
    for _ in range(KILLS):
        with training(run) as process:
            before = run.sent()
            while run.sent() == before:
                time.sleep(0.01)
            process.kill()
        while followers(run):
            time.sleep(0.01)
        assert not lock.is_held(run.folder.path)
    last = len(read_metrics(run.folder.metrics)[0]) + FURTHER_STEPS
    with training(run, last) as process:
        assert process.wait(_PATIENCE) == 0
    assert curve(run, "reward") == curve(run, "trainer/loss") == [*range(1, last + 1)]
    assert curve(run, "evaluation/accuracy") == [*range(7, last - 2, 7)]  # each ends three steps later


def test_points_that_a_process_did_not_note_before_it_died_come_once(run: RecordedRun) -> None:
    """An evaluation that ends late is of an earlier step than the newest point."""
    run.steps(1, 12)
    run.append(evaluation(4))
    follow_to_the_end(run, "tensorboard")
    noted = (run.folder.outlets / "tensorboard.json").read_bytes()
    run.append(evaluation(8))
    run.steps(13, 15)
    follow_to_the_end(run, "tensorboard")
    newest = max((run.folder.path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with newest.open("ab") as file:
        file.write(newest.read_bytes()[:20])  # a record that is cut off
    (run.folder.outlets / "tensorboard.json").write_bytes(noted)
    rewind_metrics(run.folder.metrics, 14)  # the run has died too
    run.steps(15, 17, reward=0.75)
    for _ in range(2):
        follow_to_the_end(run, "tensorboard")
    assert curve(run, "reward") == [*range(1, 18)]
    assert curve(run, "evaluation/accuracy") == [4, 8]


def test_a_file_is_read_after_those_that_were_made_in_the_same_second(run: RecordedRun) -> None:
    folder = run.folder.path / "tensorboard"
    folder.mkdir()
    earlier = folder / f"events.out.tfevents.{int(time.time()):010d}.~"  # behind any name of a machine
    earlier.touch()
    run.metrics.append(step(1))
    follow_to_the_end(run, "tensorboard")
    (made,) = set(folder.iterdir()) - {earlier}
    assert made.name > earlier.name
    assert curve(run, "reward") == [1]
