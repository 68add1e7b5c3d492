"""Parts that tests of the mirror share: a weights server on a real socket or in a process of its own, a road to it that
can be frozen, cut and slowed down and on which bytes are lost or changed, and what is published and pulled."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stretto.weights.shared_memory import SharedMemorySubscriber
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.weights.server import WeightsApp, WeightsServerSpec, bound, server_of
from stretto_cluster.weights.source import PART_SIZE

KEY = "k" * 32
_END_SECONDS = 10.0
Harmed = bytes | None


@contextmanager
def serving(
    folder: Path,
    model: Path,
    run: str = "run",
    key: str = KEY,
    port: int = 0,
    tls: Path | None = None,
    host: str = "127.0.0.1",
    reference: Path | None = None,
) -> Iterator[str]:
    """The address of a weights server that runs in a thread."""
    listening = bound(host, port)
    server = server_of(WeightsApp(run, folder, model, key, reference), tls)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield f"{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_END_SECONDS)
        listening.close()
        assert not thread.is_alive()


def nothing(number: int, place: int, piece: bytes) -> bytes:
    """No harm."""
    return piece


@dataclass
class Road:
    """A relay to `target`, both ways. While it is frozen nothing arrives and nothing breaks; `cut` breaks all.

    `harm` gets the number of the connection, the place of a piece in the replies' bytes and the piece; it returns what
    to pass on, at once or later, None to break off."""

    target: str
    harm: Callable[[int, int, bytes], Harmed | Awaitable[Harmed]] = nothing
    piece: int = 1 << 16
    delay: float = 0.0
    address: str = ""
    connections: int = 0
    passed: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Road"]:
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
        number = self.connections = self.connections + 1
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._ends += [writer, far_writer]
        for source, target, which in ((reader, far_writer, 0), (far_reader, writer, number)):
            self._tasks.add(asyncio.create_task(self._carry(source, target, which)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, number: int) -> None:
        """`number`: of the connection whose replies these are; 0 for requests, which come to no harm."""
        place = 0
        with contextlib.suppress(OSError):
            while data := await source.read(self.piece):
                await asyncio.sleep(self.delay)
                await self._open.wait()
                harmed = self.harm(number, place, data) if number else data
                harmed = await harmed if inspect.isawaitable(harmed) else harmed
                if harmed is None:
                    break
                place += len(data)
                target.write(harmed)
                await target.drain()
                self.passed += len(harmed) * (number > 0)
            await self._open.wait()
        target.close()


@asynccontextmanager
async def lying(said: bytes) -> AsyncIterator[str]:
    """The address of a server that has one answer to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def slowly(number: int, place: int, piece: bytes) -> bytes:
    """A harm: fifty pieces a second."""
    await asyncio.sleep(0.02)
    return piece


def flipping(at: int, only: int = 0) -> Callable[[int, int, bytes], bytes]:
    """A harm: a bit of the byte at a place flips, in one connection or in all."""

    def flip(number: int, place: int, piece: bytes) -> bytes:
        here = at - place
        if only not in (0, number) or not 0 <= here < len(piece):
            return piece
        return piece[:here] + bytes([piece[here] ^ 1]) + piece[here + 1 :]

    return flip


@contextmanager
def role(home: Path, model: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a weights server."""
    (home / "key").write_text(KEY + "\n")
    spec = WeightsServerSpec("run", str(home), str(model), address, str(home / "key"))
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto_cluster.weights.server", msgspec.json.encode(spec).decode()]
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


def free_address() -> str:
    with bound("127.0.0.1", 0) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    """About 1 MB."""
    generator = torch.Generator().manual_seed(5)
    return {
        "a": torch.randn(300, 700, generator=generator) * scale,
        "b": (torch.randn(400, 200, generator=generator) * scale).bfloat16(),
        "none": torch.empty(0, 3),
    }


def mirror(
    source: str,
    away: Path,
    key: str = KEY,
    patience: float = 3.0,
    seconds: float = 60.0,
    part_size: int = PART_SIZE,
    beside: Callable[[], Iterable[Path]] = tuple,
) -> Mirror:
    return Mirror(source, key, "run", away, patience=patience, seconds=seconds, part_size=part_size, beside=beside)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_loads(away: Path, version: int, scale: float) -> None:
    loaded = SharedMemorySubscriber("run", away).load(version)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(scale).items())
