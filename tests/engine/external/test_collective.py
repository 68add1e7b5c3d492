"""Promises of weights by a collective: a server gets every tensor of a version to the bit, version after version, also
after an adapter that was killed in the middle; one whose ranks a group cannot have is refused, and gets nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tests.weights.receiver as receiver
from stretto.core.errors import RefusedRequest, WireError
from stretto.engine.external.collective import SglangByBroadcast
from stretto.engine.external.http import JsonServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a publication."""
    place = tmp_path / "policy"
    place.mkdir()
    return place


class Receiver:
    """A server on gloo; `said` is what it says of its ranks."""

    def __init__(self, folder: Path, **said: int) -> None:
        self.file = folder / "received"
        words = [sys.executable, receiver.__file__, str(self.file), json.dumps(said)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def adapter(self) -> SglangByBroadcast:
        http = JsonServer("engine-0", self.address, seconds=30.0, token_seconds=30.0)
        return SglangByBroadcast(http, 30.0, self.address, "gloo")

    def received(self) -> tuple[str, dict[str, torch.Tensor]]:
        with safe_open(self.file, "pt") as file:
            return file.metadata()["version"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(params=[{}])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Receiver]:
    made = Receiver(tmp_path, **request.param)
    yield made
    made.process.kill()
    made.process.communicate()


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"embed": torch.full((5, 8), version, dtype=torch.bfloat16), "norm": torch.arange(8.0) - version}


def publish(folder: Path, version: int) -> Path:
    save_file(tensors(version), folder / "model.safetensors")
    return folder


def test_every_version_arrives_to_the_bit_and_after_a_killed_adapter_too(server: Receiver, folder: Path) -> None:
    async def load(adapter: SglangByBroadcast, version: int) -> None:
        await adapter.load(publish(folder, version), version, keep=False)
        told, got = server.received()
        assert (told, got.keys()) == (str(version), tensors(version).keys())
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors(version).items())

    async def run() -> None:
        killed, second, third = (server.adapter() for _ in range(3))
        for version in (7, 8):
            await load(killed, version)
        await killed._post("/begin_weight_update", {})
        await load(second, 9)
        await second.close()
        await load(third, 10)
        await third.close()

    asyncio.run(run())


@pytest.mark.parametrize("server", [{"tp_size": 1, "dp_size": 2}], indirect=True)
def test_a_server_whose_ranks_are_not_those_of_a_group_is_refused(server: Receiver, folder: Path) -> None:
    with pytest.raises(WireError, match="engine-0 has dp_size 2: a broadcast reaches tensor parallel ranks alone"):
        asyncio.run(server.adapter().load(publish(folder, 7), 7, keep=False))
    assert not server.file.exists()


def test_what_the_server_refuses_is_an_error_with_its_words(server: Receiver) -> None:
    with pytest.raises(RefusedRequest, match="no update is open"):
        asyncio.run(server.adapter()._post("/end_weight_update", {}))
