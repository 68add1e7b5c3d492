"""A connection between two machines of a run: frames both ways, and how long the other side has been silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from typing import Generic, TypeVar

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import DeadlineExceeded, HandshakeRefused, MachineLost, Problem, RecipeError
from stretto.core.frames import Unframer, frame

_READ_BYTES = 1 << 16
_LARGEST = 1 << 20  # bytes of a message: weights and completions go other ways
_UNSENT = 8 << 20  # bytes: the other side does not read any more
_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 10.0

Received = TypeVar("Received")


class Wire(Generic[Received]):
    """One side's end.

    Example::

        wire.send(Beat(...))
        while (message := await wire.receive()) is not None:   # None: the other side has closed
            ...
    """

    def __init__(
        self,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
    ) -> None:
        self.peer = peer
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._unframer = Unframer(_LARGEST)
        self._bodies: deque[bytes] = deque()
        self._heard = False

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting. A peer that has stopped reading is cut off."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))
            if self._writer.transport.get_write_buffer_size() > _UNSENT:
                self.cut()

    async def receive(self) -> Received | None:
        """The next message; None once the connection is closed. `watch` bounds the wait.

        Raises:
            WireError, msgspec.MsgspecError: the peer speaks something else.
        """
        while not self._bodies:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                return None
            self._heard = True
            self._bodies.extend(self._unframer.feed(data))
        return self._decoder.decode(self._bodies.popleft())

    async def watch(self, lease: float) -> str:
        """Returns, with the reason, when nothing has come for `lease` seconds; those in which this process itself was
        stopped do not count."""
        stall = StallTimer(2 * _POLL_SECONDS)
        while stall.poll(moved=self._heard) < lease:
            self._heard = False
            await asyncio.sleep(_POLL_SECONDS)
        return f"sent no heartbeat for {lease:g} s"

    def cut(self) -> None:
        """Close at once; what is unsent is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close, once everything is sent; waits a moment at most."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    @property
    def local_host(self) -> str:
        """The address of this machine by which the peer is reached."""
        name: tuple[str, int] = self._writer.get_extra_info("sockname")
        return name[0]


async def connect(address: str, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to ``host:port`` or ``unix:/path``.

    Raises:
        MachineLost: nobody answers there.
        HandshakeRefused: who answers does not accept our TLS.
        DeadlineExceeded: nothing comes back.
        RecipeError: it is no address.
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


def bound(listen: str, port: int | None = None) -> socket.socket:
    """A socket that is bound to ``host:port`` of this machine, or to another port there; an empty host is every
    interface.

    Raises:
        RecipeError: it is no address, or cannot be had.
    """
    host, _, told = listen.rpartition(":")
    found = "is no host:port"
    if told.isdecimal() and int(told) < 65_536:
        try:
            where = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", told, type=socket.SOCK_STREAM)
            family, _, _, _, address = min(where, key=lambda entry: entry[0])  # IPv4 first
            reserved = socket.socket(family)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind(address if port is None else (address[0], port, *address[2:]))
            except OSError:
                reserved.close()
                raise
            return reserved
        except (OSError, UnicodeError) as error:  # a name that no resolver takes
            found = getattr(error, "strerror", None) or str(error)
    raise RecipeError(
        [Problem(f"cluster.listen: {listen!r}", found, "give host:port of this machine, with a free port")]
    )


async def speaks_tls(address: str) -> bool:
    """Whether the listener at `address` expects TLS."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # it is sent nothing
    try:
        _, writer = await connect(address, anyone)
    except (MachineLost, HandshakeRefused, DeadlineExceeded):
        return False
    writer.transport.abort()
    return True
