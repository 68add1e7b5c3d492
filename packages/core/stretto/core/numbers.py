"""Ranges of the numbers that processes and machines send to each other, and JSON that its own reader takes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

#: A number of things or bytes. Like `Whole` and `Moment`, it is checked when a message is decoded: a message with a
#: number outside of its range, or with NaN, is refused.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
#: A number that may be negative, as -1 for no version.
Whole = Annotated[int, msgspec.Meta(gt=-(2**53), lt=2**53)]
#: Seconds of a clock, or between two of them.
Moment = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]


def encoded(value: object) -> bytes:
    """Encode a value as JSON that can be read again as what it is.

    Raises:
        msgspec.MsgspecError: it could not be read: a number is outside of its range, or is not finite, which JSON does
            not know, and the type of its field has no None.
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
