"""Promises: a new version is written over an old file that nobody has open or mapped, and over no other; what is loaded
or held keeps its bytes; a shorter version has nothing of a longer one; a file that another user put in place of the
spare is not written."""

import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.processes.kernel import end_lease, take_lease
from stretto.weights.folder import SHARED, path_of
from stretto.weights.manifest import verify
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A mailbox in shared memory: temporary folders of a container may be on a file system without leases."""
    with tempfile.TemporaryDirectory(dir=SHARED) as place:
        yield Path(place)


def publish(folder: Path, version: int, size: int = 5000) -> int:
    """The file of the version, as its inode; all its numbers are the version's."""
    SharedMemoryPublisher("run", folder).publish(version, [("w", torch.full((size,), float(version)))])
    return path_of("run", folder, version).stat().st_ino


def loaded(folder: Path, version: int) -> list[float]:
    numbers: list[float] = SharedMemorySubscriber("run", folder).load(version)["w"].unique().tolist()
    return numbers


def test_the_third_version_after_one_has_its_file(folder: Path) -> None:
    files = [publish(folder, version) for version in range(7)]
    assert len(set(files)) == 3
    assert files[3:] == files[:4]
    assert [loaded(folder, version) for version in (5, 6)] == [[5.0], [6.0]]


def test_a_loaded_version_keeps_its_bytes_and_its_file_is_not_used_again(folder: Path) -> None:
    first = publish(folder, 0)
    kept = SharedMemorySubscriber("run", folder).load(0)["w"]
    assert first not in [publish(folder, version) for version in range(1, 5)]
    assert kept.unique().tolist() == [0.0]


def test_a_version_that_another_process_has_open_is_not_overwritten(folder: Path) -> None:
    first = publish(folder, 0)
    go, read = os.pipe(), os.pipe()
    file = os.open(path_of("run", folder, 0), os.O_RDONLY)
    child = os.fork()
    if not child:
        os.close(go[1])  # so that it ends with a failed test
        os.read(go[0], 1)
        os.write(read[1], os.pread(file, 1 << 20, 0))
        os._exit(0)
    os.close(file)
    later = [publish(folder, version) for version in range(1, 5)]
    os.close(go[1])
    os.waitpid(child, 0)
    assert first not in later
    verify(memoryview(os.read(read[0], 1 << 20)), 0)
    for end in (go[0], *read):
        os.close(end)


def test_a_version_that_is_held_is_not_overwritten(folder: Path) -> None:
    first = publish(folder, 0)
    held = SharedMemorySubscriber("run", folder).hold(0, "server")
    whole = held.read_bytes()
    assert first not in [publish(folder, version) for version in range(1, 5)]
    assert held.read_bytes() == whole


def test_a_shorter_version_has_nothing_of_the_longer_one_before(folder: Path) -> None:
    files = [publish(folder, version, size=5000 if version < 3 else 70) for version in range(4)]
    assert files[3] == files[0]
    assert path_of("run", folder, 3).stat().st_size < 1000
    assert loaded(folder, 3) == [3.0]


def test_a_link_in_place_of_the_spare_is_not_written_through(folder: Path) -> None:
    """Its name can be guessed, and shared memory is a folder that everybody may write to."""
    theirs = folder / "theirs"
    theirs.write_bytes(b"kept")
    for put in (Path.symlink_to, Path.hardlink_to):
        put(folder / "stretto-run-v.spare", theirs)
        publish(folder, 0)
        assert theirs.read_bytes() == b"kept"
        assert loaded(folder, 0) == [0.0]
        assert not (folder / "stretto-run-v.spare").exists()


def test_who_opens_a_leased_file_waits_until_its_end_and_the_owner_lives(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old")
    said, told = os.pipe()
    with path.open("r+b", buffering=0) as file:
        assert take_lease(path, file.fileno())
        child = os.fork()
        if not child:
            os.write(told, b"opens")
            os.write(told, path.read_bytes())
            os._exit(0)
        assert os.read(said, 8) == b"opens"
        time.sleep(0.2)
        assert not select.select([said], [], [], 0)[0]
        file.write(b"new")
        end_lease(file.fileno())
        os.waitpid(child, 0)
    assert os.read(said, 8) == b"new"
    os.close(said)
    os.close(told)
