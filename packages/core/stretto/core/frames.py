"""Framing of messages on a byte stream: a length, then that many bytes of MessagePack."""

from __future__ import annotations

import struct

import msgspec

from stretto.core.errors import WireError

LENGTH = struct.Struct("<I")

#: Largest allowed frame.
LARGEST_FRAME = 1 << 30

#: Largest frame of all, for readers of a run's own orders: a batch of the paper's has up to 240 million tokens of 16
#: bytes.
LARGEST_ORDER = (1 << 32) - 1


def frame(message: object) -> bytes:
    """Encode one message as a frame.

    Raises:
        WireError: it is longer than any frame.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > LARGEST_ORDER:
        raise WireError(f"a frame of {len(body):,} bytes; at most {LARGEST_ORDER:,} are possible")
    return LENGTH.pack(len(body)) + body


class Unframer:
    """Splits a byte stream into frame bodies, however it was chopped.

    >>> unframer = Unframer()
    >>> unframer.feed(b"\\x02\\x00\\x00"), unframer.feed(b"\\x00ok")
    ([], [b'ok'])
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        self._rest, self._wanted, self._largest = bytearray(), 0, largest

    def feed(self, data: bytes) -> list[bytes]:
        """Feed received bytes; returns the bodies of the frames that they complete.

        Raises:
            WireError: a frame longer than allowed.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:  # a large frame comes in many pieces
                return []
            data, self._rest = bytes(self._rest), bytearray()
        at, bodies = 0, []
        self._wanted = LENGTH.size
        while len(data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if length > self._largest:
                raise WireError(f"a frame of {length:,} bytes; at most {self._largest:,} are allowed")
            end = at + LENGTH.size + length
            if end > len(data):
                self._wanted = end - at
                break
            bodies.append(data[at + LENGTH.size : end])
            at = end
        self._rest += data[at:]
        return bodies
