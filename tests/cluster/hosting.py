"""A gate with what a run has behind it, callers that say what no agent says, and a road between two ends that can be
frozen, cut and slowed down. Everything over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from stretto import __version__
from stretto.loop.records.tenure import Tenure
from stretto.processes.handshake import call
from stretto.processes.tls import client_context
from stretto.processes.wire import Wire, connect
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_cluster.gate import Doors, Gate
from stretto_cluster.machine import JoinedMachine
from stretto_cluster.messages import TO_AGENT, Join, RunTerms, ToAgent
from tests.cluster.weights.serving import KEY, serving

RUN, TOKEN, MAILBOX = "first-0a1b2c3d", "t" * 64, "run"
FIRST = Tenure(epoch=1, conductor="a")
_PATIENCE = 20.0


@dataclass
class Host:
    """A run: its gate, and who has joined."""

    gate: Gate
    address: str
    terms: RunTerms
    publisher: SharedMemoryPublisher
    joined: list[JoinedMachine] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    scaled: list[int] = field(default_factory=list)
    superseded: list[tuple[int, str]] = field(default_factory=list)

    async def machine(self, number: int = 0) -> JoinedMachine:
        """The machine that is the `number`-th to be ready."""
        await until(lambda: len(self.joined) > number)
        return self.joined[number]

    def publish(self, version: int, size: int = 64) -> None:
        self.publisher.publish(version, [("a", torch.full((size,), float(version)))])
        self.terms = msgspec.structs.replace(self.terms, published=version)
        self.gate.publish(version)


@asynccontextmanager
async def hosted(
    folder: Path,
    *,
    lease: float = 2.0,
    listen: str = "127.0.0.1:0",
    tls: str = "",
    run: str = RUN,
    published: int = 0,
    hung: float = 10.0,
    tenure: Tenure = FIRST,
) -> AsyncIterator[Host]:
    """A gate, and a server of weights with the version `published` and a model folder."""
    publisher = SharedMemoryPublisher(MAILBOX, folder / "mailbox")
    publisher.publish(published, [("a", torch.full((64,), float(published)))])
    for made in (folder / "model", folder / "logs"):
        made.mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    host_name, certificates = listen.rpartition(":")[0], Path(tls) if tls else None
    with serving(folder / "mailbox", folder / "model", MAILBOX, tls=certificates, host=host_name) as source:
        terms = RunTerms(
            run=run,
            mailbox=MAILBOX,
            weights_port=int(source.rpartition(":")[2]),
            weights_key=KEY,
            size=1024,
            published=published,
            lease=lease,
            hung=hung,
            delta="auto",
            tenure=tenure,
        )
        host: Host

        async def scale(engines: int) -> str:
            host.scaled.append(engines)
            return f"{engines} engines"

        doors = Doors(
            terms=lambda: host.terms,
            joined=lambda machine: host.joined.append(machine),
            scale=scale,
            say=lambda text: host.said.append(text),
            logs=folder / "logs",
            superseded=lambda epoch, address: host.superseded.append((epoch, address)),
            refuses=lambda join: "" if join.kind == "engine" else f"the run takes engines, and no {join.kind}",
        )
        gate = Gate(run, TOKEN, doors)
        host = Host(gate, await gate.open(listen, tls), terms, publisher)
        try:
            yield host
        finally:
            await gate.close("the run has ended")


async def until(condition: object, seconds: float = _PATIENCE) -> None:
    """Poll `condition()`; fails after a while."""
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def introduction(**changes: object) -> Join:
    return msgspec.structs.replace(Join("engine", "node-7", 1, __version__), **changes)


async def joined_by_hand(address: str, said: msgspec.Struct, token: str = TOKEN, tls: str = "") -> Wire[ToAgent]:
    """The end of a caller that has got through the handshake, and says what the test wants."""
    reader, writer = await connect(address, client_context(tls))
    try:
        await call(reader, writer, token, msgspec.msgpack.encode(said), peer=f"the run at {address}", seconds=10)
    except BaseException:
        writer.transport.abort()
        raise
    return Wire("the run", reader, writer, TO_AGENT)


@dataclass
class Road:
    """A relay to `target`, both ways. While it is frozen nothing arrives and nothing breaks; `cut` breaks all."""

    target: str
    delay: float = 0.0
    address: str = ""
    crossed: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Road]:
        self._open.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.crossed += 1
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._ends += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, target))
            self._tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await asyncio.sleep(self.delay)
                await self._open.wait()
                target.write(data)
                await target.drain()
            await self._open.wait()
        target.close()
