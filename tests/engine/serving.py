"""A server in the test's own event loop, and an engine that is a small real one: it answers without a model."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from torch import Tensor

from stretto.core.errors import EngineLost, WireError
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.server import run_server
from stretto.engine.native.engine import NativeEngine


class Mailbox:
    """Publications in memory (satisfies `weights.mailbox.Subscriber`)."""

    def __init__(self, publications: Mapping[int, Mapping[str, Tensor]] | None = None) -> None:
        self.publications = dict(publications or {})
        self.checked = 0

    def newest(self) -> int | None:
        return max(self.publications, default=None)

    def load(self, version: int) -> Mapping[str, Tensor]:
        if version not in self.publications:
            raise WireError(f"version {version} is not there")
        return self.publications[version]


@asynccontextmanager
async def served(
    engine: NativeEngine, address: str | Path, mailbox: Mailbox | None = None, answer_seconds: float = 20.0
) -> AsyncIterator[HttpEngine]:
    """A client of a running server; `address` may be the path of the socket."""
    address = f"unix:{address}" if isinstance(address, Path) else address
    server = asyncio.create_task(run_server(engine, mailbox or Mailbox(), address))
    client = HttpEngine("engine-0", address, answer_seconds=answer_seconds, load_seconds=20, health_seconds=20)
    try:
        await until_up(client)
        yield client
    finally:
        await client.close()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def until_up(client: HttpEngine) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await client.health()
            except EngineLost:
                await asyncio.sleep(0.02)
            else:
                return
