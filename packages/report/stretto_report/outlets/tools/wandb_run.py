"""Weights & Biases. Its mode is set by its own variables (``WANDB_MODE=offline``); its files are in the run folder,
and are read again (LevelDB's log format; each record is a W&B message).

A point is safe once it is in the file; points still in W&B's process are lost with it.
"""

from __future__ import annotations

import importlib
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, How
from stretto_report.outlets.points import COLUMNS, MetricsPoint, row_of

_HEADER, _BLOCK = 7, 32_768  # bytes
_PART = struct.Struct("<IHB")  # checksum, size, kind
_WHOLE, _LAST = 1, 4  # kinds of parts that end a record


class _WrittenPoints:
    """Reads one W&B log file (``run-ID.wandb``) as it grows. `newest`: W&B's own step of the newest history record that
    was read; 0: none."""

    def __init__(self, wandb: Any, path: Path) -> None:
        self._message = importlib.import_module(f"{wandb.__name__}.proto.wandb_internal_pb2").Record
        self._path, self._at, self._partial = path, _HEADER, b""
        self.newest = 0

    def read_on(self) -> int:
        """Read the records written since the last call, and return `newest`."""
        for record in self._records():
            found = self._message.FromString(record)
            if found.HasField("history"):
                self.newest = max(self.newest, found.history.step.num)
        return self.newest

    def _records(self) -> Iterator[bytes]:
        """Yield the complete records after the last one read; an incomplete one is left for later. Nothing if there is
        no file."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while True:
                if (room := _BLOCK - self._at % _BLOCK) < _PART.size:  # too little for a part
                    self._at += room
                file.seek(self._at)
                head = file.read(_PART.size)
                if len(head) < _PART.size:
                    return
                _, size, kind = _PART.unpack(head)
                body = file.read(size)
                if kind == 0 or len(body) < size:
                    return
                self._at += _PART.size + size
                self._partial += body
                if kind in (_WHOLE, _LAST):
                    yield self._partial
                    self._partial = b""


def written(wandb: Any, folder: Path, run: str) -> int:
    """Return W&B's own step of the newest history record of the run with the id `run`, in any log file below `folder`;
    0: none. `wandb`: the module."""
    files = folder.glob(f"*run-*/run-{run}.wandb")
    return max((_WrittenPoints(wandb, path).read_on() for path in files), default=0)


_PACKAGE = "wandb"
_LONGEST_TITLE = 63  # characters
_APART = 4  # W&B steps from one point to the next; those in between are for tables
_FLUSH_SECONDS = 0.1  # between two writes of W&B's process to its file
_POLL_SECONDS = 0.02
_WRITE_SECONDS = 60.0  # most seconds in which W&B writes a point; fewer than those after which a tool counts as hung


class WandbRun:
    """Outlet: a run of W&B, resumed by its id.

    Curves are drawn against stretto's steps. W&B's own step is computed from the index of a point, and W&B ignores a
    step that it has. So a point may be sent again, if a process died before it wrote the cursor.

    W&B uses a process of its own, which dies with this process. So a point counts as sent when it is in W&B's file.
    Points in the files of earlier processes are not sent again.
    """

    had: Mapping[str, int] = {}  # not needed: W&B's steps tell repeated points

    def __init__(self, about: About, cursor: Cursor) -> None:
        self._wandb = wandb = importlib.import_module(_PACKAGE)
        self.run = cursor.run or uuid.uuid4().hex[:16]
        self._had = self._before = written(wandb, about.folder / "wandb", self.run) // _APART
        self._run = wandb.init(
            project=about.project,
            name=about.name,
            id=self.run,
            resume="allow",
            dir=str(about.folder),
            config=dict(about.config),
            tags=list(about.tags),
            allow_val_change=True,  # a resumed run may have more steps
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,
            ),
        )
        self._written = _WrittenPoints(wandb, Path(self._run.settings.sync_file))
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        for number, point in enumerate(points, start=first + 1):
            if number > self._had:
                self._run.log({"step": point.step, **point.values}, step=_APART * number, commit=True)
                self._had = number
        if self._had > self._before:
            self._wait_for(_APART * self._had)

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[row_of(sample) for sample in rows])
        number = max(_APART * points + 1, self._run.step)
        self._run.log({"step": step, "samples": table}, step=number, commit=True)
        self._wait_for(number)

    def alarm(self, alarm: Alarm) -> None:
        self._run.alert(title=alarm.title[:_LONGEST_TITLE], text=str(alarm), level="WARN")

    def _wait_for(self, number: int) -> None:
        """Wait until the point with W&B's step `number` is in the file, where it survives the process. Raises
        TimeoutError if W&B does not write it within a minute."""
        until = time.monotonic() + _WRITE_SECONDS
        while self._written.read_on() < number:
            if time.monotonic() > until:
                raise TimeoutError(f"W&B has not written its step {number} within {_WRITE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def close(self, how: How) -> None:
        self._run.finish(exit_code=1 if how == "failed" else 0)
