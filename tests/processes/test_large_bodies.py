"""Promises: a client that sends all of a body before it reads the reply can read that the body was too large, whether
it keeps the connection or not; a body without an end, or that comes drop by drop, is not read for ever; a client that
asks whether to send it at all is told so at once; and the part of a body that came before its client left is no body.
"""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from stretto.core.errors import RefusedRequest
from stretto.processes.http import asgi
from stretto.processes.http.asgi import LARGEST_BODY, read_body, reply
from stretto.processes.http.server import HttpServer, settings_of
from tests.processes.test_http_server import serving

_LONG = 17_000_000


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, 413 if await read_body(scope, receive) is None else 200, "text/plain", b"end")


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving(HttpServer(settings_of(_app))) as address:
        yield address


def _heard(connection: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"end"):
        part = connection.recv(4096)
        assert part, f"closed after {said!r}"
        said += part
    return said


def _head(*fields: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", "host: localhost", *fields, "", ""]).encode()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_who_sends_17_mb_and_then_reads_finds_the_413(address: tuple[str, int], whole: bool, kept: bool) -> None:
    assert _LONG > LARGEST_BODY
    connecting = "connection: keep-alive" if kept else "connection: close"
    with socket.create_connection(address, timeout=30) as client:
        if whole:
            client.sendall(_head(f"content-length: {_LONG}", connecting) + bytes(_LONG))
        else:
            piece = b"%x\r\n%b\r\n" % (1_000_000, bytes(1_000_000))
            client.sendall(_head("transfer-encoding: chunked", connecting) + 17 * piece + b"0\r\n\r\n")
        assert _heard(client).startswith(b"HTTP/1.1 413")


def test_a_body_without_an_end_is_refused_too(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DROPPED_BYTES", 4 << 20)
    piece = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(_head("transfer-encoding: chunked", "connection: close"))
        with pytest.raises(ConnectionError):
            client.sendall(80 * piece)


def test_a_body_that_stops_coming_is_refused_in_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DROPPED_SECONDS", 0.2)
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(_head(f"content-length: {_LONG}") + b"x")
        assert _heard(client).startswith(b"HTTP/1.1 413")


def test_who_asks_before_sending_is_told_at_once(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DROPPED_SECONDS", 600.0)
    start = time.monotonic()
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(_head(f"content-length: {_LONG}", "expect: 100-continue"))
        assert _heard(client).startswith(b"HTTP/1.1 413")
    assert time.monotonic() - start < 300


@pytest.mark.parametrize("parts", [[], [b""], [b"all"], [b"a", b"ll"]])
@pytest.mark.parametrize("head", [[], [(b"content-length", b"3")]])
def test_what_came_before_the_client_left_is_no_body(parts: list[bytes], head: list[tuple[bytes, bytes]]) -> None:
    """Also if the part is valid by itself, as a message of protobuf without its last datum, or an empty body."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    coming = iter([*messages, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(coming)

    with pytest.raises(RefusedRequest, match="broken off"):
        asyncio.run(read_body({"type": "http", "headers": head}, receive))
