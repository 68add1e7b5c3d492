"""Alarms of a followed run (`audit.alarms`), each sent once to a tool."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from stretto.store.folder.run_folder import RunFolder
from stretto.store.series.follower import LineFollower
from stretto.store.series.metrics import EvaluationLine, MetricsLine, StepMetrics
from stretto_report.audit.alarms import AlarmWatch
from stretto_report.audit.symptoms.evidence import Alarm

_METRICS: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)


class AlarmFollower:
    """Follows ``metrics.jsonl`` of a run and computes its alarms. It reads from the first line, even if the tool
    already has these lines, because alarms compare with the first steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines, self._watch = LineFollower(RunFolder(folder).metrics, _METRICS), AlarmWatch.of(folder)

    def new(self, sent: Collection[str]) -> list[Alarm]:
        """Current alarms whose titles are not in `sent`; empty while there is no new line.

        Raises:
            StoreError: the metrics cannot be read.
        """
        if not self._read():
            return []
        return [alarm for alarm in self._watch.alarms() if alarm.title not in sent]

    def _read(self) -> bool:
        """Read new lines; return whether there were any."""
        found = False
        while True:
            lines, again = self._lines.read_on()
            if again:
                self._watch = AlarmWatch.of(self._folder)
            for line in lines:
                if isinstance(line, StepMetrics):
                    self._watch.step(line)
                elif type(line) is EvaluationLine:  # evaluations of further sets raise no alarms
                    self._watch.evaluated(line)
            found |= bool(lines)
            if not self._lines.more:
                return found
