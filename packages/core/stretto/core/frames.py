"""Framing of messages on a byte stream: a length, then that many bytes of MessagePack. Also types for the allowed
ranges of numbers in messages, and JSON that is checked by decoding it again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated

import msgspec

from stretto.core.errors import WireError

LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

#: Largest frame, in bytes, that a receiver accepts by default.
LARGEST_FRAME = 1 << 30
#: Largest possible frame, in bytes; ranks of the trainer accept it. At 12 to 16 bytes per token: 270 million tokens.
LARGEST_BATCH = (1 << 32) - 1

#: A number of things or bytes. Like `Whole` and `Moment`, it is checked when a message is decoded: a message with a
#: number outside of its range, or with NaN, is refused.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
#: A number that may be negative, as -1 for no version.
Whole = Annotated[int, msgspec.Meta(gt=-(2**53), lt=2**53)]
#: A name of a role, a machine, a kind of work, a release.
Name = Annotated[str, msgspec.Meta(max_length=256)]
#: Seconds of a clock, or between two of them.
Moment = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]


def frame(message: object) -> bytearray:
    """Encode one message as a frame. Raises WireError if the message has 4 GiB or more."""
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
    >>> unframer.feed(b"\\x02\\x00\\x00"), list(map(bytes, unframer.feed(b"\\x00ok")))
    ([], [b'ok'])
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        self._rest, self._wanted, self._largest = bytearray(), 0, largest

    def feed(self, data: bytes | bytearray) -> list[memoryview]:
        """Feed received bytes; returns the bodies of the frames that are now complete, as views of the bytes; an
        incomplete frame is kept for the next call. Raises WireError if a frame is longer than allowed."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:  # a large frame comes in many pieces
                return []
            data, self._rest = self._rest, bytearray()
        at, bodies, view = 0, list[memoryview](), memoryview(data)
        self._wanted = LENGTH.size
        while len(data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if length > self._largest:
                raise WireError(f"a frame of {length:,} bytes; at most {self._largest:,} are allowed")
            end = at + LENGTH.size + length
            if end > len(data):
                self._wanted = end - at
                break
            bodies.append(view[at + LENGTH.size : end])
            at = end
        if at < len(data):
            self._rest += view[at:]
        return bodies


def encoded(value: object) -> bytes:
    """Encode a value as JSON, and check that each record in it can be decoded as its own type.

    Raises:
        msgspec.MsgspecError: a number is outside of the range of its field, or is not finite; but in a record's field
            that may be None, a number that is not finite becomes None.
        UnicodeEncodeError: a text has a lone surrogate.
    """
    text = msgspec.json.encode(value)
    _read_again(value, text)
    return text


def _read_again(value: object, text: bytes) -> None:
    if isinstance(value, msgspec.Struct):
        msgspec.json.decode(text or msgspec.json.encode(value), type=type(value))
    elif isinstance(value, Mapping):
        for part in value.values():
            _read_again(part, b"")
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            _read_again(part, b"")
    elif isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError(f"{value} is no number of JSON")
