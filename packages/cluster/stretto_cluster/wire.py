"""Connections between machines: handshake, messages both ways, heartbeats.

A machine that vanishes sends no signal, and its connection stays open. So both sides send something at least every
second, and one that receives nothing for long considers the other gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import HandshakeBroken, HandshakeRefused, MachineLost, Problem, RecipeError
from stretto.core.frames import LARGEST_FRAME, Unframer, frame
from stretto.core.tasks import cancel_and_wait, first_of
from stretto.processes.event_loop import send
from stretto.processes.heartbeat import HEARTBEAT_SECONDS
from stretto_cluster.handshake import Judge, admit

_READ_BYTES = 1 << 17
_PIECE_BYTES = 1 << 20
_UNSENT = 8 << 20  # more unsent bytes mean that the other side has stopped reading
_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 10.0
_HANDSHAKE_SECONDS = 10.0
_STRANGERS = 256
_HEARTBEAT = bytes(4)  # a frame of length 0

Received = TypeVar("Received")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Wire(Generic[Received]):
    """One side of a connection between machines, in asyncio, after the handshake (`stretto_cluster.handshake`).

    Example::

        wire.send(Beat(...))
        while (message := await wire.receive()) is not None:   # None: the other side has closed
            ...
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
        largest: int = LARGEST_FRAME,
    ) -> None:
        """Send and receive messages over an open connection. `decoder`: of received messages. `largest`: most bytes of
        one; a larger one raises WireError."""
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._unframer = Unframer(largest)
        self._bodies: deque[memoryview] = deque()
        self._heard = self._piecemeal = False

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting; it is dropped if the connection is closed. The connection is closed, and
        unsent data are lost, if more than 8 MiB wait to be read by the peer."""
        assert not self._piecemeal, "a frame is under way"
        if not self._writer.is_closing():
            self._writer.write(frame(message))
            if self._writer.transport.get_write_buffer_size() > _UNSENT:
                self.cut()

    async def send_all(self, message: msgspec.Struct) -> None:
        """Encode a message of any size and send it by `send_frame`. Nothing else may be sent meanwhile. Raises
        ConnectionError if the connection is closed."""
        await self.send_frame(frame(message))

    async def send_frame(self, whole: bytes | bytearray) -> None:
        """Send a frame of any size in pieces, waiting while the peer does not read; `listen` bounds that wait. Nothing
        else may be sent meanwhile.

        Raises:
            ConnectionError: the connection is closed.
        """
        pieces = memoryview(whole)
        self._piecemeal = True
        try:
            for start in range(0, len(pieces), _PIECE_BYTES):
                await send(self._writer, pieces[start : start + _PIECE_BYTES])
                if self._writer.is_closing():
                    raise ConnectionResetError("the connection was given up")
                await asyncio.sleep(0)  # `drain` does not yield to other tasks if the peer reads fast enough
        finally:
            self._piecemeal = False

    async def receive(self) -> Received | None:
        """Wait for the next message and return it; None once the connection is closed. No deadline: `watch` sets one.

        Raises:
            WireError, msgspec.MsgspecError: the peer speaks another protocol.
        """
        while not self._bodies:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:  # it was reset, or the network says that the machine cannot be reached
                data = b""
            if not data:
                return None
            self._heard = True
            self._bodies.extend(body for body in self._unframer.feed(data) if body)
        return self._decoder.decode(self._bodies.popleft())

    async def watch(self, lease: float) -> str:
        """Wait until nothing was received for `lease` seconds, while another task calls `receive`; returns this as a
        reason. Time in which this process itself was stopped does not count."""
        stall = StallTimer(2 * _POLL_SECONDS)
        while stall.poll(moved=self._heard) < lease:
            self._heard = False
            await asyncio.sleep(_POLL_SECONDS)
        return f"sent no heartbeat for {lease:g} s"

    async def listen(self, take: Callable[[Received], None], lease: float) -> str:
        """Pass each received message to `take`, and send heartbeats, until the peer is gone or silent for `lease`
        seconds; returns the reason. Raises WireError or msgspec.MsgspecError if the peer speaks another protocol."""
        beats = asyncio.create_task(self._beat())
        try:
            return await self.take_all(take, lease)
        finally:
            await cancel_and_wait([beats])

    async def take_all(self, take: Callable[[Received], None], lease: float) -> str:
        """Pass each received message to `take` until the peer is gone; closes the connection and returns the reason:
        ``"closed its connection"``, or that nothing was received for `lease` seconds. No deadline, because a healthy
        connection lasts as long as its processes.

        Raises:
            WireError, msgspec.MsgspecError: the peer speaks another protocol.
        """

        async def take_each() -> str:
            while (message := await self.receive()) is not None:
                take(message)
            return "closed its connection"

        taken, silence = asyncio.create_task(take_each()), asyncio.create_task(self.watch(lease))
        try:
            await first_of(taken, silence)
            return taken.result() if taken.done() else silence.result()
        finally:
            self.cut()
            await cancel_and_wait([silence, taken])

    async def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the listener hears of the end
            while True:  # a message under way serves as a heartbeat
                if not (self._piecemeal or self._writer.transport.get_write_buffer_size()):
                    await send(self._writer, _HEARTBEAT)
                await asyncio.sleep(HEARTBEAT_SECONDS)

    def cut(self) -> None:
        """Close the connection at once; unsent data are lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection after everything is sent; waits for at most a second."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    @property
    def local_host(self) -> str:
        """IP address of this machine, as the connection uses it: the peer can reach the machine at it."""
        name: tuple[str, int] = self._writer.get_extra_info("sockname")
        return name[0]


class Reception:
    """Admission of callers that prove a token, inside TLS if `context` is given. The number of callers that have not
    proved it yet is bounded: a further one replaces the oldest."""

    def __init__(self, token: str, context: ssl.SSLContext | None = None) -> None:
        self._token, self._context = token, context
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    def comes(self, writer: asyncio.StreamWriter) -> None:
        """Count a caller that has connected as one that has not proved the token, until `admit` ends. Call it at once,
        before any await. If there are 256 such callers, the connection of the oldest is closed."""
        if len(self._strangers) >= _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # now, because its task ends only later
            oldest.transport.abort()
        self._strangers[writer] = None

    async def admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: bytes, judge: Judge, peer: str
    ) -> bytes:
        """Admit a caller: returns its introduction once it has proved the token and `judge` has accepted it. `judge` is
        called with the introduction and returns why the caller is refused, else "". The caller gets `ours`; `peer`
        names it in errors. The connection stays open.

        Raises:
            HandshakeRefused: the caller did not prove the token, or `judge` refused it; the connection is unusable.
            HandshakeBroken: the caller closed the connection meanwhile.
            DeadlineExceeded: the handshake took longer than 10 seconds.
        """
        try:
            if self._context is not None:
                await self._encrypt(writer, self._context, peer)
            return await admit(reader, writer, self._token, ours, judge, peer=peer, seconds=_HANDSHAKE_SECONDS)
        finally:
            self._strangers.pop(writer, None)

    @staticmethod
    async def _encrypt(writer: asyncio.StreamWriter, context: ssl.SSLContext, peer: str) -> None:
        try:
            await writer.start_tls(context, ssl_handshake_timeout=_HANDSHAKE_SECONDS)
        except ssl.SSLError as error:
            raise HandshakeRefused(peer, f"does not speak our TLS ({error.reason or error})") from None
        except OSError as error:
            raise HandshakeBroken(peer, "closed the connection in the handshake of TLS") from error


async def connect(address: str, context: ssl.SSLContext | None) -> Stream:
    """Open a connection to ``host:port`` or ``unix:/path``. `context`: TLS; None: no TLS.

    Raises:
        MachineLost: the connection is refused, or the address cannot be reached.
        HandshakeRefused: the listener does not accept our TLS.
        DeadlineExceeded: no reply within 10 seconds.
        RecipeError: the address is malformed.
    """
    host, _, port = address.rpartition(":")
    unix = address.startswith("unix:")
    if not unix and not (port.isdecimal() and int(port) < 65_536):
        raise RecipeError([Problem("address", repr(address), "give host:port")])
    try:
        async with deadline("the caller", f"a connection to {address}", _CONNECT_SECONDS):
            if unix:
                return await asyncio.open_unix_connection(address.removeprefix("unix:"))
            return await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except ssl.SSLError as error:
        raise HandshakeRefused(address, f"does not accept our TLS ({error.reason or error})") from None
    except (OSError, UnicodeError) as error:  # a name that no resolver takes
        raise MachineLost(address, f"does not answer ({getattr(error, 'strerror', None) or error})") from None


async def join_ends(one: Stream, two: Stream) -> None:
    """Forward bytes both ways until one of the two connections ends, then close both."""
    ways = [asyncio.create_task(_pass_on(one[0], two[1])), asyncio.create_task(_pass_on(two[0], one[1]))]
    try:
        await first_of(*ways)
    finally:
        await cancel_and_wait([*ways])
        for _, writer in (one, two):
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            await send(writer, data)
