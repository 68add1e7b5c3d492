"""Segments as they are on record: those of format 6 are packed, those of earlier ones have three lists of numbers."""

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
_FURTHER = (0, None, (), None, "", None)  # fields that the oldest do not have


def segment_of(parts: Sequence[Any]) -> Segment:
    """The segment of these fields; a run that is resumed has both kinds.

    Raises:
        msgspec.ValidationError, ValueError: they are those of no segment.
    """
    if parts and isinstance(parts[0], bytes):
        return msgspec.convert(parts, Segment)
    return Segment.of(*msgspec.convert([*parts, *_FURTHER[len(parts) - 3 :]], _Old))
