"""Promises: the client loads no torch; requests that follow each other share a connection, unless it was idle for long;
a stream of bytes that is no HTTP, or no engine's, or that ends nowhere, is a named error."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import DeadlineExceeded, EngineLied, EngineLost, WireError
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.http import client as client_module
from stretto.engine.http.client import HttpEngine


def test_the_client_loads_no_torch() -> None:
    program = "import sys, stretto.engine.http.client; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@asynccontextmanager
async def answering(path: Path, reply: bytes) -> AsyncIterator[HttpEngine]:
    """A client of something that answers every request with `reply` and hangs up."""
    answered: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(answer, path)
    client = HttpEngine("engine-0", f"unix:{path}", health_seconds=5)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*(task for task in answered if task is not None))


@pytest.mark.parametrize(("idle", "connections"), [(60.0, 1), (0.0, 3)])
@pytest.mark.parametrize(
    "reply",
    [b"content-length: 1\r\n\r\n\x90", b"transfer-encoding: chunked\r\n\r\n1\r\n\x90\r\n0\r\n\r\n"],
    ids=["a length", "chunks"],
)
async def test_requests_that_follow_each_other_share_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: bytes, idle: float, connections: int
) -> None:
    monkeypatch.setattr(client_module, "_IDLE_SECONDS", idle)
    accepted = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        while await reader.read(1 << 16):
            writer.write(b"HTTP/1.1 200 OK\r\n" + reply)
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "e.sock"):
        client = HttpEngine("engine-0", f"unix:{tmp_path / 'e.sock'}", health_seconds=5)
        for _ in range(3):
            assert await client.spans() == []
        await client.close()
        await asyncio.gather(*(writer.wait_closed() for writer in accepted))
    assert len(accepted) == connections


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (b"", EngineLost, "broke off"),
        (b"SSH-2.0-OpenSSH\r\n", EngineLost, "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf", EngineLost, "broke off"),
        (b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops", EngineLost, "broke off a request"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops", WireError, "a reply that no stretto engine"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\noops",
            EngineLied,
            "nonsense about itself: a reply that no stretto engine sends",
        ),
    ],
)
async def test_a_reply_that_is_none_is_a_named_error(
    tmp_path: Path, reply: bytes, error: type[Exception], message: str
) -> None:
    async with answering(tmp_path / "e.sock", reply) as client:
        with pytest.raises(error, match=message):
            await client.health()


async def test_a_refusal_that_never_ends_is_a_named_error(tmp_path: Path) -> None:
    given_up, replied = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\nhalf")
        await given_up.wait()
        writer.close()
        replied.set()

    async with await asyncio.start_unix_server(answer, tmp_path / "e.sock"):
        client = HttpEngine("engine-0", f"unix:{tmp_path / 'e.sock'}", answer_seconds=60, health_seconds=0.1)
        request = GenerateRequest(id="a", prompt_token_ids=(5,), seeds=(1,), sampling=Sampling(max_tokens=1))
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded, match="the end of a refusal of a"):
                await anext(client.generate(request))
        given_up.set()
        await replied.wait()
        await client.close()


async def test_a_connection_that_was_closed_meanwhile_is_not_used_again(tmp_path: Path) -> None:

    async with answering(tmp_path / "e.sock", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\x90") as client:
        for _ in range(3):
            assert await client.spans() == []
            await asyncio.sleep(0.02)  # the far end hangs up


@pytest.mark.parametrize("name", ["two.test", "a..b"], ids=["a name with two addresses", "no name of a machine"])
async def test_an_engine_at_a_name_that_nobody_answers_at_is_lost(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A name stands for several addresses where a machine has both kinds of IP, as localhost often does."""
    own = socket.getaddrinfo

    def found(host: str, *rest: Any, **more: Any) -> list[Any]:
        both = ("127.0.0.1", "127.0.0.2") if host == "two.test" else (host,)
        return [one for address in both for one in own(address, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    client = HttpEngine("engine-0", f"{name}:9", health_seconds=5)
    with pytest.raises(EngineLost, match="engine-0 cannot be reached"):
        await client.health()


async def test_what_still_connects_to_an_engine_that_ends_does_not_reach_the_next_one() -> None:
    """The next one, which listens at the same address, may not have the newest version yet."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        host, port = listening.getsockname()
        for waiting in (first, second):  # the kernel answers no further one
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        client, loop, reached = HttpEngine("engine-0", f"{host}:{port}"), asyncio.get_running_loop(), list[bytes]()
        asked = asyncio.create_task(client.health())
        await asyncio.sleep(0.1)
        client.break_off()
        listening.setblocking(False)
        while not asked.done() and not any(reached):
            with contextlib.suppress(TimeoutError):
                one, _ = await asyncio.wait_for(loop.sock_accept(listening), 0.1)
                with one, contextlib.suppress(TimeoutError):
                    reached.append(await asyncio.wait_for(loop.sock_recv(one, 100), 0.1))
        assert not any(reached)
        with pytest.raises(EngineLost, match="ended while a connection to it was made"):
            await asked
