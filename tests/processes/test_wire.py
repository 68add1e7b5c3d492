"""The connection between two processes that may be on two machines, over real sockets.

- Messages arrive whole and in order, large ones in pieces and to many at once; a healthy connection lasts, however long
  nobody has anything to say.
- Silence, an end and what is no message are noticed by the side that listens, and end the waits of the side that sends.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest

from stretto.core.errors import WireError
from stretto.core.frames import frame
from stretto.trainer.messages import TO_TRAINER, SavePolicy, Stop, ToTrainer
from stretto_cluster import wire as wire_module
from stretto_cluster.wire import Wire, join_ends

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


async def end_of(connection: socket.socket) -> Wire[ToTrainer]:
    return Wire(*await asyncio.open_connection(sock=connection), TO_TRAINER)


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Wire[ToTrainer], Wire[ToTrainer]]]:
    near, far = socket.socketpair()
    wires = await end_of(near), await end_of(far)
    yield wires
    for wire in wires:
        wire.cut()


@asynccontextmanager
async def one() -> AsyncIterator[tuple[Wire[ToTrainer], socket.socket]]:
    """A wire, and the socket of a process that speaks otherwise."""
    near, far = socket.socketpair()
    with far:
        wire = await end_of(near)
        yield wire, far
        wire.cut()


async def test_messages_arrive_in_order_and_the_end_is_told() -> None:
    heard: list[ToTrainer] = []
    async with two() as (near, far):
        listening = asyncio.create_task(far.listen(heard.append, 10.0))
        for number in range(100):
            await near.send_all(SavePolicy(folder="x" * 1000 * number))
        await near.send_all(Stop())
        while not (heard and isinstance(heard[-1], Stop)):
            await asyncio.sleep(0.01)
        near.cut()
        how = await listening
    assert [len(order.folder) for order in heard if isinstance(order, SavePolicy)] == [1000 * n for n in range(100)]
    assert how == "closed its connection"


async def test_a_large_order_goes_to_many_in_pieces_no_heartbeat_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """To four, of 8 MiB: nobody hears nothing for long, and no copy waits for each of them."""
    monkeypatch.setattr(wire_module, "HEARTBEAT_SECONDS", 0.001)
    order, waiting = SavePolicy(folder="x" * (8 << 20)), list[int]()

    heard: list[ToTrainer] = []
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(two()) for _ in range(4)]
        listening = [asyncio.create_task(far.listen(heard.append, 5.0)) for _, far in pairs]
        beating = [asyncio.create_task(near.listen(lambda message: None, 20.0)) for near, _ in pairs]
        whole = frame(order)
        sending = asyncio.gather(*(near.send_frame(whole) for near, _ in pairs))
        while not sending.done():
            waiting.append(sum(near._writer.transport.get_write_buffer_size() for near, _ in pairs))
            await asyncio.sleep(0)
        for near, _ in pairs:
            await near.send_all(Stop())
            await near.close()
        ends = {await one for one in listening}
        await asyncio.gather(*beating)
    assert [heard.count(order), heard.count(Stop())] == [4, 4]
    assert ends == {"closed its connection"}
    assert max(waiting) <= 4 * wire_module._PIECE_BYTES


async def test_a_connection_lasts_while_nobody_has_anything_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(wire_module, "_POLL_SECONDS", 0.05)

    async with two() as (near, far):
        tasks = [asyncio.create_task(wire.listen(lambda message: None, 0.5)) for wire in (near, far)]
        await asyncio.sleep(0.8)
        done = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        assert done == [False, False]


async def test_a_peer_that_is_silent_is_given_up_and_nobody_waits_to_send_to_it() -> None:
    async with one() as (wire, _):
        sending = asyncio.create_task(wire.send_all(SavePolicy(folder="x" * (16 << 20))))  # that nobody reads
        how = await wire.listen(lambda message: None, 0.4)
        with pytest.raises(ConnectionError):
            await sending
        assert how == "sent no heartbeat for 0.4 s"


@pytest.mark.parametrize("said", [bytes([255] * 4), frame({"type": "Nothing"})])
async def test_what_is_no_message_ends_the_connection(said: bytes) -> None:
    async with one() as (wire, other):
        other.sendall(said)
        with pytest.raises((WireError, ValueError)):
            await wire.listen(lambda message: None, 5.0)
        with pytest.raises(ConnectionError):
            await wire.send_all(Stop())


async def test_ends_that_are_joined_pass_bytes_on_both_ways_and_end_together() -> None:
    (near, one), (two, far) = socket.socketpair(), socket.socketpair()
    ends = [await asyncio.open_connection(sock=end) for end in (near, one, two, far)]
    joined = asyncio.create_task(join_ends(ends[1], ends[2]))
    (reader, writer), (far_reader, far_writer) = ends[0], ends[3]
    writer.write(b"there" * 100_000)
    far_writer.write(b"back")
    there, back = await far_reader.readexactly(500_000), await reader.readexactly(4)
    writer.close()
    await joined
    end = await far_reader.read()
    far_writer.close()
    await far_writer.wait_closed()
    assert (there, back, end) == (b"there" * 100_000, b"back", b"")
