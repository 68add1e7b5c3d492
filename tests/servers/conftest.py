"""One process that receives weights, for the tests of both files: its start is an import of torch."""

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

import tests.servers.receiver as receiver
from stretto.core.errors import EngineLost, WireError


class Receiving:
    """A process of `receiver`."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, receiver.__file__, str(file)]
        self.file, self.process = file, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.orders: list[str] = []

    async def post(self, path: str, order: Mapping[str, object] | None) -> Any:
        self.orders.append(path)
        return await asyncio.to_thread(self._post, path, order)

    def _post(self, path: str, order: Mapping[str, object] | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, json.dumps(order))
            response = connection.getresponse()
            reply = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise EngineLost("engine-0", f"does not answer ({error})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise WireError(reply["message"])
        return reply

    def received(self) -> tuple[str, dict[str, Tensor]]:
        with safe_open(self.file, "pt") as file:
            return file.metadata()["version"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    made = Receiving(tmp_path_factory.mktemp("received") / "received.safetensors")
    yield made
    made.end()
