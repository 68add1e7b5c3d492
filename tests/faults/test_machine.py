"""A machine that is poor or slow: a run goes on, slower, or ends with the name of what is missing.

- A disk on which every fsync takes a third of a second slows a run down, and that is all.
- A disk that fills during a checkpoint, the one with the logs, ends the run at once, with the path, what is free there
  and what to do; once there is room a resume goes on, and what was committed is there.
- Too few file descriptors are refused before anything starts, with both numbers; if they run out in mid-run there is
  one message, no traceback, and nothing is left behind.
"""

import os
import re
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.test_files import STRACE
from tests.launch.running import Laboratory, assert_the_law, said, steps_done, wait_for_step, wait_until


def fill(file: Path, leave: int) -> None:
    """Fill the disk of `file` but for `leave` bytes. A run that writes meanwhile may take them first."""
    with file.open("wb", buffering=0) as filler, suppress(OSError):
        while (free := shutil.disk_usage(file.parent).free) > leave:
            filler.write(bytes(min(free - leave, 1 << 18)))


@pytest.mark.long
@STRACE
def test_a_slow_disk_loses_nothing_and_no_role(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    poor = ("slow_disk", str(calls))
    with laboratory.train(run_dir, "trainer.steps=3", "deadlines.hung=3", poor=poor) as command:
        command.end().well()
        command.assert_nothing_is_left()
    assert "(DELAYED)" in calls.read_text(), "the disk was as quick as ever"
    assert_the_law(run_dir)
    assert "a new one is started" not in said(run_dir)


#: As `tests.launch.poverty.small_disk`.
SMALL_DISK = ("unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"')


def small_disk_works(tmp_path: Path) -> bool:
    return subprocess.run([*SMALL_DISK, str(tmp_path), "true"], check=False, capture_output=True).returncode == 0


def test_a_disk_that_fills_during_a_checkpoint_ends_the_run_at_once_and_a_resume_goes_on(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    if not small_disk_works(tmp_path):
        pytest.skip("no disk can be mounted here: not tested")
    settings = ("trainer.steps=100000", "trainer.checkpoint_every=4", "trainer.keep_versions=1")
    larger = ("model.build.hidden_size=128", "model.build.intermediate_size=256")  # a checkpoint of 2 MB
    poor = ("small_disk", str(tmp_path))
    with laboratory.train(tmp_path / "run", *settings, *larger, poor=poor) as command:
        disk = Path(f"/proc/{command.process.pid}/root{tmp_path}")
        wait_until(lambda: steps_done(disk / "run") >= 2, "step 2", command)
        kept = os.open(disk / "run", os.O_PATH)  # the disk stays when its process is gone
        fill(disk / "filler", leave=1 << 20)
        ended = command.end()
        ended.failed(str(tmp_path / "run"))  # the checkpoint, or the ledger if it was the first to find no room
        assert "No space left on device" in ended.err or "disk is full" in ended.err
        advice = rf"; of the disk of {tmp_path}/run\S* \d\.\d MiB are free: make room there, and go on with `stretto "
        assert re.search(rf"{advice}train --resume {tmp_path}/run`\n$", ended.err), ended.err
        command.assert_nothing_is_left()
    moved = tmp_path / "run"
    shutil.copytree(f"/proc/self/fd/{kept}", moved)  # to where there is room
    os.close(kept)
    done = steps_done(moved)
    assert_the_law(moved)
    laboratory.run("train", moved, "--resume", f"trainer.steps={done + 2}").well()
    assert steps_done(moved) == done + 2


NEEDED = 32 + 6 + 4 + 2 + 8  # of the conductor, an engine, the trainer, a reward worker and 8 groups in flight


@pytest.mark.parametrize("descriptors", [8, NEEDED - 1])
def test_too_few_descriptors_are_refused_by_numbers(laboratory: Laboratory, tmp_path: Path, descriptors: int) -> None:
    """With an interpreter of its own where they are too few even for its imports."""
    before = ("prlimit", f"--nofile={descriptors}") if descriptors < NEEDED - 1 else ()
    poor = ("descriptors", str(descriptors))
    with laboratory.train(tmp_path / "run", before=before, poor=poor) as command:
        command.end().refused(f"file descriptors: {descriptors} may be open at once, and the run needs", "ulimit -n")
        command.assert_nothing_is_left()
    assert not (tmp_path / "run").exists()


def test_as_many_as_are_asked_for_suffice_and_file_descriptors_that_run_out_in_mid_run_are_named(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    """Another process of the user may take the limit down."""
    settings = ("trainer.steps=100000", "trainer.checkpoint_every=1", "evaluation.every=1")
    with laboratory.train(tmp_path / "run", *settings, poor=("descriptors", str(NEEDED))) as command:
        wait_for_step(command, 2)
        resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (20, 20))
        ended = command.end()
        assert ended.code == 1, ended.out + ended.err
        assert "Too many open files" in ended.err, ended.err
        assert "Traceback" not in ended.err, ended.err
        command.assert_nothing_is_left()
