"""Decoding recorded segments. Since format 6 of the ledger the tokens of a segment are packed bytes; before, they were
three lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stretto.core.records import Segment, StopReason

_Old = tuple[
    tuple[int, ...],
    tuple[float, ...],
    tuple[int, ...],
    int,
    StopReason | None,
    tuple[tuple[str, int], ...],
    int | None,
    str,
    float | None,
]
_FURTHER = (0, None, (), None, "", None)  # defaults of the fields that the oldest formats do not have


def segment_of(parts: Sequence[Any]) -> Segment:
    """Build a segment from its recorded fields, of either format; a resumed run may have both.

    Raises:
        msgspec.ValidationError, ValueError: the fields do not form a segment.
    """
    if parts and isinstance(parts[0], bytes):
        return msgspec.convert(parts, Segment)
    return Segment.of(*msgspec.convert([*parts, *_FURTHER[len(parts) - 3 :]], _Old))
