"""TensorBoard event files, in the folder ``tensorboard`` of the run: ``tensorboard --logdir runs`` shows all runs.

Written by the package tensorboard itself, without torch; its `flush` waits until all is in the file.
"""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, How
from stretto_report.outlets.points import MetricsPoint, newest_steps

_PACKAGE = "tensorboard"
_FOLDER = "tensorboard"
_NAME = "events.out.tfevents"
_PATIENCE, _POLL_SECONDS = 2.0, 0.05
_HEAD, _CHECKSUM = struct.Struct("<QI"), 4  # size and checksum before a record, and the bytes of one behind it


class TensorboardFiles:
    """Outlet: one new event file of the run for each process; TensorBoard joins all files of a run in the order of
    their names."""

    def __init__(self, about: About, cursor: Cursor) -> None:
        self.run = _FOLDER
        self._began = about.began
        self._events, self._summaries, self._tensors, self._types = (
            importlib.import_module(f"{_PACKAGE}.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "types")
        )
        folder = about.folder / _FOLDER
        self.had = self._newest_steps(folder)
        writer = importlib.import_module(f"{_PACKAGE}.summary.writer.event_file_writer")
        self._writer = _behind_the_others(folder, lambda: writer.EventFileWriter(str(folder)))
        if not cursor.run:
            self._text("recipe", 0, (f"{key} = {value}" for key, value in about.config.items()))
            self._text("tags", 0, about.tags)

    def _newest_steps(self, folder: Path) -> dict[str, int]:
        """Return the newest step of each curve in the newest file that has points. (Its writer knew the earlier files.)
        Empty if no file has points."""
        for path in sorted(folder.glob(f"{_NAME}.*"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            events = map(self._events.Event.FromString, _records(path))
            if found := newest_steps((event.step, (one.tag for one in event.summary.value)) for event in events):
                return found
        return {}

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

    def close(self, how: How) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, lines: Iterable[str]) -> None:
        """Add a text for TensorBoard's text plugin, as a Markdown code block, since completions are no Markdown."""
        text = "\n".join(f"    {line}" for line in lines)
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], 0.0)

    def _add(self, step: int, values: list[Any], seconds: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=self._began + seconds, step=step, summary=summary))


def _behind_the_others(folder: Path, make: Callable[[], Any]) -> Any:
    """Return a writer, made by `make`, whose file in `folder` sorts after the existing ones. A file name has the second
    of its creation, then the pid. If a file of the same second sorts later, the new file is removed and made again.
    After two seconds the writer is returned even so."""
    before, until = _names(folder), time.monotonic() + _PATIENCE
    while True:
        writer = make()
        own = min(_names(folder) - before)
        if own > max(before, default="") or time.monotonic() > until:
            return writer
        writer.close()
        (folder / own).unlink()
        time.sleep(_POLL_SECONDS)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(f"{_NAME}.*")}


def _records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of an event file; one that is cut off at the end is left out."""
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, _ = _HEAD.unpack(head)
            record = file.read(size + _CHECKSUM)
            if len(record) < size + _CHECKSUM:
                return
            yield record[:size]


def _lines(sample: SampledCompletion) -> list[str]:
    versions = f"versions {sample.versions[0]} to {sample.versions[-1]}"
    worth = f"{sample.outcome.value}, reward {sample.reward}, {versions}, answer {sample.answer!r}"
    return [worth, "prompt:", *sample.prompt.splitlines(), "completion:", *sample.completion.splitlines()]
