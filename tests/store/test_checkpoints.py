"""Checkpoints.

Promises: a checkpoint is whole or absent; a flipped bit, a missing byte and a missing file, or one that cannot be read,
are found and named; the newest whole one is used and the broken ones are named; old ones go. Whatever happens to a
manifest, the checkpoint before it is used. All of this where folders cannot be renamed too, as on the mount of a bucket
of objects. Killed ones: `tests/faults/test_files.py`.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RunFolderError, StoreError
from stretto.store import lock
from stretto.store.checkpoints import Checkpoints, verify

FLIPS = [*(1 << bit for bit in range(8)), 0xFF]


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "state.pt").write_bytes(b"\x00" * 1000)


def newest(checkpoints: Checkpoints) -> tuple[int, tuple[str, ...]]:
    """The step of the newest whole one, and what is said of broken ones."""
    found = checkpoints.latest()
    assert found is not None
    return found.step, found.broken


def test_a_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "checkpoints").save(40, fill)
    assert path == tmp_path / "checkpoints" / "step-000040"
    manifest = verify(path)
    assert manifest.step == 40
    assert {name: seal.size for name, seal in manifest.files.items()} == {
        "model.safetensors": 5120,
        "optimizer/state.pt": 1000,
    }


def test_the_newest_are_kept_and_the_newest_is_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 15):
        checkpoints.save(step, fill)
    assert checkpoints.steps() == [10, 15]
    assert newest(checkpoints) == (15, ())


def test_a_link_that_leads_nowhere_is_not_taken_for_a_run_without_checkpoints(tmp_path: Path) -> None:
    """As while the disk that it leads to is not mounted; a resume would train from the start."""
    disk = tmp_path / "disk"
    (tmp_path / "checkpoints").symlink_to(disk)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(StoreError, match=f"checkpoints: is a link to {disk}, where no folder is"):
        checkpoints.latest()
    disk.mkdir()
    assert checkpoints.latest() is None
    assert checkpoints.save(5, fill).is_dir()
    assert checkpoints.steps() == [5]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, fill)
    path = checkpoints.save(5, lambda folder: (folder / "only").touch())
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "only"]
    assert [file.name for file in tmp_path.iterdir()] == ["step-000005"]


@given(broken=st.sets(st.sampled_from([3, 5, 7])), version=st.sampled_from([0, 3, 4, 6, 7, 9]))
def test_a_version_is_saved_beside_broken_newer_ones_and_never_beside_a_whole_newer_one(
    tmp_path_factory: pytest.TempPathFactory, broken: set[int], version: int
) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=3)
    for step in (3, 5, 7):
        path = checkpoints.save(step, fill)
        if step in broken:
            (path / "model.safetensors").write_bytes(b"torn")
    whole = [step for step in (3, 5, 7) if step > version and step not in broken]
    if whole:
        with pytest.raises(
            RunFolderError, match=f"holds version {whole[-1]}, and this trainer is at version {version}"
        ):
            checkpoints.continue_at(version)
        assert checkpoints.steps() == [3, 5, 7]
    else:
        checkpoints.continue_at(version)
        checkpoints.save(version, fill)
        assert verify(checkpoints.path(version)).step == version


@pytest.mark.parametrize("holder", ["nobody", "the caller", "a run", "another trainer"])
def test_a_version_moved_aside_comes_back_unless_another_process_may_be_saving(tmp_path: Path, holder: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(5, fill)
    path = checkpoints.path(5)
    path.rename(aside := path.with_name(f".{path.name}.old"))  # a kill, while version 5 was saved again
    shutil.copytree(aside, part := path.with_name(f".{path.name}.part"))
    place = {"a run": tmp_path, "another trainer": tmp_path / "checkpoints"}.get(holder)
    held = None if place is None else lock.acquire(place)
    checkpoints.take_back(locked=holder == "the caller")
    if held is None:
        assert verify(path).step == 5
        assert not part.exists()
    else:
        os.close(held)
        assert aside.exists()
        assert part.exists()
        assert checkpoints.steps() == []


def test_a_switch_that_fails_leaves_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, fill)

    def failing(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StoreError, match="cannot be written: Input/output error"):
        checkpoints.save(5, fill)
    assert verify(checkpoints.path(5)).step == 5


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, fill)

    def failing(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="step-000010: the checkpoint cannot be written: No space left on device"):
        checkpoints.save(10, failing)
    assert [file.name for file in tmp_path.iterdir()] == ["step-000005"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damage_is_found_named_and_stepped_over(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(5, fill)
    file = checkpoints.save(10, fill) / "model.safetensors"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[1234] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        os.truncate(file, 5119)
    elif damage == "remove":
        file.unlink()
    else:
        file = file.with_name("manifest.json")
        os.truncate(file, 20)
    with pytest.raises(StoreError) as found:
        verify(file.parent)
    assert str(found.value).startswith(f"{file}: ")
    assert newest(checkpoints) == (5, (str(found.value),))


@pytest.mark.parametrize("unreadable", ["file", "manifest"])
def test_a_disk_that_does_not_give_it_back_is_named_and_stepped_over(tmp_path: Path, unreadable: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(5, fill)
    path = checkpoints.save(10, lambda folder: (folder / "empty").touch())
    file = path / ("empty" if unreadable == "file" else "manifest.json")
    file.unlink()
    file.symlink_to("/proc/self/mem")  # as long as nothing, and to read it is an input/output error
    step, (told,) = newest(checkpoints)
    assert step == 5
    assert told.startswith(f"{file}: cannot be read: ")
    assert "Input/output error" in told


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of steps 5 and 10; of the latter, files whose names differ by one bit."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"), keep=3)
    checkpoints.save(5, fill)

    def twins(folder: Path) -> None:
        for name in ("shard-0", "shard-1"):
            (folder / name).write_bytes(name.encode())

    checkpoints.save(10, twins)
    return checkpoints


@given(st.data())
def test_any_damage_of_a_manifest_leads_to_the_older_checkpoint(two: Checkpoints, data: st.DataObject) -> None:
    manifest = two.path(10) / "manifest.json"
    whole = manifest.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from([whole[:at], *(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :] for flip in FLIPS)])
        | st.sampled_from([b"[]", b"null", b'{"step": "10", "files": {}}', b'{"step": 10, "files": [1]}'])
    )
    try:
        manifest.write_bytes(damaged)
        step, broken = newest(two)
    finally:
        manifest.write_bytes(whole)
    assert step == 5
    assert broken[0].startswith(f"{two.path(10)}")


def test_where_folders_cannot_be_renamed_files_are_copied_and_the_manifest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 15):
        checkpoints.save(step, fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]
    assert verify(checkpoints.path(15)).files.keys() == {"model.safetensors", "optimizer/state.pt"}
    (checkpoints.path(15) / "manifest.json").unlink()  # what a kill leaves
    step, broken = newest(checkpoints)
    assert (step, len(broken)) == (10, 1)
    checkpoints.set_aside_after(10)
    assert checkpoints.steps() == [10]


def test_a_disk_that_fails_to_rename_is_no_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StoreError, match="step-000005: the checkpoint cannot be written: Input/output error"):
        Checkpoints(tmp_path).save(5, fill)
    assert list(tmp_path.iterdir()) == []


def test_no_whole_checkpoint_is_an_error_with_every_reason(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 10):
        (checkpoints.save(step, fill) / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"(?s)no whole checkpoint.*step-000010.*step-000005"):
        checkpoints.latest()
