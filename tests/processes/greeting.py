"""The handshake over a connected socket, for threads of tests."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from stretto_cluster.handshake import Judge, admit, call


def call_from_thread(connection: socket.socket, key: str, ours: bytes, *, peer: str, seconds: float = 10) -> bytes:
    """`call`; what comes after the handshake may be lost."""
    return _greeted(connection, lambda reader, writer: call(reader, writer, key, ours, peer=peer, seconds=seconds))


def admit_from_thread(
    connection: socket.socket, key: str, ours: bytes, judge: Judge, *, peer: str, seconds: float = 10
) -> bytes:
    """`admit`; what comes after the handshake may be lost."""
    return _greeted(
        connection, lambda reader, writer: admit(reader, writer, key, ours, judge, peer=peer, seconds=seconds)
    )


def _greeted(
    connection: socket.socket, greet: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]
) -> bytes:
    async def greeted() -> bytes:
        reader, writer = await asyncio.open_connection(sock=connection.dup())
        try:
            return await greet(reader, writer)
        finally:
            writer.close()

    try:
        return asyncio.run(greeted())
    finally:
        connection.setblocking(True)  # the loop's copy of the socket is the same file, which does not block
