"""The connection between two processes that may be on two machines, over real sockets.

- Messages arrive whole and in order; a healthy connection lasts, however long nobody has anything to say.
- Silence, an end and what is no message are noticed by whoever listens, and end the waits of whoever sends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from stretto.core.errors import WireError
from stretto.core.frames import frame
from stretto.processes.peer import Peer
from stretto.trainer.messages import TO_TRAINER, SavePolicy, Stop, ToTrainer

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


async def end_of(wire: socket.socket, hung: float) -> Peer[ToTrainer]:
    reader, writer = await asyncio.open_connection(sock=wire)
    return Peer(reader, writer, TO_TRAINER, hung)


@asynccontextmanager
async def two(hung: float = 10.0) -> AsyncIterator[tuple[Peer[ToTrainer], Peer[ToTrainer]]]:
    near, far = socket.socketpair()
    peers = await end_of(near, hung), await end_of(far, hung)
    yield peers
    for peer in peers:
        peer.close()


@asynccontextmanager
async def one(hung: float) -> AsyncIterator[tuple[Peer[ToTrainer], socket.socket]]:
    """A peer, and the socket of a process that is no peer."""
    near, far = socket.socketpair()
    with far:
        peer = await end_of(near, hung)
        yield peer, far
        peer.close()


def test_messages_arrive_in_order_and_the_end_is_told() -> None:
    async def talk() -> tuple[list[ToTrainer], str]:
        heard: list[ToTrainer] = []
        async with two() as (near, far):
            listening = asyncio.create_task(far.listen(heard.append))
            for number in range(100):
                await near.send(SavePolicy(folder="x" * 1000 * number))
            await near.send(Stop())
            while not (heard and isinstance(heard[-1], Stop)):
                await asyncio.sleep(0.01)
            near.close()
            return heard, await listening

    heard, how = run(talk())
    assert [len(order.folder) for order in heard if isinstance(order, SavePolicy)] == [1000 * n for n in range(100)]
    assert how == "closed its connection"


def test_a_connection_lasts_while_nobody_has_anything_to_say() -> None:
    async def idle() -> list[bool]:
        async with two(hung=1.6) as (near, far):
            tasks = [asyncio.create_task(peer.listen(lambda message: None)) for peer in (near, far)]
            await asyncio.sleep(2.6)
            done = [task.done() for task in tasks]
            for task in tasks:
                task.cancel()
            return done

    assert run(idle()) == [False, False]


def test_a_peer_that_is_silent_is_given_up_and_nobody_waits_to_send_to_it() -> None:
    async def talk() -> str:
        async with one(hung=0.4) as (peer, _):
            sending = asyncio.create_task(peer.send(SavePolicy(folder="x" * (64 << 20))))  # that nobody reads
            how = await peer.listen(lambda message: None)
            with pytest.raises(ConnectionError):
                await sending
            return how

    assert run(talk()).startswith("sent no heartbeat for")


@pytest.mark.parametrize("said", [bytes([255] * 4), frame({"type": "Nothing"})])
def test_what_is_no_message_ends_the_connection(said: bytes) -> None:
    async def talk() -> None:
        async with one(hung=5.0) as (peer, other):
            other.sendall(said)
            with pytest.raises((WireError, ValueError)):
                await peer.listen(lambda message: None)
            with pytest.raises(ConnectionError):
                await peer.send(Stop())

    run(talk())
