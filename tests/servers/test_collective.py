"""Promises of weights by a collective: a server gets every tensor of a version to the bit, version after version, also
after an adapter that was killed in the middle; one whose ranks a group cannot have is refused, and gets nothing."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tests.servers.receiver as receiver
from stretto.core.errors import RefusedRequest, WireError
from stretto_servers.broadcast import SglangByBroadcast
from stretto_servers.http import JsonServer
from tests.servers.conftest import Receiving


def adapter(port: int) -> SglangByBroadcast:
    address = f"127.0.0.1:{port}"
    http = JsonServer("engine-0", address, seconds=30.0, token_seconds=30.0)
    return SglangByBroadcast(http, 30.0, address, "gloo")


@contextmanager
def answering(file: Path, **ranks: int) -> Iterator[int]:
    """A server of this process, which is in no group; its port."""
    handler = type("Handler", (receiver.Handler,), {"receiver": receiver.Receiver(str(file), ranks)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"embed": torch.full((5, 8), version, dtype=torch.bfloat16), "norm": torch.arange(8.0) - version}


def publish(folder: Path, version: int) -> Path:
    save_file(tensors(version), folder / "model.safetensors")
    return folder


async def test_each_version_arrives_to_the_bit_and_after_a_killed_adapter(tmp_path: Path, shared: Receiving) -> None:
    async def load(sender: SglangByBroadcast, version: int) -> None:
        await sender.load(publish(tmp_path, version), version, keep=False)
        told, got = shared.received()
        assert (told, got.keys()) == (f"{version}{sender.mark}", tensors(version).keys())
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors(version).items())

    killed, second, third = (adapter(shared.port) for _ in range(3))
    for version in (7, 8):
        await load(killed, version)
    await killed._post("/begin_weight_update", {})
    for version, sender in ((9, second), (10, third)):
        await load(sender, version)
        await sender.close()


def test_a_server_whose_ranks_are_not_those_of_a_group_is_refused(tmp_path: Path) -> None:
    with (
        answering(tmp_path / "received", tp_size=1, dp_size=2) as port,
        pytest.raises(WireError, match="engine-0 has dp_size 2: a broadcast reaches tensor parallel ranks alone"),
    ):
        asyncio.run(adapter(port).load(publish(tmp_path, 7), 7, keep=False))
    assert not (tmp_path / "received").exists()


def test_what_the_server_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    with answering(tmp_path / "received") as port, pytest.raises(RefusedRequest, match="no update is open"):
        asyncio.run(adapter(port)._post("/end_weight_update", {}))
