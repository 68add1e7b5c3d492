"""A connection to a process that may be on another machine: messages, and heartbeats both ways.

No signal tells that another machine has vanished, and a connection to it stays open. So each side sends a heartbeat, an
empty frame, every second; one that hears nothing takes the other for gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from stretto.core.deadlines import StallTimer
from stretto.core.frames import Unframer, frame
from stretto.core.tasks import cancel_and_wait
from stretto.processes.heartbeat import HEARTBEAT_SECONDS

_READ_BYTES = 1 << 20
_LISTEN_SECONDS = 0.5
_LONGEST_POLL = 1.0
_HEARTBEAT = bytes(4)  # a frame of length 0

Received = TypeVar("Received")


class Peer(Generic[Received]):
    """One end, in asyncio, after the handshake (`processes.handshake`)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
        hung: float,
    ) -> None:
        """`hung`: seconds without a byte from the other side after which it is taken for gone."""
        self._reader, self._writer, self._decoder, self._hung = reader, writer, decoder, hung

    @property
    def here(self) -> str:
        """The address of this machine by which the other side is reached."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, message: msgspec.Struct) -> None:
        """Send one message, whole. It waits while the other side does not read; `listen` ends that wait.

        Raises:
            ConnectionError: the connection is closed.
        """
        self._writer.write(frame(message))
        await self._writer.drain()
        if self._writer.is_closing():
            raise ConnectionResetError("the connection was given up")

    async def listen(self, take: Callable[[Received], None]) -> str:
        """Give every message to `take` until the other side is gone; returns how: ``"closed its connection"``. It has
        no deadline, since a healthy connection lasts as long as its processes; the connection is closed afterwards.

        Raises:
            WireError, msgspec.MsgspecError: the other side sends what is no message.
        """
        heartbeats = asyncio.create_task(self._beat(), name="heartbeats")
        unframer, stall = Unframer(), StallTimer(_LONGEST_POLL)
        try:
            while True:
                data = await self._heard()
                if data == b"":
                    return "closed its connection"
                if (silence := stall.poll(moved=data is not None)) > self._hung:
                    return f"sent no heartbeat for {silence:.0f} s"
                for body in unframer.feed(data or b""):
                    if body:
                        take(self._decoder.decode(body))
        finally:
            self.close()
            await cancel_and_wait([heartbeats])

    def close(self) -> None:
        """Close the connection, whatever was not sent yet."""
        self._writer.transport.abort()

    async def _heard(self) -> bytes | None:
        """What has come; nothing once the connection is closed; None if nothing came for half a second."""
        try:
            async with asyncio.timeout(_LISTEN_SECONDS):
                return await self._reader.read(_READ_BYTES)
        except TimeoutError:
            return None
        except OSError:  # it was reset, or the network says that the machine cannot be reached
            return b""

    async def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the listener hears of the end
            while True:
                if not self._writer.transport.get_write_buffer_size():  # else a message is under way, which is as good
                    self._writer.write(_HEARTBEAT)
                await asyncio.sleep(HEARTBEAT_SECONDS)
