"""TensorBoard's files, in the folder ``tensorboard`` of the run: ``tensorboard --logdir runs`` shows all runs.

By the writer of the package tensorboard itself, which loads no torch, and whose `flush` waits until all is in the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from stretto.audit.symptoms.evidence import Alarm
from stretto.outlets.follower import About, Cursor
from stretto.outlets.points import MetricsPoint
from stretto.store.series.samples import SampledCompletion

_PACKAGE = "tensorboard"
_FOLDER = "tensorboard"


class TensorboardFiles:
    """One more file of events beside those of the run; TensorBoard reads them all as one curve.

    A file that goes on begins with the step that does: of later steps, TensorBoard forgets what earlier files have.
    """

    def __init__(self, about: About, cursor: Cursor) -> None:
        self.run = _FOLDER
        self._began = about.began
        self._events, self._summaries, self._tensors, self._types = (
            importlib.import_module(f"{_PACKAGE}.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "types")
        )
        writer = importlib.import_module(f"{_PACKAGE}.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(about.folder / _FOLDER))
        if cursor.run:
            begin = self._events.SessionLog(status=self._events.SessionLog.START)
            step = max(cursor.sent.values(), default=-1) + 1
            self._writer.add_event(self._events.Event(wall_time=about.began, step=step, session_log=begin))
        else:
            self._text("recipe", 0, (f"{key} = {value}" for key, value in about.config.items()))
            self._text("tags", 0, about.tags)

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        for point in points:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            self._add(point.step, values, point.seconds)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        self._text("samples", step, (line for sample in rows for line in (*_lines(sample), "")))
        self._writer.flush()

    def alarm(self, alarm: Alarm) -> None:
        self._text(f"alarms/{alarm.name}", alarm.first_step, [str(alarm)])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, lines: Iterable[str]) -> None:
        """For TensorBoard's plugin of texts, which reads Markdown: as code, since nothing that a model said is any."""
        text = "\n".join(f"    {line}" for line in lines)
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], 0.0)

    def _add(self, step: int, values: list[Any], seconds: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=self._began + seconds, step=step, summary=summary))


def _lines(sample: SampledCompletion) -> list[str]:
    versions = f"versions {sample.versions[0]} to {sample.versions[-1]}"
    worth = f"{sample.outcome.value}, reward {sample.reward}, {versions}, answer {sample.answer!r}"
    return [worth, "prompt:", *sample.prompt.splitlines(), "completion:", *sample.completion.splitlines()]
