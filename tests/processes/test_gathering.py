"""Promise: writes of one turn are sent in the next, whole and in order; nothing is lost at a close.

Whatever is written, in parts of any size, arrives as written: the law is checked with drawn writes over real sockets.
"""

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.processes.event_loop import run
from stretto.processes.http.transport import Gathered, GatheringTransport


async def ends() -> tuple[GatheringTransport, socket.socket]:
    """A gathering transport, and the socket at its other end."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
    return GatheringTransport(transport, Gathered(loop)), theirs


async def received(theirs: socket.socket) -> bytes:
    """All that arrives until the other end is closed."""
    loop, found = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(20):
        while part := await loop.sock_recv(theirs, 1 << 20):
            found += part
    theirs.close()
    return bytes(found)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=12))
def test_what_is_written_arrives_in_order_whenever_it_is_closed(writes: list[tuple[int, bool]]) -> None:
    """Writes of up to 200,000 bytes, with and without a turn of the event loop behind each."""
    parts = [bytes([number]) * length for number, (length, _) in enumerate(writes)]

    async def work() -> None:
        transport, theirs = await ends()
        arrived = asyncio.create_task(received(theirs))
        for part, (_, turn) in zip(parts, writes, strict=True):
            transport.write(part)
            if turn:
                await asyncio.sleep(0)
        transport.close()
        assert transport.is_closing()
        assert await arrived == b"".join(parts)

    run(work())


async def test_small_writes_of_a_turn_wait_for_its_end_and_count_as_unsent_until_then() -> None:
    transport, theirs = await ends()
    transport.write(b"one ")
    transport.write(b"two")
    assert transport.get_write_buffer_size() == 7
    with pytest.raises(BlockingIOError):
        theirs.recv(10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert theirs.recv(10) == b"one two"
    assert transport.get_write_buffer_size() == 0
    transport.close()
    theirs.close()


async def test_an_abort_drops_what_was_not_sent_and_a_later_write_harms_nobody() -> None:
    (transport, theirs), (other, others) = await ends(), await ends()
    gathered = Gathered(asyncio.get_running_loop())
    first, second = GatheringTransport(transport._inner, gathered), GatheringTransport(other._inner, gathered)
    first.write(b"lost")
    first.abort()
    first.write(b"late")
    second.write(b"sent")
    second.close()
    assert await received(theirs) == b""
    assert await received(others) == b"sent"


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_written_to_a_lost_connection_is_dropped(size: int) -> None:
    async def work() -> None:
        transport, theirs = await ends()
        theirs.close()
        transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)
        transport.write(bytes(size))
        await asyncio.sleep(0)

    run(work())
