"""Time spans of a run's roles, read from ``spans.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stretto.core.events import Span
from stretto.store.series.lines import iterate_lines, read_lines

_SPANS = msgspec.json.Decoder(Span)


def read_spans(path: Path) -> list[Span]:
    """Read all complete lines of the file ``spans.jsonl`` at `path`, in the order in which they were written. Empty if
    there is no file. Raises StoreError if a complete line cannot be read."""
    return read_lines(path, _SPANS)


def iterate_spans(path: Path) -> Iterator[Span]:
    """Read the complete lines of the file ``spans.jsonl`` at `path` one at a time, in the order in which they were
    written. Nothing if there is no file.

    Raises (while it is iterated):
        StoreError: a complete line cannot be read.
    """
    return iterate_lines(path, _SPANS)


def role_rank(role: str) -> tuple[int, str, int]:
    """Return a sort key for the name of a role: conductor, trainer, engines, rewards, then others by name; engine-10
    after engine-9."""
    kind, _, number = role.rpartition("-")
    if not number.isdecimal():
        kind, number = role, "0"
    place = {"conductor": 0, "trainer": 1, "engine": 2, "rewards": 3}.get(kind, 4)
    return place, kind, int(number)
