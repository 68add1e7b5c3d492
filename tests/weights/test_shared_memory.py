"""Promises: what is published is what is loaded, to the bit; a publication that is cut, flipped, of another version or
half-written is never loaded; the newest two are kept; nothing is left behind, not by a killed publisher either: the
next run, of whichever folder, removes what belongs to nobody.
"""

import errno
import itertools
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from stretto.core.errors import TornPublication, WireError
from stretto.weights import manifest
from stretto.weights.folder import own, remove, remove_abandoned, shared_folder
from stretto.weights.mailbox import sums
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_cluster.ranks.rank import GatheringPublisher

FORKED = multiprocessing.get_context("fork")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    random = {f"w{i}": (torch.randn(3, 5 + i, generator=generator) * scale).to(d) for i, d in enumerate(DTYPES)}
    return random | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "view": torch.arange(12.0).view(3, 4).t()}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[SharedMemoryPublisher]:
    publisher = SharedMemoryPublisher("run", tmp_path)
    yield publisher
    remove("run", tmp_path)
    assert list(tmp_path.glob("stretto-*")) == []


@pytest.fixture
def subscriber(tmp_path: Path) -> SharedMemorySubscriber:
    return SharedMemorySubscriber("run", tmp_path)


def file_of(folder: Path, version: int) -> Path:
    return folder / f"stretto-run-v{version:06d}.weights"


def own_and_die(folder: Path) -> None:
    own("dead", folder)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_dead_run_has_left_is_removed_and_what_a_living_one_has_stays(
    publisher: SharedMemoryPublisher, tmp_path: Path
) -> None:
    held = own("run", tmp_path)
    publisher.publish(1, [])
    child = FORKED.Process(target=own_and_die, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    SharedMemoryPublisher("dead", tmp_path).publish(3, [])
    SharedMemoryPublisher("nobody.knows", tmp_path).publish(3, [])
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "stretto-nobody.knows-v000003.weights",
        "stretto-run-v000001.weights",
        "stretto-run-vowned",
    ]
    os.close(held)
    remove("nobody.knows", tmp_path)


def test_a_pipe_of_somebody_in_the_place_of_a_lock_holds_no_run_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stretto-theirs-vowned")
    child = FORKED.Process(target=remove_abandoned, args=(tmp_path,))
    child.start()
    child.join(10)
    ended = child.exitcode
    child.kill()
    assert ended == 0


def test_tensors_are_gathered_one_by_one(publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber) -> None:
    """Only the one before is still there when one is gathered; an onlooker is there at each of them, in order."""
    made: list[weakref.ref[Tensor]] = []
    names: list[str] = []

    def twice(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        assert all(ref() is None for ref in made[:-1])
        names.append(name)
        whole = tensor * 2
        made.append(weakref.ref(whole))
        return whole

    parts = {"a": torch.arange(6.0), "b": torch.ones(700, 700), "c": torch.arange(4), "d": torch.ones(2)}
    publisher.publish(0, parts.items(), twice)
    assert {name: tensor.tolist() for name, tensor in subscriber.load(0).items()} == {
        name: (tensor * 2).tolist() for name, tensor in parts.items()
    }
    GatheringPublisher().copy(0, parts.items(), twice)
    assert names == [*parts, *parts]


def test_what_is_published_is_loaded(publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber) -> None:
    assert subscriber.newest() is None
    publisher.publish(0, tensors().items())
    assert subscriber.newest() == 0
    loaded = subscriber.load(0)
    assert list(loaded) == list(tensors())
    for name, tensor in tensors().items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name], tensor)


def test_numbers_are_rounded_to_the_dtype_of_the_publisher_and_whole_ones_stay(tmp_path: Path) -> None:
    """1 + 2**-9 lies halfway between two neighbours in bfloat16, and goes to the even one."""
    published = {"w": torch.tensor([1 + 2**-9, 3.0]), "i": torch.tensor([5, 1 << 40]), "h": torch.ones(2).half()}
    SharedMemoryPublisher("run", tmp_path, torch.bfloat16).publish(0, published.items())
    loaded = SharedMemorySubscriber("run", tmp_path).load(0)
    assert loaded["w"].tolist() == [1.0, 3.0]
    assert [loaded[name].dtype for name in published] == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert loaded["i"].tolist() == [5, 1 << 40]
    remove("run", tmp_path)


def test_a_publication_is_a_file_of_safetensors(publisher: SharedMemoryPublisher, tmp_path: Path) -> None:
    publisher.publish(7, tensors().items())
    with safe_open(file_of(tmp_path, 7), "pt") as file:
        assert file.metadata()["version"] == "7"
        assert set(file.keys()) == set(tensors())
        for name, tensor in tensors().items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_tied_parameters_travel_once(publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    publisher.publish(0, model.named_parameters())
    assert list(subscriber.load(0)) == ["embed.weight"]


def test_the_newest_two_are_kept_and_a_loaded_one_outlives_its_file(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(1, tensors().items())
    held = subscriber.load(1)
    for version in (2, 3, 4):
        publisher.publish(version, tensors(scale=9.0).items())
    assert sorted(path.name for path in tmp_path.glob("*.weights")) == [file_of(tmp_path, v).name for v in (3, 4)]
    assert subscriber.newest() == 4
    assert torch.equal(held["w0"], tensors()["w0"])
    with pytest.raises(WireError, match="version 1 is not published; the newest there is 4"):
        subscriber.load(1)


def test_a_resumed_publisher_makes_its_version_the_newest(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    for version in (8, 9):
        publisher.publish(version, tensors().items())
    SharedMemoryPublisher("run", tmp_path).publish(5, tensors(scale=2.0).items())
    assert subscriber.newest() == 5
    assert torch.equal(subscriber.load(5)["w0"], tensors(scale=2.0)["w0"])


def test_writing_into_a_loaded_tensor_changes_nobody_elses(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber
) -> None:
    publisher.publish(0, tensors().items())
    subscriber.load(0)["w0"].zero_()
    assert torch.equal(subscriber.load(0)["w0"], tensors()["w0"])


def test_a_publication_cut_at_any_64th_byte_is_never_loaded(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(0, tensors().items())
    whole = file_of(tmp_path, 0).read_bytes()
    for cut in (*range(0, len(whole), 64), len(whole) - 1):
        file_of(tmp_path, 0).write_bytes(whole[:cut])
        with pytest.raises(TornPublication):
            subscriber.load(0)


def test_a_publication_with_bytes_after_its_end_is_never_loaded(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(0, tensors().items())
    with file_of(tmp_path, 0).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(TornPublication, match="its manifest says"):
        subscriber.load(0)


def image(folder: Path) -> bytes:
    """A publication's bytes."""
    SharedMemoryPublisher("run", folder).publish(3, tensors().items())
    return file_of(folder, 3).read_bytes()


with tempfile.TemporaryDirectory() as folder:
    IMAGE = image(Path(folder))


def test_every_byte_flipped_in_turn_is_found() -> None:
    assert manifest.verify(memoryview(IMAGE), 3)[0].version == 3
    for position in range(len(IMAGE)):
        damaged = bytearray(IMAGE)
        damaged[position] ^= 0x10
        with pytest.raises(TornPublication):
            manifest.verify(memoryview(damaged), 3)


def test_another_version_under_this_name_is_never_loaded(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(4, tensors().items())
    file_of(tmp_path, 4).rename(file_of(tmp_path, 6))
    with pytest.raises(TornPublication, match="version 4 was found in place of version 6"):
        subscriber.load(6)


def test_a_dtype_that_cannot_travel_is_refused_and_leaves_nothing(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"odd: torch\.complex64"):
        publisher.publish(0, [("odd", torch.zeros(2, dtype=torch.complex64))])
    assert subscriber.newest() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run", ["", "a/b", "a-v1", "*"])
def test_a_run_whose_name_could_meet_another_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run is named by"):
        SharedMemoryPublisher(run, tmp_path)


def test_a_negative_version_is_refused(publisher: SharedMemoryPublisher) -> None:
    with pytest.raises(ValueError, match="start at 0"):
        publisher.publish(-1, tensors().items())


def test_removing_a_run_leaves_other_runs_alone(tmp_path: Path) -> None:
    for run in ("a", "ab"):
        SharedMemoryPublisher(run, tmp_path).publish(0, tensors().items())
    (tmp_path / "stretto-a-v000007.99.partial").touch()
    assert remove("a", tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["stretto-ab-v000000.weights"]
    remove("ab", tmp_path)


def test_no_room_for_a_publication_is_told_with_its_path_and_leaves_nothing(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(0, tensors().items())
    partial = tmp_path / f"stretto-run-v000001.{os.getpid()}.partial"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            publisher.publish(1, [("large", torch.zeros(1 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(partial))
    assert subscriber.newest() == 0
    assert list(tmp_path.iterdir()) == [file_of(tmp_path, 0)]


def test_a_file_that_somebody_put_in_the_way_is_not_written_through(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    """The name can be guessed, and shared memory is a folder that everybody may write to."""
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / f"stretto-run-v000001.{os.getpid()}.partial").symlink_to(theirs)
    publisher.publish(1, tensors().items())
    assert theirs.read_text() == "kept"
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert torch.equal(subscriber.load(1)["w0"], tensors()["w0"])


def test_a_version_of_another_user_is_not_loaded_from_a_folder_of_everybody(
    publisher: SharedMemoryPublisher,
    subscriber: SharedMemorySubscriber,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.publish(7, tensors().items())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert subscriber.newest() == 7, "a folder of this user's alone, on a file system that knows no owners, say"
    tmp_path.chmod(0o1777)
    assert subscriber.newest() is None
    with pytest.raises(TornPublication, match=r"stretto-run-v000007\.weights belongs to another user"):
        subscriber.load(7)


def publish_as(user: int, folder: Path, told: Connection) -> None:
    os.setuid(user)
    for version in range(1, 6):
        SharedMemoryPublisher("run", folder).publish(version, tensors().items())
    told.send((SharedMemorySubscriber("run", folder).newest(), remove("run", folder)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_files_of_another_user_stay_and_hinder_nobody() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        theirs = [folder / f"stretto-run-v{end}" for end in ("000009.weights", "000002.7.partial", ".spare")]
        for path in theirs:
            path.write_text("kept")
        ours, told = FORKED.Pipe()
        process = FORKED.Process(target=publish_as, args=(65_534, folder, told))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert ours.recv()[0] == 5
        assert sorted(folder.iterdir()) == sorted(theirs)


def test_shared_memory_without_room_is_not_used(tmp_path: Path) -> None:
    assert shared_folder(needed=1 << 60, fallback=tmp_path) == tmp_path


def publish_for_ever(folder: Path, told: Connection) -> None:
    publisher = SharedMemoryPublisher("run", folder)
    for version in itertools.count():
        publisher.publish(version, [(f"w{i}", torch.full((1 << 20,), float(version))) for i in range(4)])
        told.send(version)


@pytest.mark.parametrize("delay", [0.004, *(pytest.param(delay, marks=pytest.mark.long) for delay in (0.0, 0.009))])
def test_a_publisher_killed_in_the_middle_leaves_only_whole_versions(tmp_path: Path, delay: float) -> None:
    near, far = FORKED.Pipe(duplex=False)
    child = FORKED.Process(target=publish_for_ever, args=(tmp_path, far))
    child.start()
    while near.recv() < 3:
        pass
    time.sleep(delay)
    child.kill()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    subscriber = SharedMemorySubscriber("run", tmp_path)
    newest = subscriber.newest()
    assert newest is not None
    assert newest >= 3
    for version in (newest - 1, newest):
        assert all(tensor.eq(version).all() for tensor in subscriber.load(version).values())
    successor = SharedMemoryPublisher("run", tmp_path)
    successor.publish(newest + 1, tensors().items())
    assert not list(tmp_path.glob("*.partial"))
    remove("run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_held_stays_until_another_version_is(
    publisher: SharedMemoryPublisher, subscriber: SharedMemorySubscriber, tmp_path: Path
) -> None:
    publisher.publish(1, tensors().items())
    held = subscriber.hold(1, "server")
    assert subscriber.hold(1, "server") == held  # there, and published still
    whole = held.read_bytes()
    for version in (2, 3):
        publisher.publish(version, tensors().items())
    for gone in (1, 9):
        with pytest.raises(WireError, match=f"version {gone} is not published"):
            subscriber.hold(gone, "server")
        assert held.read_bytes() == whole
    newer = subscriber.hold(3, "server")
    assert list(tmp_path.glob("*.held")) == [newer]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_a_view_are_those_of_its_copy(dtype: torch.dtype) -> None:
    whole = torch.arange(40).to(dtype)
    for first in range(9):
        for length in range(24, 32):
            view = whole[first : first + length]
            assert torch.equal(sums(view), sums(view.clone()))
