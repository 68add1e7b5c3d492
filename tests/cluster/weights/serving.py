"""What tests of the mirror share: a weights server on a real socket or in a process of its own, a road to it on which
bytes are lost, changed or late, and what is published and pulled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from stretto.weights.shared_memory import SharedMemorySubscriber
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.weights.role import WeightsServerSpec
from stretto_cluster.weights.server import WeightsApp, bound, server_of
from stretto_cluster.weights.source import PART_SIZE

KEY = "k" * 32
_END_SECONDS = 10.0
T = TypeVar("T")


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


@dataclass
class Road:
    """A relay to `target` that does something to the replies.

    `harm` gets the number of the connection, the place of a piece in the reply's bytes and the piece; it returns what
    to pass on, None to break off.
    """

    target: str
    harm: Callable[[int, int, bytes], bytes | None]
    piece: int = 1 << 16
    connections: int = 0
    passed: int = 0
    _ends: list[socket.socket] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[str]:
        """Its address."""
        listening = bound("127.0.0.1", 0)
        accepting = threading.Thread(target=self._accept, args=(listening,))
        accepting.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for end in [listening, *self._ends]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            accepting.join(_END_SECONDS)

    def _accept(self, listening: socket.socket) -> None:
        threads = []
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                self.connections += 1
                self._ends.append(near)
                threads.append(threading.Thread(target=self._relay, args=(near, self.connections)))
                threads[-1].start()
        for thread in threads:
            thread.join(_END_SECONDS)

    def _relay(self, near: socket.socket, number: int) -> None:
        host, _, port = self.target.rpartition(":")
        with contextlib.suppress(OSError), near, socket.create_connection((host, int(port))) as far:
            self._ends.append(far)
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                if not (part := near.recv(4096)):
                    return
                request += part
            far.sendall(request)
            place = 0
            while part := far.recv(self.piece):
                harmed = self.harm(number, place, part)
                place += len(part)
                if harmed is None:
                    return
                near.sendall(harmed)
                self.passed += len(harmed)


@contextmanager
def lying(said: bytes) -> Iterator[str]:
    """The address of a server that has one answer to everything."""
    listening = bound("127.0.0.1", 0)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                with near:
                    near.recv(4096)
                    near.sendall(said)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(_END_SECONDS)


def slowly(number: int, place: int, piece: bytes) -> bytes:
    """A harm: fifty pieces a second."""
    time.sleep(0.02)
    return piece


@contextmanager
def role(home: Path, model: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a weights server."""
    (home / "key").write_text(KEY + "\n")
    spec = WeightsServerSpec("run", str(home), str(model), address, str(home / "key"))
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto_cluster.weights.role", msgspec.json.encode(spec).decode()]
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


def now(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_loads(away: Path, version: int, scale: float) -> None:
    loaded = SharedMemorySubscriber("run", away).load(version)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(scale).items())
