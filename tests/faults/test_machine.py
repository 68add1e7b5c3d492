"""A machine that is poor or slow: a run goes on, slower, or ends with the name of what is missing.

- A disk on which every fsync takes a third of a second slows a run down, and that is all.
- Too few file descriptors, at whatever moment they run out: one message, no traceback, nothing is left behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_files import STRACE
from tests.launch.running import Laboratory, assert_the_law, said

SLOW_DISK: tuple[str, ...] = ("strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=fsync,fdatasync")
SLOW_DISK += ("-e", "inject=fsync,fdatasync:delay_exit=300000")


@STRACE
def test_a_slow_disk_loses_nothing_and_no_role(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    before = (*SLOW_DISK, "-o", str(calls))
    with laboratory.train(run_dir, "trainer.steps=6", "deadlines.hung=3", before=before) as command:
        ended = command.end()
        assert ended.code == 0, ended.err
        command.assert_nothing_is_left()
    assert "(DELAYED)" in calls.read_text(), "the disk was as quick as ever"
    assert_the_law(run_dir)
    assert "a new one is started" not in said(run_dir)


@pytest.mark.parametrize("descriptors", [8, 11, 14, 17, 20])
def test_too_few_file_descriptors_are_named(laboratory: Laboratory, tmp_path: Path, descriptors: int) -> None:
    limited = ("prlimit", f"--nofile={descriptors}")
    with laboratory.train(tmp_path / "run", before=limited) as command:
        ended = command.end()
        assert ended.code == 1, ended.out + ended.err
        ended.says("Too many open files")
        command.assert_nothing_is_left()
