"""Promises: a mirror has what the server has, to the bit, and engines read it as if the trainer had published it there;
what is cut, flipped, of another run, under another key or gone is never switched in; a broken transfer goes on where it
broke off, over a restart of the server too; no wait is without end; nothing is left of what failed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

from stretto.core.errors import DeadlineExceeded, RefusedRequest, SourceLost, TornPublication, WireError
from stretto.weights.folder import path_of
from stretto.weights.mirror import Mirror
from stretto.weights.role import WeightsServerSpec
from stretto.weights.server import bound
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.weights.serving import KEY, Road, lying, serving, slowly

T = TypeVar("T")


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    """About 1 MB."""
    generator = torch.Generator().manual_seed(5)
    return {
        "a": torch.randn(300, 700, generator=generator) * scale,
        "b": (torch.randn(400, 200, generator=generator) * scale).bfloat16(),
        "none": torch.empty(0, 3),
    }


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The trainer's machine: versions 6 and 7, and a model folder."""
    publisher = SharedMemoryPublisher("run", tmp_path / "home")
    publisher.publish(6, tensors(6.0).items())
    publisher.publish(7, tensors(7.0).items())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model" / "model.safetensors").write_bytes(os.urandom(1 << 20))
    (tmp_path / "model" / "empty.txt").touch()
    return tmp_path / "home"


@pytest.fixture
def model(home: Path) -> Path:
    return home.parent / "model"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """The mailbox of the other machine."""
    return tmp_path / "away"


@pytest.fixture
def source(home: Path, model: Path) -> Iterator[str]:
    with serving(home, model) as address:
        yield address


def mirror(source: str, away: Path, key: str = KEY, patience: float = 3.0, seconds: float = 60.0) -> Mirror:
    return Mirror(source, key, "run", away, patience=patience, seconds=seconds)


def now(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_loads(away: Path, version: int, scale: float) -> None:
    loaded = SharedMemorySubscriber("run", away).load(version)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(scale).items())


def test_what_is_pulled_is_what_was_published_and_the_newest_two_are_kept(source: str, home: Path, away: Path) -> None:
    async def pulls() -> None:
        ours = mirror(source, away)
        for version in (6, 7):
            pulled = await ours.pull(version)
            assert (pulled.version, pulled.delta) == (version, False)
            assert pulled.bytes == path_of("run", home, version).stat().st_size
        SharedMemoryPublisher("run", home).publish(8, tensors(8.0).items())
        await ours.pull(8)

    now(pulls())
    assert names(away) == ["stretto-run-v000007.weights", "stretto-run-v000008.weights"]
    assert path_of("run", away, 8).read_bytes() == path_of("run", home, 8).read_bytes()
    assert SharedMemorySubscriber("run", away).newest() == 8
    assert_loads(away, 7, 7.0)
    assert_loads(away, 8, 8.0)


def test_a_duplicate_pull_moves_no_bytes_and_a_late_one_of_an_older_version_changes_no_newer_one(
    source: str, away: Path
) -> None:
    async def pulls() -> list[int]:
        ours = mirror(source, away)
        moved = await asyncio.gather(ours.pull(7), ours.pull(6), ours.pull(7))
        return [pulled.bytes for pulled in moved]

    first, second, again = now(pulls())
    assert first == second > 0
    assert again == 0
    assert SharedMemorySubscriber("run", away).newest() == 7
    assert_loads(away, 6, 6.0)
    assert_loads(away, 7, 7.0)


def test_the_same_number_with_other_bytes_travels_again_and_an_abandoned_past_is_forgotten(
    source: str, home: Path, away: Path
) -> None:
    """A run is resumed before version 6, and publishes another version 6."""
    ours = mirror(source, away)
    now(ours.pull(6))
    now(ours.pull(7))
    SharedMemoryPublisher("run", home).publish(6, tensors(60.0).items())
    now(mirror(source, away).pull(6))
    assert names(away) == ["stretto-run-v000006.weights"]
    assert_loads(away, 6, 60.0)


def test_a_version_that_is_gone_is_named_with_the_newest_there(source: str, away: Path) -> None:
    with pytest.raises(WireError, match="version 3 is not published; the newest there is 7"):
        now(mirror(source, away).pull(3))
    assert names(away) == []


def test_a_server_that_says_nothing_is_new_where_nothing_is_here_is_not_believed(away: Path) -> None:
    said = b"HTTP/1.1 304 Not Modified\r\nstretto-run: run\r\nstretto-newest: 7\r\n\r\n"
    with lying(said) as address, pytest.raises(WireError, match="and nothing is here"):
        now(mirror(address, away).pull(7))
    assert names(away) == []


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 206 Partial\r\nstretto-run: run\r\ncontent-length: 5\r\ncontent-range: bytes 9-13/14\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nstretto-run: run\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 500 Sorry\r\nstretto-run: run\r\ncontent-length: 0\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
        b"",
    ],
)
def test_a_server_that_says_nonsense_is_an_error_and_leaves_nothing(said: bytes, away: Path) -> None:
    with lying(said) as address, pytest.raises((WireError, SourceLost)):
        now(mirror(address, away, patience=0.3).pull(7))
    assert names(away) == []


def test_without_the_key_nothing_is_told(source: str, away: Path) -> None:
    with pytest.raises(RefusedRequest, match="key: refused by"):
        now(mirror(source, away, key="wrong").pull(7))
    with socket.create_connection(("127.0.0.1", int(source.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET /versions/7 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reply = raw.makefile("rb").read().lower()
    assert reply.startswith(b"http/1.1 401")
    assert b"stretto-newest" not in reply
    assert names(away) == []


def test_the_server_of_another_run_is_refused_by_both(home: Path, model: Path, away: Path) -> None:
    SharedMemoryPublisher("other", home).publish(7, tensors(1.0).items())
    with serving(home, model, run="other") as other, pytest.raises(WireError, match="serves run other, not run"):
        now(mirror(other, away).pull(7))
    assert names(away) == []


def test_another_version_under_this_number_is_never_switched_in(source: str, home: Path, away: Path) -> None:
    path_of("run", home, 6).rename(path_of("run", home, 7))
    with pytest.raises(TornPublication, match="version 6 was found in place of version 7"):
        now(mirror(source, away).pull(7))
    assert names(away) == []


def test_a_flipped_bit_on_the_road_is_found(source: str, away: Path) -> None:
    def flip(number: int, place: int, piece: bytes) -> bytes:
        if place <= 300_000 < place + len(piece):
            at = 300_000 - place
            return piece[:at] + bytes([piece[at] ^ 4]) + piece[at + 1 :]
        return piece

    with Road(source, flip).open() as road, pytest.raises(TornPublication, match=r"the checksum of \w+ does not fit"):
        now(mirror(road, away).pull(7))
    assert names(away) == []


def test_a_transfer_that_is_cut_goes_on_where_it_broke_off(source: str, home: Path, away: Path) -> None:
    road = Road(source, lambda number, place, piece: piece if number > 4 or place < 200_000 else None)
    with road.open() as address:
        pulled = now(mirror(address, away).pull(7))
    size = path_of("run", home, 7).stat().st_size
    assert road.connections == 5
    assert pulled.bytes == size
    assert road.passed < size + 5 * 1000  # the heads of five replies
    assert_loads(away, 7, 7.0)


def test_a_version_that_changes_while_it_travels_is_pulled_anew(source: str, home: Path, away: Path) -> None:
    def change(number: int, place: int, piece: bytes) -> bytes | None:
        if number == 1 and place > 500_000:
            SharedMemoryPublisher("run", home).publish(7, tensors(70.0).items())
            return None
        return piece

    with Road(source, change).open() as road:
        now(mirror(road, away).pull(7))
    assert_loads(away, 7, 70.0)


@contextmanager
def role(home: Path, model: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a weights server."""
    (home / "key").write_text(KEY + "\n")
    spec = WeightsServerSpec("run", str(home), str(model), address, str(home / "key"))
    process = subprocess.Popen([sys.executable, "-m", "stretto.weights.role", msgspec.json.encode(spec).decode()])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


def free_address() -> str:
    with bound("127.0.0.1", 0) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_server_that_is_killed_in_mid_transfer_and_started_again_costs_a_moment(
    home: Path, model: Path, away: Path
) -> None:
    address = free_address()
    road = Road(address, slowly, piece=1 << 14)

    async def pull(via: str) -> int:
        with role(home, model, address) as first:
            task = asyncio.create_task(mirror(via, away, patience=20.0).pull(7))
            while road.passed < 200_000:
                await asyncio.sleep(0.01)
            first.kill()
            first.wait(timeout=20)
        with role(home, model, address):
            return (await task).bytes

    with road.open() as via:
        assert now(pull(via)) == path_of("run", home, 7).stat().st_size  # no byte twice
    assert_loads(away, 7, 7.0)


def test_a_server_that_is_not_there_yet_is_waited_for(home: Path, model: Path, away: Path) -> None:
    address = free_address()

    async def late() -> None:
        task = asyncio.create_task(mirror(address, away, patience=8.0).pull(7))
        await asyncio.sleep(0.3)
        with serving(home, model, port=int(address.rpartition(":")[2])):
            await task

    now(late())
    assert_loads(away, 7, 7.0)


def test_a_server_that_does_not_come_back_is_lost_with_its_name(away: Path) -> None:
    with bound("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        SourceLost, match=rf"{address} cannot be reached \(Connection refused\); nothing came for 0.3 s"
    ):
        now(mirror(address, away, patience=0.3).pull(7))
    assert names(away) == []


def test_a_server_that_accepts_and_says_nothing_is_lost(away: Path) -> None:
    with bound("127.0.0.1", 0) as silent, pytest.raises(SourceLost, match="timed out"):
        now(mirror(f"127.0.0.1:{silent.getsockname()[1]}", away, patience=0.4).pull(7))
    assert names(away) == []


def test_a_slow_server_meets_the_deadline_and_switches_nothing(source: str, away: Path) -> None:
    with Road(source, slowly, piece=512).open() as road:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"the mirror waited 0.5 s for version 7 from"):
            now(mirror(road, away, seconds=0.5).pull(7))
        assert time.monotonic() - start < 10  # the whole would have taken half a minute
    assert names(away) == []


def test_a_pull_that_is_cancelled_leaves_nothing_and_the_next_one_works(source: str, away: Path) -> None:
    road = Road(source, lambda number, place, piece: slowly(number, place, piece) if number == 1 else piece, piece=4096)

    async def pulls(via: str) -> None:
        ours = mirror(via, away)
        first = asyncio.create_task(ours.pull(7))
        while road.passed < 20_000:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert names(away) == []
        await ours.pull(7)

    with road.open() as via:
        now(pulls(via))
    assert_loads(away, 7, 7.0)


def test_a_full_disk_is_told_with_its_path_and_leaves_nothing(source: str, away: Path) -> None:
    ours = mirror(source, away)
    now(ours.pull(6))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            now(ours.pull(7))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert str(refused.value.filename).startswith(str(away))
    assert names(away) == ["stretto-run-v000006.weights"]


def test_the_model_folder_comes_whole_and_a_second_time_at_no_cost(source: str, model: Path, tmp_path: Path) -> None:
    ours, folder = mirror(source, tmp_path / "away"), tmp_path / "policy"
    now(ours.fetch_model(folder))
    now(ours.fetch_model(folder))
    assert names(folder) == names(model)
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in names(model))
    (folder / "config.json").write_text("{}")
    with pytest.raises(WireError, match="is not the model folder of run run"):
        now(ours.fetch_model(folder))


def test_a_model_file_that_changed_on_the_road_is_found_and_the_folder_does_not_appear(
    source: str, tmp_path: Path
) -> None:
    def flip(number: int, place: int, piece: bytes) -> bytes:
        return piece if place + len(piece) < 700_000 else piece[:-1] + bytes([piece[-1] ^ 1])

    with Road(source, flip).open() as road, pytest.raises(TornPublication, match=r"model\.safetensors .* other bytes"):
        now(mirror(road, tmp_path / "away").fetch_model(tmp_path / "policy"))
    assert not (tmp_path / "policy").exists()
    now(mirror(source, tmp_path / "away").fetch_model(tmp_path / "policy"))
    assert not [name for name in names(tmp_path) if "partial" in name]


def test_a_file_name_that_leads_out_of_the_folder_is_refused(source: str, tmp_path: Path) -> None:
    """A server that lists a path; its reply has the length of the true one."""

    def lead(number: int, place: int, piece: bytes) -> bytes:
        return piece.replace(b"config.json", b"../conf.jsn")

    with Road(source, lead).open() as road, pytest.raises(WireError, match=r"'\.\./conf\.jsn', which is no name"):
        now(mirror(road, tmp_path / "away").fetch_model(tmp_path / "policy"))


def certificates(folder: Path, name: str) -> Path:
    """A folder as `cluster.tls` has it, with an authority of its own."""
    made = folder / name
    made.mkdir()
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(made / "key.pem"), "-out", str(made / "cert.pem"), "-subj", f"/CN={name}", "-days", "2"]
    subprocess.run([*openssl, *files], check=True, capture_output=True)
    (made / "ca.pem").write_bytes((made / "cert.pem").read_bytes())
    return made


def test_with_tls_only_members_of_one_authority_meet(home: Path, model: Path, away: Path, tmp_path: Path) -> None:
    ours, theirs = certificates(tmp_path, "ours"), certificates(tmp_path, "theirs")
    with serving(home, model, tls=ours) as address:
        now(Mirror(address, KEY, "run", away, ours).pull(7))
        assert_loads(away, 7, 7.0)
        with pytest.raises(WireError, match="self-signed certificate"):
            now(Mirror(address, KEY, "run", tmp_path / "b", theirs).pull(7))
        with pytest.raises(SourceLost):
            now(mirror(address, tmp_path / "b", patience=0.3).pull(7))
    assert names(tmp_path / "b") == []


def test_the_role_serves_until_it_is_ended(home: Path, model: Path, away: Path) -> None:
    address = free_address()
    with role(home, model, address) as process:
        now(mirror(address, away, patience=30.0).pull(7))
        process.terminate()
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)
    assert_loads(away, 7, 7.0)


def test_a_mirror_and_its_server_need_no_torch() -> None:
    code = "import sys, stretto.weights.mirror, stretto.weights.role; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
