"""Framing of messages on a byte stream: a length, then that many bytes of MessagePack."""

from __future__ import annotations

import struct

import msgspec

from stretto.core.errors import WireError

LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

#: Largest frame, in bytes, that a receiver accepts by default.
LARGEST_FRAME = 1 << 30
#: Largest possible frame, in bytes; ranks of the trainer accept it. At 12 to 16 bytes per token: 270 million tokens.
LARGEST_BATCH = (1 << 32) - 1


def frame(message: object) -> bytearray:
    """Encode one message as a frame.

    Raises:
        WireError: the message has 4 GiB or more.
    """
    body = bytearray(LENGTH.size)
    _ENCODER.encode_into(message, body, LENGTH.size)
    if (size := len(body) - LENGTH.size) > LARGEST_BATCH:
        raise WireError(f"a message of {size:,} bytes; at most {LARGEST_BATCH:,} are allowed")
    LENGTH.pack_into(body, 0, size)
    return body


class Unframer:
    """Splits a byte stream, received in pieces of any size, into the bodies of its frames. `largest`: most bytes of a
    body.

    >>> unframer = Unframer()
    >>> unframer.feed(b"\\x02\\x00\\x00"), unframer.feed(b"\\x00ok")
    ([], [b'ok'])
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        self._rest, self._wanted, self._largest = bytearray(), 0, largest

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Feed received bytes; returns the bodies of the frames that are now complete; an incomplete frame is kept for
        the next call.

        Raises:
            WireError: a frame is longer than allowed.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:  # a large frame comes in many pieces
                return []
            data, self._rest = self._rest, bytearray()
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
            bodies.append(bytes(memoryview(data)[at + LENGTH.size : end]))
            at = end
        self._rest += data[at:]
        return bodies
