"""Promises: a mirror has what the server has, to the bit, and engines read it as if the trainer had published it there;
what is cut, flipped, not the version asked for or gone is never switched in; a broken transfer goes on where it broke
off, over a restart of the server too; no wait is without end; nothing is left of what failed; of the mirrors of one
machine one alone pulls."""

import asyncio
import errno
import resource
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from stretto.core.errors import DeadlineExceeded, SourceLost, TornPublication, WireError
from stretto.weights.folder import SHARED, path_of
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_cluster.scratch import neighbours
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.weights.server import bound
from tests.asynchronous import until
from tests.cluster.weights.serving import (
    KEY,
    Road,
    assert_loads,
    flipping,
    free_address,
    lying,
    mirror,
    names,
    role,
    serving,
    slowly,
    tensors,
)


async def test_what_is_pulled_was_published_and_the_newest_two_are_kept(source: str, home: Path, away: Path) -> None:
    ours = mirror(source, away)
    for version in (6, 7):
        pulled = await ours.pull(version)
        assert (pulled.version, pulled.delta) == (version, False)
        assert pulled.bytes == path_of("run", home, version).stat().st_size
    SharedMemoryPublisher("run", home).publish(8, tensors(8.0).items())
    await ours.pull(8)
    assert names(away) == [f"stretto-run-v{end}" for end in (".spare", "000007.weights", "000008.weights")]
    assert path_of("run", away, 8).read_bytes() == path_of("run", home, 8).read_bytes()
    assert SharedMemorySubscriber("run", away).newest() == 8
    assert_loads(away, 7, 7.0)
    assert_loads(away, 8, 8.0)


async def test_a_duplicate_pull_moves_no_bytes_and_a_late_one_of_an_older_version_changes_no_newer_one(
    source: str, away: Path
) -> None:
    ours = mirror(source, away)
    first, second, again = await asyncio.gather(ours.pull(7), ours.pull(6), ours.pull(7))
    assert first.bytes == second.bytes > 0
    assert again.bytes == 0
    assert SharedMemorySubscriber("run", away).newest() == 7
    assert_loads(away, 6, 6.0)
    assert_loads(away, 7, 7.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")
async def test_a_version_is_pulled_into_the_file_of_an_old_one_that_nobody_reads(source: str, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        ours, files = Mirror(source, KEY, "run", Path(folder), delta="never"), []
        for version in range(8, 13):
            SharedMemoryPublisher("run", home).publish(version, tensors(float(version)).items())
            await ours.pull(version)
            files.append(path_of("run", Path(folder), version).stat().st_ino)
            assert_loads(Path(folder), version, float(version))
    assert files[3:] == files[:2]


async def test_mirrors_of_one_machine_pull_a_version_and_the_model_once(source: str, tmp_path: Path) -> None:
    """Whoever comes first: the others link its files, which last when it ends. A file of the same version with other
    bytes is not taken for it."""
    folders = [tmp_path / "machine" / f"agent-{number}" for number in range(4)]

    mirrors = [mirror(source, folder, beside=partial(neighbours, folder)) for folder in folders]
    models = [folder / "model" for folder in folders]
    await asyncio.gather(*(one.fetch_model(own, lambda: models) for one, own in zip(mirrors, models, strict=True)))
    newer = [pulled.bytes for pulled in await asyncio.gather(*(one.pull(7) for one in mirrors))]
    shutil.copytree(folders[0], folders[0].with_name("agent-9"))
    path_of("run", folders[0].with_name("agent-9"), 6).write_bytes(b"torn")
    older = (await mirrors[1].pull(6)).bytes
    assert sorted(newer)[:3] == [0, 0, 0]
    assert sum(newer) > 0
    assert older > 0, "what another has is not whole"
    for name in ("model/model.safetensors", path_of("run", folders[0], 7).name):
        assert len({(folder / name).stat().st_ino for folder in folders}) == 1
    shutil.rmtree(folders[0])
    assert_loads(folders[1], 7, 7.0)
    assert_loads(folders[1], 6, 6.0)
    assert list((tmp_path / "machine").glob("stretto-*")) == [], "no lock is left"


async def test_a_reference_policy_is_fetched_like_the_model(home: Path, model: Path, away: Path) -> None:
    """Into a folder of its own; a run without one has none."""
    reference = home.parent / "elsewhere"
    reference.mkdir()
    (reference / "config.json").write_text('{"layers": 9}')
    with serving(home, model, reference=reference) as source:
        await mirror(source, away).fetch_model(away / "reference", kind="reference")
        await mirror(source, away).fetch_model(away / "model")
    assert names(away / "reference") == ["config.json"]
    assert (away / "reference" / "config.json").read_text() == '{"layers": 9}'
    assert names(away / "model") == names(model)
    with serving(home, model) as source, pytest.raises(WireError, match="nothing is at /reference"):
        await mirror(source, away).fetch_model(away / "second", kind="reference")


async def test_the_same_number_with_other_bytes_travels_again_and_an_abandoned_past_is_forgotten(
    source: str, home: Path, away: Path
) -> None:
    """A run is resumed before version 6, and publishes another version 6."""
    ours = mirror(source, away)
    await ours.pull(6)
    await ours.pull(7)
    SharedMemoryPublisher("run", home).publish(6, tensors(60.0).items())
    await mirror(source, away).pull(6)
    assert names(away) == ["stretto-run-v000006.weights"]
    assert_loads(away, 6, 60.0)


async def test_a_version_that_is_gone_is_named_with_the_newest_there(source: str, away: Path) -> None:
    with pytest.raises(WireError, match="version 3 is not published; the newest there is 7"):
        await mirror(source, away).pull(3)
    assert names(away) == []


async def test_a_server_that_says_nothing_is_new_where_nothing_is_here_is_not_believed(away: Path) -> None:
    said = b"HTTP/1.1 304 Not Modified\r\nstretto-run: run\r\nstretto-newest: 7\r\n\r\n"
    async with lying(said) as address:
        with pytest.raises(WireError, match="and nothing is here"):
            await mirror(address, away).pull(7)
    assert names(away) == []


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 500 Sorry\r\nstretto-run: run\r\ncontent-length: 0\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
        b"",
    ],
)
async def test_a_server_that_says_nonsense_is_an_error_and_leaves_nothing(said: bytes, away: Path) -> None:
    async with lying(said) as address:
        with pytest.raises((WireError, SourceLost)):
            await mirror(address, away, patience=0.3).pull(7)
    assert names(away) == []


async def test_another_version_under_this_number_is_never_switched_in(source: str, home: Path, away: Path) -> None:
    path_of("run", home, 6).rename(path_of("run", home, 7))
    with pytest.raises(TornPublication, match="version 6 was found in place of version 7"):
        await mirror(source, away).pull(7)
    assert names(away) == []


async def test_a_flipped_bit_on_the_road_is_found(source: str, away: Path) -> None:
    road = Road(source, flipping(300_000))
    async with road.opened():
        with pytest.raises(TornPublication, match=r"the checksum of \w+ does not fit"):
            await mirror(road.address, away).pull(7)
    assert names(away) == []


async def test_a_transfer_that_is_cut_goes_on_where_it_broke_off(source: str, home: Path, away: Path) -> None:
    def cut(number: int, place: int, piece: bytes) -> bytes | None:
        if number > 4:
            return piece
        return piece[: 200_000 - place] if place < 200_000 else None

    road = Road(source, cut)
    async with road.opened():
        pulled = await mirror(road.address, away).pull(7)
    size = path_of("run", home, 7).stat().st_size
    assert road.connections == 5
    assert pulled.bytes == size
    assert road.passed < size + 5 * 1000  # the heads of five replies
    assert_loads(away, 7, 7.0)


async def test_a_version_that_changes_while_it_travels_is_pulled_anew(source: str, home: Path, away: Path) -> None:
    def change(number: int, place: int, piece: bytes) -> bytes | None:
        if number == 1 and place > 500_000:
            SharedMemoryPublisher("run", home).publish(7, tensors(70.0).items())
            return None
        return piece

    async with Road(source, change).opened() as road:
        await mirror(road.address, away).pull(7)
    assert_loads(away, 7, 70.0)


async def test_a_server_that_is_killed_in_mid_transfer_and_started_again_costs_a_moment(
    home: Path, model: Path, away: Path
) -> None:
    address = free_address()
    road = Road(
        address, lambda number, place, piece: slowly(number, place, piece) if number == 1 else piece, piece=1 << 14
    )

    async with road.opened():
        with role(home, model, address) as first:
            task = asyncio.create_task(mirror(road.address, away, patience=20.0).pull(7))
            await until(lambda: road.passed >= 200_000)
            first.kill()
            first.wait(timeout=20)
        with role(home, model, address):
            assert (await task).bytes == path_of("run", home, 7).stat().st_size  # no byte twice
    assert_loads(away, 7, 7.0)


async def test_a_server_that_is_not_there_yet_is_waited_for(home: Path, model: Path, away: Path) -> None:
    address = free_address()
    task = asyncio.create_task(mirror(address, away, patience=8.0).pull(7))
    await asyncio.sleep(0.3)
    with serving(home, model, port=int(address.rpartition(":")[2])):
        await task
    assert_loads(away, 7, 7.0)


async def test_a_server_that_does_not_come_back_is_lost_with_its_name(away: Path) -> None:
    with bound("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        SourceLost, match=rf"{address} cannot be reached \(Connection refused\); nothing came for 0.3 s"
    ):
        await mirror(address, away, patience=0.3).pull(7)
    assert names(away) == []


async def test_a_server_that_accepts_and_says_nothing_is_lost(away: Path) -> None:
    with bound("127.0.0.1", 0) as silent, pytest.raises(SourceLost, match="timed out"):
        await mirror(f"127.0.0.1:{silent.getsockname()[1]}", away, patience=0.4).pull(7)
    assert names(away) == []


async def test_a_pull_that_takes_several_times_its_deadline_and_goes_on_is_waited_for(source: str, away: Path) -> None:
    road = Road(source, slowly, piece=1 << 14)
    async with road.opened():
        start = time.monotonic()
        await mirror(road.address, away, seconds=0.3).pull(7)
        assert time.monotonic() - start > 1
    assert road.connections == 1
    assert_loads(away, 7, 7.0)


async def test_a_pull_that_stands_still_meets_the_deadline_and_switches_nothing(source: str, away: Path) -> None:
    async def stops(number: int, place: int, piece: bytes) -> bytes:
        await asyncio.sleep(0.8 * (place > 100_000))
        return piece

    async with Road(source, stops, piece=4096).opened() as road:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"the mirror waited 0.2 s for version 7 from"):
            await mirror(road.address, away, patience=60.0, seconds=0.2).pull(7)
        assert time.monotonic() - start < 10
    assert names(away) == []


async def test_a_pull_that_is_cancelled_leaves_nothing_and_the_next_one_works(source: str, away: Path) -> None:
    road = Road(source, lambda number, place, piece: slowly(number, place, piece) if number == 1 else piece, piece=4096)

    async with road.opened():
        ours = mirror(road.address, away)
        first = asyncio.create_task(ours.pull(7))
        await until(lambda: road.passed >= 20_000)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert names(away) == []
        await ours.pull(7)
    assert_loads(away, 7, 7.0)


async def test_a_mailbox_that_somebody_has_removed_is_told_with_its_path(source: str, away: Path) -> None:
    """As one that cleans up temporary folders."""
    ours = mirror(source, away)
    away.rmdir()
    with pytest.raises(FileNotFoundError, match=str(away)):
        await ours.pull(7)


async def test_a_full_disk_is_told_with_its_path_and_leaves_nothing(source: str, away: Path) -> None:
    ours = mirror(source, away)
    await ours.pull(6)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            await ours.pull(7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert str(refused.value.filename).startswith(str(away))
    assert names(away) == ["stretto-run-v000006.weights"]
