"""The handshake of two processes with a shared key, over real sockets.

- Both learn who the other is; what comes right after the handshake is not swallowed.
- A wrong key is refused, by the listener and by the caller; neither key is ever on the wire.
- A caller that the listener does not want is told why. A peer that goes away, that drips bytes, or that speaks
  something else is named, and is not waited for.
- A proof that was overheard opens no other connection, nor does a listener's own one that is sent back to it.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from stretto.core.errors import DeadlineExceeded, HandshakeRefused
from stretto.core.frames import frame
from stretto_cluster import handshake
from stretto_cluster.handshake import call, new_key
from tests.processes.greeting import admit_from_thread, call_from_thread

KEY, OTHER = "0123456789abcdef", "another key"


def anybody(introduction: bytes) -> str:
    return ""


@contextmanager
def beside(work: Callable[[socket.socket], Any]) -> Iterator[tuple[socket.socket, list[Any]]]:
    """The near end of a connection at whose far end a thread does `work`; and what that gave, or raised."""
    near, far = socket.socketpair()
    came: list[Any] = []

    def do() -> None:
        with far:
            try:
                came.append(work(far))
            except Exception as error:  # the test looks at it
                came.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    with near:
        yield near, came
    thread.join(10)
    assert not thread.is_alive()


def listener(
    key: str = KEY, judge: Callable[[bytes], str] = anybody, seconds: float = 10
) -> Callable[[socket.socket], bytes]:
    return lambda far: admit_from_thread(far, key, b"the conductor", judge, peer="rank 1", seconds=seconds)


def greet(near: socket.socket, key: str = KEY) -> bytes:
    return call_from_thread(near, key, b"rank 1", peer="rank 0")


def test_both_sides_learn_who_the_other_is() -> None:
    with beside(listener()) as (near, came):
        assert greet(near) == b"the conductor"
    assert came == [b"rank 1"]


def test_what_comes_right_behind_the_handshake_is_left_for_its_reader() -> None:
    def welcome_and_order(far: socket.socket) -> None:
        listener()(far)
        far.sendall(b"order")

    async def greet_and_read(near: socket.socket) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(sock=near.dup())
        try:
            return await call(reader, writer, KEY, b"rank 1", peer="rank 0", seconds=10), await reader.readexactly(5)
        finally:
            writer.close()

    with beside(welcome_and_order) as (near, _):
        assert asyncio.run(greet_and_read(near)) == (b"the conductor", b"order")


def test_a_listener_without_the_key_is_not_trusted() -> None:
    """It admits everybody, and cannot prove what it never had."""

    def false_listener(far: socket.socket) -> None:
        far.recv(4096)
        far.sendall(frame(handshake._Challenge(b"n" * 32)))
        far.recv(4096)
        far.sendall(frame(handshake._Welcome(b"the conductor", b"m" * 32)))

    with beside(false_listener) as (near, _), pytest.raises(HandshakeRefused, match="rank 0 does not have the token"):
        greet(near)


def test_a_wrong_key_is_refused_both_sides_say_so_and_the_judge_never_sees_its_caller() -> None:
    judged: list[bytes] = []

    def judge(who: bytes) -> str:
        judged.append(who)
        return ""

    refused = pytest.raises(HandshakeRefused, match="rank 0 refused: the token is wrong")
    with beside(listener(OTHER, judge)) as (near, came), refused:
        greet(near)
    assert (str(came[0]), judged) == ("rank 1 does not have the token", [])


def test_a_caller_that_is_not_wanted_is_told_why() -> None:
    refused = pytest.raises(HandshakeRefused, match="rank 0 refused: rank 1 is here already")
    with beside(listener(judge=lambda who: f"{who.decode()} is here already")) as (near, came), refused:
        greet(near)
    assert str(came[0]) == "rank 1 is not wanted: rank 1 is here already"


def conversation(key: str) -> tuple[bytes, list[bytes]]:
    """Everything that a caller sent, and its messages, as somebody between the two hears them."""
    heard: list[bytes] = []

    def between(far: socket.socket) -> None:
        inner, outer = socket.socketpair()
        thread = threading.Thread(target=listener(key), args=(outer,))
        thread.start()
        for _ in range(2):  # Hello, Challenge; Proof, Welcome
            heard.append(far.recv(65536))
            inner.sendall(heard[-1])
            far.sendall(inner.recv(65536))
        thread.join()
        inner.close()
        outer.close()

    with beside(between) as (near, _):
        greet(near, key)
    return b"".join(heard), heard


def test_the_key_is_never_sent_and_an_overheard_proof_opens_nothing_else() -> None:
    key = new_key()
    everything, messages = conversation(key)
    assert key.encode() not in everything
    assert bytes.fromhex(key) not in everything
    with beside(listener(key)) as (near, came):
        near.sendall(messages[0])
        near.recv(65536)  # another challenge
        near.sendall(messages[1])
        near.recv(65536)
    assert str(came[0]) == "rank 1 does not have the token"


def test_a_proof_that_is_sent_back_to_its_maker_proves_nothing() -> None:
    """The other side answers with our own messages: a call is never taken for an admission."""

    def mirror(far: socket.socket) -> None:
        far.sendall(far.recv(65536))

    with beside(mirror) as (near, _), pytest.raises(HandshakeRefused, match="rank 0 sent a message out of order"):
        greet(near)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        (b"", "rank 1 closed the connection during the handshake"),
        (b"\x05\x00", "rank 1 closed the connection during the handshake"),
        (b"GET / HTTP/1.1\r\n\r\n", "rank 1 speaks another language: a message of 542,393,671 bytes"),
        (frame({"type": "_Hello"}), "rank 1 speaks another language"),
        (frame(handshake._Proof(b"m" * 32)), "rank 1 sent a message out of order"),
    ],
)
def test_a_stranger_is_named_and_let_go(said: bytes, how: str) -> None:
    with beside(listener()) as (near, came):
        near.sendall(said)
        near.shutdown(socket.SHUT_WR)
    assert isinstance(came[0], HandshakeRefused)
    assert how in str(came[0])


def test_a_peer_that_drips_bytes_does_not_move_the_deadline() -> None:
    with beside(listener(seconds=0.3)) as (near, came), suppress(ConnectionError):
        near.sendall(b"\x00\x10\x00\x00")  # a message of 4096 bytes begins
        while not came:
            near.sendall(b"x")
            threading.Event().wait(0.02)
    assert isinstance(came[0], DeadlineExceeded)
    assert "waited 0.3 s for rank 1 to prove the token" in str(came[0])
