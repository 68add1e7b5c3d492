"""A gate with what a run has behind it, and callers that say what no agent says. Everything over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto import __version__
from stretto.loop.records.totals import Tenure
from stretto.processes.http.tls import client_context
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_cluster.gate import Doors, Gate
from stretto_cluster.handshake import call
from stretto_cluster.machine import JoinedMachine
from stretto_cluster.messages import TO_AGENT, Join, MachineReady, RolePlace, RunTerms, ToAgent
from stretto_cluster.wire import Wire, connect
from tests.asynchronous import until as until
from tests.cluster.weights.serving import KEY, serving

RUN, TOKEN, MAILBOX = "first-0a1b2c3d", "t" * 64, "run"
FIRST = Tenure(epoch=1, conductor="a")


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
    return Wire(reader, writer, TO_AGENT)


@asynccontextmanager
async def joined(
    folder: Path, *, address: str = "127.0.0.1:1", **changes: Any
) -> AsyncIterator[tuple[Host, JoinedMachine, Wire[ToAgent]]]:
    """A run, a machine that has joined it with a place at `address`, and the end of its agent."""
    async with hosted(folder, **changes) as host:
        wire = await joined_by_hand(host.address, introduction())
        wire.send(ready_at(address))
        try:
            yield host, await host.machine(), wire
        finally:
            wire.cut()


def ready_at(address: str) -> MachineReady:
    return MachineReady(places=(RolePlace(address, "/tmp"),), model="/m", mailbox_folder="/w")
