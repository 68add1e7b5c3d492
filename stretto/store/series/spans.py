"""``spans.jsonl``: the work of every role over time, for the timeline plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from stretto.core.events import Span
from stretto.store.series.lines import LineWriter, read_lines

_DECODER = msgspec.json.Decoder(Span)


class SpanLog:
    """Appends to ``spans.jsonl``; never fails training."""

    def __init__(self, path: Path) -> None:
        self._writer: LineWriter[Span] = LineWriter(path)

    def append(self, spans: Iterable[Span]) -> None:
        self._writer.append(spans)


def read_spans(path: Path) -> list[Span]:
    """All spans of a run, in the order in which they were written.

    Raises:
        StoreError: a line in the middle cannot be read.
    """
    return read_lines(path, _DECODER)
