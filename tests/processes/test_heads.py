"""Promises: a request whose head has up to 64 KiB is answered, and one with more is refused with 431, wherever its
bytes are cut into pieces and whatever was asked before on its connection; the client can read the refusal though it
sent all before; a head, trailers or anything else that does not end is dropped, and its connection is cut.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from stretto.processes.http.asgi import read_body, reply
from stretto.processes.http.server import HttpServer, settings_of
from tests.processes.test_http_server import serving

BOUND = 65_536
_ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Replies with the length of the head's parts as it got them, at /body after the body."""
    if scope["path"] == "/body":
        await read_body(scope, receive)
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    await reply(send, 200, "text/plain", b"%d" % (len(scope["raw_path"]) + len(scope["query_string"]) + headers))


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving(HttpServer(settings_of(_app), patience=20)) as found:
        yield found


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next reply."""
    connection.settimeout(20)
    said = b""
    while b"\r\n\r\n" not in said:
        part = connection.recv(65_536)
        assert part, f"closed after {said!r}"
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65_536)
    return int(said.split()[1]), body


def head(size: int, url: int, headers: int) -> bytes:
    """A head of `size` bytes: a url of about `url` bytes, and about as many headers."""
    start = b"GET /?" + b"u" * min(url, size - 60) + b" HTTP/1.1\r\nhost: x\r\n"
    left = size - len(start) - len(b"\r\n")
    each = max(len(b"x: \r\n"), left // headers)
    lines = []
    while left >= 2 * each:
        lines.append(b"x: " + b"v" * (each - 5) + b"\r\n")
        left -= each
    lines.append(b"x: " + b"v" * (left - 5) + b"\r\n")
    found = start + b"".join(lines) + b"\r\n"
    assert len(found) == size
    return found


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.integers(BOUND - 40, BOUND + 40), st.integers(100, 4 * BOUND)),
    url=st.one_of(st.just(0), st.integers(0, 60_000)),
    headers=st.integers(1, 500),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    before=st.integers(0, 2),
)
def test_a_head_of_at_most_64_kib_is_answered_and_a_longer_one_refused(
    address: tuple[str, int], size: int, url: int, headers: int, cuts: list[float], before: int
) -> None:
    sent = head(size, url, headers)
    with socket.create_connection(address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(before):
            client.sendall(_ASKED)
            assert answer(client)[0] == 200
        for start, end in pairwise([0, *sorted(int(cut * size) for cut in cuts), size]):
            client.sendall(sent[start:end])
            time.sleep(0.001)  # a piece of its own, mostly
        status, said = answer(client)
        assert status == (200 if size <= BOUND else 431)
        if status == 200:
            client.sendall(_ASKED)
            assert answer(client)[0] == 200
        else:
            assert b"65,536 bytes" in said


def sends_for_ever(client: socket.socket, part: bytes) -> int:
    """How many bytes the other side takes before it ends the connection; at most 256 MiB."""
    taken = 0
    with suppress(ConnectionError):
        while taken < 256 << 20:
            client.sendall(part)
            taken += len(part)
    return taken


_CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"GET / HTTP/1.1\r\n", b"x: " + b"v" * 4000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nx: ", b"v" * 65_536),
        (b"GET /", b"u" * 65_536),
        (_CHUNKED % b"/" + b"0\r\n", b"x: " + b"v" * 4000 + b"\r\n"),
        (_CHUNKED % b"/body" + b"0\r\n", b"x: " + b"v" * 4000 + b"\r\n"),
        (_CHUNKED % b"/body" + b"0\r\nx: ", b"v" * 65_536),
        (_CHUNKED % b"/body" + b"2;x=", b"v" * 65_536),
        (b"", b"\r\n" * 32_768),
    ],
    ids=["headers", "a header", "url", "trailers", "trailers of a body", "a trailer", "extension", "blank lines"],
)
def test_what_never_ends_is_dropped_and_then_cut(address: tuple[str, int], start: bytes, part: bytes) -> None:
    """64 MiB are dropped, and the buffers of the kernel hold some more."""
    with socket.create_connection(address) as client:
        client.sendall(start)
        assert sends_for_ever(client, part) < 96 << 20


def test_in_the_middle_of_a_reply_nothing_is_said_in_between(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.sendall(_CHUNKED % b"/body" + b"0\r\n" + b"x: v\r\n" * 100_000)
        client.settimeout(20)
        with suppress(ConnectionError):
            assert client.recv(1) == b""
