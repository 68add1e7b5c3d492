"""A transport that sends the small writes of one iteration of the event loop together.

A write to a socket wakes the process at its other end, which costs as much as ten further writes. If 64 streams to one
client get a token each in one iteration, their writes follow directly on each other, and the client is woken once.
"""

from __future__ import annotations

import asyncio
from typing import Any

_AT_ONCE = 1 << 16  # bytes: a longer write is not delayed


class Gathered:
    """Transports of one event loop with small writes to send in its next iteration."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport) -> None:
        """Flush this transport in the next iteration."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport whose small writes wait for the next iteration of the event loop; all else passes to `inner`."""

    def __init__(self, inner: asyncio.Transport, gathered: Gathered) -> None:
        super().__init__()
        self._inner, self._gathered = inner, gathered
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data after everything that was written before; small data wait for the next iteration."""
        if len(data) > _AT_ONCE:
            self.flush()
            self._inner.write(data)
            return
        if not self._parts:
            self._gathered.add(self)
        self._parts.append(bytes(data))

    def flush(self) -> None:
        """Pass all waiting data to `inner` now."""
        parts, self._parts = self._parts, []
        if parts and not self._inner.is_closing():
            self._inner.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Close the connection after everything that was written is sent."""
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        """Close it and drop unsent data."""
        self._parts.clear()
        self._inner.abort()

    def get_write_buffer_size(self) -> int:
        """Number of written bytes that are not yet passed to the kernel."""
        return sum(map(len, self._parts)) + self._inner.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection, as of `inner`."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._inner.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass received data to this protocol from now on."""
        self._inner.set_protocol(protocol)
