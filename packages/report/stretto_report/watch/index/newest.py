"""Read the newest lines of a run's metrics from the end of the file, for the list of runs."""

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
    """Reads the last 256 KiB of ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoded: dict[str, MetricsLine | None] = {}  # by the line as it is written

    def read(self, *, keep: bool) -> tuple[list[StepMetrics], list[EvaluationLine]]:
        """Newest steps, and newest evaluations of the first set, oldest first.

        Args:
            keep: remember the decoded lines, so that the next call decodes only new ones.

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
    """Decode a line; None if it is unreadable. The first line may be cut off; damage is reported when the run is
    opened."""
    try:
        return decode_line(_LINE, row.encode())
    except StoreError:
        return None
