"""Promises: a crowd of strangers costs a server of ours a bounded number of connections, and its clients nothing; who
says nothing, or says it drop by drop, is turned out after a while, inside TLS too; a request that is being answered and
a client that has shown the key are left alone.
"""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from stretto.core.errors import RecipeError
from stretto.processes.http.asgi import unless_gone
from stretto.processes.http.reach import bind
from stretto.processes.http.server import HttpServer, admit, give_way, settings_of
from stretto.processes.http.tls import client_context, server_context
from tests.certificates import authority

_MOST, _PATIENCE = 16, 0.5
_REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n\r\n"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers are looked at twenty times a second."""
    monkeypatch.setattr("stretto.processes.http.server._LOOK_SECONDS", 0.05)


async def _long(send: Send) -> None:
    """A reply without an end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(1 << 18), "more_body": True})
        await asyncio.sleep(0.005)


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Replies to one who has the key, and at /slow after a while to anyone; at /wrong, to one with a wrong secret."""
    if (b"authorization", b"Bearer key") in scope["headers"]:
        admit(scope)
    if scope["path"] == "/long":
        await unless_gone(receive, _long(send))
        return
    if scope["path"] == "/wrong":
        give_way(scope)
    if scope["path"] in ("/slow", "/wrong"):
        await asyncio.sleep(2 * _PATIENCE)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def _serving(tls: Path | None = None) -> Iterator[tuple[str, int]]:
    config = settings_of(_app, timeout_keep_alive=60)
    config.load()
    config.ssl = server_context(str(tls)) if tls is not None else None
    with serving(HttpServer(config, strangers=_MOST, patience=_PATIENCE)) as address:
        yield address


@contextmanager
def serving(server: HttpServer) -> Iterator[tuple[str, int]]:
    """The address at which a server serves in a thread of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


def test_a_small_part_of_a_reply_is_sent_at_once() -> None:
    """The kernel does not wait until the part before it is acknowledged."""
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await _app(scope, receive, send)

    server = HttpServer(settings_of(app))
    with serving(server) as address, socket.create_connection(address) as caller:
        caller.sendall(_REQUEST)
        _reply(caller)
    assert seen == [1]


def _is_closed(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side ends the connection in time."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def _reply(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    said = b""
    while not said.endswith(b"\r\n\r\nok"):
        part = connection.recv(4096)
        assert part, f"closed after {said!r}"
        said += part
    return said


def test_of_a_crowd_that_says_nothing_as_many_as_allowed_stay_and_a_client_is_served() -> None:
    with ExitStack() as stack, _serving() as address:
        known = stack.enter_context(socket.create_connection(address))
        known.sendall(_REQUEST)
        _reply(known)
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(10 * _MOST)]
        assert all(_is_closed(stranger, 20) for stranger in crowd[: 9 * _MOST])
        late = stack.enter_context(socket.create_connection(address))
        late.sendall(_REQUEST)
        _reply(late)
        assert all(_is_closed(stranger, 20) for stranger in crowd)  # the last of them when their patience was over
        for client in (known, late):
            client.sendall(_REQUEST)
            _reply(client)


def test_a_request_that_comes_drop_by_drop_is_turned_out() -> None:
    with _serving() as address, socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        until = time.monotonic() + 20 * _PATIENCE
        while not _is_closed(stranger, 0.05) and time.monotonic() < until:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"x: y\r\n")
        assert time.monotonic() < until


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with _serving() as address, socket.create_connection(address) as stranger:
        stranger.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert _is_closed(stranger, 1.8 * _PATIENCE)


def test_a_stranger_whose_request_is_being_answered_is_not_cut_off() -> None:
    slow = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
    with ExitStack() as stack, _serving() as address:
        served = [stack.enter_context(socket.create_connection(address)) for _ in range(_MOST)]
        for client in served:
            client.sendall(slow)
        time.sleep(0.3)  # they are under way
        assert _is_closed(stack.enter_context(socket.create_connection(address)), 1.0)
        assert all(_reply(client).startswith(b"HTTP/1.1 200") for client in served)


def test_who_guesses_gives_way_to_any_other_caller() -> None:
    """Those who wait for the reply to a wrong secret are as many as there may be strangers."""
    wrong = b"GET /wrong HTTP/1.1\r\nhost: x\r\n\r\n"
    with ExitStack() as stack, _serving() as address:
        guessing = [stack.enter_context(socket.create_connection(address)) for _ in range(_MOST)]
        for client in guessing:
            client.sendall(wrong)
        time.sleep(0.2)  # they wait for their replies
        for turned_out in guessing[:3]:
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(_REQUEST.replace(b"key", b"none"))
            _reply(client)
            assert _is_closed(turned_out, 20)


def test_who_does_not_read_a_long_reply_is_idle_and_who_reads_it_is_not() -> None:
    asked = b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n"
    with _serving() as address, ExitStack() as stack:
        reads = stack.enter_context(socket.create_connection(address, timeout=20))
        reads.sendall(asked)
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(_MOST - 1)]
        for stranger in crowd:
            stranger.sendall(asked)
        until = time.monotonic() + 4 * _PATIENCE
        while time.monotonic() < until:
            assert len(reads.recv(1 << 20))
        client = stack.enter_context(socket.create_connection(address))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        _reply(client)
        assert len(reads.recv(1 << 20))


def test_a_stranger_that_asks_again_and_again_is_not_idle() -> None:
    with _serving() as address, socket.create_connection(address) as client:
        until = time.monotonic() + 4 * _PATIENCE
        while time.monotonic() < until:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            _reply(client)
            time.sleep(_PATIENCE / 4)
        assert _is_closed(client, 20)


def test_who_does_not_end_the_handshake_of_tls_is_turned_out_too(tmp_path: Path) -> None:
    folder = authority(tmp_path / "ours")
    with ExitStack() as stack, _serving(folder) as (host, port):
        crowd = [stack.enter_context(socket.create_connection((host, port))) for _ in range(4 * _MOST)]
        assert all(_is_closed(stranger, 20) for stranger in crowd[: 3 * _MOST])
        with httpx.Client(verify=client_context(str(folder)) or False, trust_env=False, timeout=20) as known:
            assert known.get(f"https://{host}:{port}/").text == "ok"
        assert all(_is_closed(stranger, 20) for stranger in crowd)


def test_an_address_without_room_for_a_socket_is_refused_as_one_that_is_not_there() -> None:
    bind("127.0.0.1", 0, ("--host", "--port")).close()  # imports what it needs
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        with pytest.raises(RecipeError, match=r"--host: .*Too many open files; give an address"):
            bind("127.0.0.1", 0, ("--host", "--port"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
