"""Newest lines of a run's metrics, read from the end of the file, for the list of runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.core.errors import StoreError
from stretto.store.series.follower import decode_line
from stretto.store.series.metrics import EvaluationLine, MetricsLine, StepMetrics
from stretto_report.watch.index.files import read_text

_TAIL = 1 << 18  #: bytes

_LINE: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)


class NewestLines:
    """Reads the end of ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoded: dict[str, MetricsLine | None] = {}  # by the line as it is written

    def read(self, *, keep: bool) -> tuple[list[StepMetrics], list[EvaluationLine]]:
        """Newest steps, and evaluations of the first set.

        Args:
            keep: for repeated calls: decode only lines that are new since the last one.

        Raises:
            StoreError: it is no regular file.
        """
        known = self._decoded
        rows = (read_text(self._path, _TAIL, end=True) or "").split("\n")[:-1]
        found = {row: known[row] if row in known else _decoded(row) for row in rows}
        self._decoded = found if keep else {}
        lines = found.values()
        steps = [line for line in lines if isinstance(line, StepMetrics)]
        return steps, [line for line in lines if type(line) is EvaluationLine]


def _decoded(row: str) -> MetricsLine | None:
    """Decoded line, None if unreadable: the first line is cut off, and damage is reported when the run is opened."""
    try:
        return decode_line(_LINE, row.encode())
    except StoreError:
        return None
