"""Promises: a large version comes in parts over several connections, to the bit, whatever part is cut or late; no byte
comes twice; one part that fails ends the others, and leaves nothing. Where the kernel does not splice, the same comes
by copies, as what is encrypted does (`test_server.py`)."""

import asyncio
import errno
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.core.errors import SourceLost, WireError
from stretto.weights.folder import path_of
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_cluster.weights.mirror import Pulled
from tests.cluster.weights.serving import Road, assert_loads, lying, mirror, names, tensors

PART = 1 << 16  # of about a megabyte


async def test_a_large_version_comes_over_several_connections(source: str, home: Path, away: Path) -> None:
    async with Road(source).opened() as road:
        pulled = await mirror(road.address, away, part_size=PART).pull(7)
    assert road.connections == 5  # the first part tells the size
    assert pulled.bytes == path_of("run", home, 7).stat().st_size
    assert path_of("run", away, 7).read_bytes() == path_of("run", home, 7).read_bytes()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), part=st.sampled_from([1, 1 << 12, PART, 1 << 19, 1 << 22]))
def test_parts_that_are_cut_anywhere_go_on_where_they_broke_off(
    seed: int, part: int, source: str, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dice = random.Random(seed)
    cuts = {number: dice.randrange(250, 400_000) for number in range(1, 12) if dice.random() < 0.7}

    def cut(number: int, place: int, piece: bytes) -> bytes | None:
        return piece if place + len(piece) <= cuts.get(number, sys.maxsize) else None

    away = tmp_path_factory.mktemp("away")

    async def pull() -> Pulled:
        async with Road(source, cut, piece=1 << 12).opened() as road:
            return await mirror(road.address, away, part_size=part).pull(7)

    assert asyncio.run(pull()).bytes == path_of("run", home, 7).stat().st_size
    assert path_of("run", away, 7).read_bytes() == path_of("run", home, 7).read_bytes()


async def test_a_version_that_changes_between_its_parts_is_pulled_anew(source: str, home: Path, away: Path) -> None:
    def change(number: int, place: int, piece: bytes) -> bytes | None:
        if number == 3 and place > 100_000:
            SharedMemoryPublisher("run", home).publish(7, tensors(70.0).items())
            return None
        return piece

    async with Road(source, change).opened() as road:
        await mirror(road.address, away, part_size=PART).pull(7)
    assert_loads(away, 7, 70.0)


async def test_a_part_that_is_lost_ends_the_pull_and_leaves_nothing(source: str, away: Path) -> None:
    def lose(number: int, place: int, piece: bytes) -> bytes | None:
        return piece if number == 1 else None

    async with Road(source, lose).opened() as road:
        with pytest.raises(SourceLost, match="nothing came for"):
            await mirror(road.address, away, patience=0.5, part_size=PART).pull(7)
    assert names(away) == []


async def test_parts_that_are_cancelled_leave_nothing_and_the_next_pull_works(source: str, away: Path) -> None:
    first = True

    def hang(number: int, place: int, piece: bytes) -> bytes | None:
        return piece if number == 1 or not first else b""  # the parts never come

    async with Road(source, hang).opened() as via:
        ours = mirror(via.address, away, patience=30.0, part_size=PART)
        task = asyncio.create_task(ours.pull(7))
        while ours.moved < PART:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names(away) == []
        first = False
        await ours.pull(7)
    assert_loads(away, 7, 7.0)


async def test_a_part_of_another_place_than_asked_for_is_refused(away: Path) -> None:
    said = b"HTTP/1.1 206 Partial\r\nstretto-run: run\r\ncontent-length: 5\r\ncontent-range: bytes 9-13/14\r\n\r\nhello"
    async with lying(said) as address:
        with pytest.raises(WireError, match="bytes 9 to 14 of 14 came for those from 0"):
            await mirror(address, away).pull(7)
    assert names(away) == []


@pytest.mark.skipif(sys.platform != "linux", reason="splice is of Linux")
async def test_a_disk_that_cannot_splice_gets_copies(source: str, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splice = os.splice

    def refused(src: int, dst: int, count: int, offset_dst: int | None = None) -> int:
        if offset_dst is not None:
            raise OSError(errno.EINVAL, "Invalid argument")
        return splice(src, dst, count)

    monkeypatch.setattr(os, "splice", refused)
    await mirror(source, away, part_size=PART).pull(7)
    assert_loads(away, 7, 7.0)
