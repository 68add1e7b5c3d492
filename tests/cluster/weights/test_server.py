"""Promises: without the key, the run's name or, with TLS, a certificate a weights server tells nothing; a model folder
comes whole, every file checked, or not at all; a file is open until a mirror has read all of it; the role serves until
it is ended, without torch."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from stretto.core.errors import RefusedRequest, SourceLost, TornPublication, WireError
from stretto.processes.kernel import take_lease
from stretto.weights.folder import path_of
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.weights.wire import FORM, RUN, digest_of
from tests.certificates import authority
from tests.cluster.weights.serving import (
    KEY,
    Road,
    assert_loads,
    flipping,
    free_address,
    mirror,
    names,
    role,
    serving,
    tensors,
)


def slowly_read(path: Path, read: Callable[[int], object] = lambda size: None) -> str:
    """A disk from which each file takes half a second."""
    for _ in range(10):
        time.sleep(0.05)
        read(1)
    return digest_of(path)


async def test_a_model_that_takes_long_to_read_is_waited_for_on_both_sides(
    source: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files: 1.5 s before the server has their list, and again until the mirror has checked each."""
    monkeypatch.setattr("stretto_cluster.weights.server._LIST_SECONDS", 0.1, raising=False)
    for side in ("server", "mirror"):
        monkeypatch.setattr(f"stretto_cluster.weights.{side}.digest_of", slowly_read)
    await mirror(source, tmp_path / "away", patience=0.4, seconds=0.4).fetch_model(tmp_path / "theirs")
    assert names(tmp_path / "theirs") == names(model)


async def test_a_model_whose_reading_stands_still_is_given_up(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(path: Path, read: Callable[[int], object] = lambda size: None) -> str:
        read(1)
        time.sleep(2)
        return digest_of(path)

    monkeypatch.setattr("stretto_cluster.weights.server._LIST_SECONDS", 0.1, raising=False)
    monkeypatch.setattr("stretto_cluster.weights.server.digest_of", hangs)
    with pytest.raises(SourceLost, match=r"nothing came for 0\.4 s"):
        await mirror(source, tmp_path / "away", patience=0.4).fetch_model(tmp_path / "theirs")


async def test_without_the_key_nothing_is_told(source: str, away: Path) -> None:
    with pytest.raises(RefusedRequest, match="key: refused by"):
        await mirror(source, away, key="wrong").pull(7)
    with socket.create_connection(("127.0.0.1", int(source.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET /versions/7 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reply = raw.makefile("rb").read().lower()
    assert reply.startswith(b"http/1.1 401")
    assert b"stretto-newest" not in reply
    assert names(away) == []


@pytest.mark.parametrize("base", ["%00", "..%2F..%2Fx"])
def test_a_base_that_was_never_published_is_answered_in_full(home: Path, model: Path, base: str) -> None:
    """Whatever the request calls it: no file gets a name from it."""
    before = names(home)
    with serving(home, model) as source, closing(HTTPConnection(source.rpartition("/")[2])) as raw:
        raw.request("GET", f"/versions/7?base={base}", headers={"authorization": f"Bearer {KEY}", RUN: "run"})
        reply = raw.getresponse()
        assert reply.status == 200
        assert "not published any more" in reply.headers[FORM]
        assert reply.read() == path_of("run", home, 7).read_bytes()  # the server ends after us, or a minute later
    assert names(home) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")
def test_a_version_is_not_overwritten_before_the_mirror_has_read_all_of_it(home: Path, model: Path) -> None:
    """Also after the server has sent it: the connection refers to pages of the file."""
    version = path_of("run", home, 7)
    whole, reply = version.read_bytes(), b""

    def unread() -> bool:
        with version.open("r+b") as file:
            return take_lease(version, file.fileno())

    with serving(home, model) as source:
        assert unread()
        with socket.create_connection(("127.0.0.1", int(source.rpartition(":")[2]))) as raw:
            raw.sendall(
                f"GET /versions/7 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{RUN}: run\r\n\r\n".encode()
            )
            while not reply.endswith(whole):
                reply += raw.recv(1 << 20)
            time.sleep(0.2)
            assert not unread()
        end = time.monotonic() + 30.0
        while not unread():
            assert time.monotonic() < end
            time.sleep(0.01)


async def test_the_server_of_another_run_is_refused_by_both(home: Path, model: Path, away: Path) -> None:
    SharedMemoryPublisher("other", home).publish(7, tensors(1.0).items())
    with serving(home, model, run="other") as other, pytest.raises(WireError, match="serves run other, not run"):
        await mirror(other, away).pull(7)
    assert names(away) == []


async def test_the_model_folder_comes_whole_and_again_at_no_cost(source: str, model: Path, tmp_path: Path) -> None:
    ours, folder = mirror(source, tmp_path / "away"), tmp_path / "policy"
    await ours.fetch_model(folder)
    await ours.fetch_model(folder)
    assert names(folder) == names(model)
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in names(model))
    (folder / "config.json").write_text("{}")
    with pytest.raises(WireError, match="is not the model folder of run run"):
        await ours.fetch_model(folder)


async def test_a_model_file_that_changes_on_the_road_is_found_no_folder_appears(source: str, tmp_path: Path) -> None:
    async with Road(source, flipping(700_000)).opened() as road:
        with pytest.raises(TornPublication, match=r"model\.safetensors .* other bytes"):
            await mirror(road.address, tmp_path / "away").fetch_model(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()
    await mirror(source, tmp_path / "away").fetch_model(tmp_path / "policy")
    assert not [name for name in names(tmp_path) if "partial" in name]


async def test_a_file_name_that_leads_out_of_the_folder_is_refused(source: str, tmp_path: Path) -> None:
    """A server that lists a path; its reply has the length of the true one."""

    def lead(number: int, place: int, piece: bytes) -> bytes:
        return piece.replace(b"config.json", b"../conf.jsn")

    async with Road(source, lead).opened() as road:
        with pytest.raises(WireError, match=r"'\.\./conf\.jsn', which is no name"):
            await mirror(road.address, tmp_path / "away").fetch_model(tmp_path / "policy")


async def test_with_tls_only_members_of_one_authority_meet(home: Path, model: Path, away: Path, tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    with serving(home, model, tls=ours) as address:
        await Mirror(address, KEY, "run", away, str(ours), part_size=1 << 16).pull(7)  # in parts
        assert_loads(away, 7, 7.0)
        with pytest.raises(WireError, match="certificate"):
            await Mirror(address, KEY, "run", tmp_path / "b", str(theirs)).pull(7)
        with pytest.raises(SourceLost):
            await mirror(address, tmp_path / "b", patience=0.3).pull(7)
    assert names(tmp_path / "b") == []


async def test_the_role_serves_until_it_is_ended(home: Path, model: Path, away: Path) -> None:
    address = free_address()
    with role(home, model, address) as process:
        await mirror(address, away, patience=30.0).pull(7)
        process.terminate()
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)
    assert_loads(away, 7, 7.0)


def test_a_mirror_and_its_server_need_no_torch() -> None:
    code = (
        "import sys, stretto_cluster.weights.mirror, stretto_cluster.weights.server; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
