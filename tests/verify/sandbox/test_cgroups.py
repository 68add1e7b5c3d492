"""Control groups, on folders that look like the kernel's.

Promises: both versions are found where the kernel says they are; the limits are written where they belong; a group that
cannot be made leaves nothing behind; groups whose maker is gone are removed.
"""

import os
import subprocess
from pathlib import Path

import pytest

from stretto_verify.sandbox.cgroups import Hierarchy, ProgramGroup, find_hierarchies


def proc(tmp_path: Path, groups: str, mounts: str) -> Path:
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mounts").write_text(mounts)
    return tmp_path


def test_version_1_is_found_below_our_own_groups_or_at_the_root_that_we_see(tmp_path: Path) -> None:
    (tmp_path / "memory" / "ours").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    mounts = f"cgroup {tmp_path}/memory cgroup rw,memory 0 0\ncgroup {tmp_path}/pids cgroup rw,pids 0 0\n"
    found = find_hierarchies(proc(tmp_path, "4:memory:/ours\n8:pids:/docker/abc\n", mounts))
    assert [hierarchy.folder for hierarchy in found] == [tmp_path / "memory" / "ours", tmp_path / "pids"]
    assert found[1].files == {"pids.max": "processes"}


def test_version_2_is_found_where_both_controllers_are_handed_down(tmp_path: Path) -> None:
    own = tmp_path / "v2" / "user.slice"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("cpu memory pids\n")
    [hierarchy] = find_hierarchies(proc(tmp_path, "0::/user.slice\n", f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"))
    assert hierarchy.folder == own
    assert set(hierarchy.files) == {"memory.max", "memory.swap.max", "pids.max"}
    (own / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(OSError, match="no control groups for memory and processes"):
        find_hierarchies(tmp_path)


def test_a_machine_without_control_groups_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no control groups"):
        find_hierarchies(proc(tmp_path, "", "tmpfs /tmp tmpfs rw 0 0\n"))


def test_a_group_that_cannot_be_limited_leaves_nothing(tmp_path: Path) -> None:
    """An ordinary folder has no file ``pids.max``, so the limit cannot be set."""
    with pytest.raises(FileNotFoundError):
        ProgramGroup.create(1 << 20, 4, [Hierarchy(tmp_path, {"pids.max": "processes"})])
    assert list(tmp_path.iterdir()) == []


def test_groups_whose_maker_is_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"stretto-{gone.pid}-0").mkdir()
    (tmp_path / f"stretto-{os.getpid()}-77").mkdir()
    (tmp_path / "stretto-of-somebody").mkdir()
    group = ProgramGroup.create(1 << 20, 4, [Hierarchy(tmp_path, {})])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert f"stretto-{os.getpid()}-77" in names
    group.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"stretto-{os.getpid()}-77", "stretto-of-somebody"]
