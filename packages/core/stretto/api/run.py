"""`stretto.Run`: access to a run's folder and, if the run was started here, to the process that writes it."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from stretto.api.orders import RunProcess
from stretto.core.errors import RoleDied, StrettoError
from stretto.store import lock
from stretto.store.ending import condition
from stretto.store.export import read_trajectories
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import Inspection, inspect_run
from stretto.store.series.metrics import EvaluationLine, MetricsLine, StepMetrics, read_metrics

_POLL_SECONDS = 0.1
_SAVING_SECONDS = 60.0  # beyond `deadlines.stop`: a checkpoint and a policy are written


def open_run(folder: str | Path) -> Run:
    """Open a run that was started elsewhere, for reading. It may be running, finished or dead, and is never stopped
    through the returned object.

    Example::

        run = stretto.open_run("runs/first")
        print(run.accuracy, run.metrics[-1].staleness_max)

    Raises:
        RunFolderError: the folder holds no run.
    """
    return Run(RunFolder.open(folder))


class Run:
    """A run: gives its training steps as they happen, its accuracy, and its trajectories.

    A run from `stretto.train` continues until its last step or until it is stopped: by `stop`, at the end of a ``with``
    block, by leaving a loop over its steps early (``break``, an exception, Ctrl-C), or at the end of the program. A
    stopped run has a checkpoint; ``stretto.train(run.folder, resume=True)`` resumes it.

    Example::

        run = stretto.open_run("runs/first")
        accuracies = [step.accuracy for step in run]
        rows = list(run.trajectories())      # pandas.DataFrame(rows), datasets.Dataset.from_list(rows)
        print(len(accuracies), rows[0]["prompt"], rows[0]["text"], rows[0]["reward"])
    """

    def __init__(self, folder: RunFolder, process: RunProcess | None = None, patience: float = 0.0) -> None:
        """`process`: writes the folder; None: the run was started elsewhere. `patience`: seconds that it may take to
        stop."""
        self._folder = folder
        self._process = process
        self._patience = patience
        self._failure: StrettoError | OSError | None = None
        if process is not None:
            atexit.register(self.stop)

    @classmethod
    def of_process(cls, process: RunProcess, patience: float) -> Self:
        """Wait until a newly started process has checked recipe, data and folder; returns its run. `patience`:
        `deadlines.stop` of the recipe, in seconds.

        Raises:
            UserError: the recipe, the data or the folder has a mistake.
        """
        try:
            folder = process.reply()
        except (StrettoError, OSError):
            process.close()
            raise
        return cls(RunFolder(Path(folder)), process, patience + _SAVING_SECONDS)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def running(self) -> bool:
        """Whether the run is still running."""
        return lock.is_held(self.folder) if self._process is None else not self._has_ended(0.0)

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped`` by a signal, or ``dead`` (killed, or ended by an error)."""
        return "running" if self.running else condition(self.folder).state

    @property
    def metrics(self) -> list[StepMetrics]:
        """Measurements of all training steps so far (docs/reference/metrics.md)."""
        return read_metrics(self._folder.metrics)[0]

    @property
    def evaluations(self) -> list[EvaluationLine]:
        """All evaluations of the held-out accuracy so far."""
        return read_metrics(self._folder.metrics)[1]

    @property
    def accuracy(self) -> float | None:
        """Last measured held-out accuracy; None before the first."""
        evaluations = self.evaluations
        return evaluations[-1].accuracy if evaluations else None

    def summary(self) -> Inspection:
        """Summarise the run in numbers, as ``stretto inspect`` does."""
        return inspect_run(self.folder)

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """Iterate over all trajectories issued so far, each as a dict: prompt, tokens, log-probabilities, versions,
        reward, state, and more."""
        return (msgspec.structs.asdict(trajectory) for trajectory in read_trajectories(self.folder))

    def __iter__(self) -> Iterator[StepMetrics]:
        """Iterate over all training steps from the first on, each as soon as it is done, until the run ends.

        Leaving the loop early stops the run. So does dropping the iterator, as ``next(iter(run))`` does. To look at a
        part of the steps, use `metrics`, or a run from `open_run`, which iterating does not stop.

        Raises:
            StrettoError: the run failed.
        """
        lines, last = _MetricsReader(self._folder.metrics), 0
        try:
            ended = False
            while not ended:
                ended = not self.running
                for step in lines.read():
                    if step.step > last:
                        last = step.step
                        yield step
                if not ended:
                    self._pause()
        except BaseException:
            self.stop()
            raise
        self._raise_failure()

    def wait(self) -> Self:
        """Wait until the run has ended.

        Raises:
            StrettoError: the run failed.
        """
        for _ in self:
            pass
        return self

    def stop(self) -> None:
        """Stop the run and wait until its processes have ended. The step in progress is finished if it takes at most
        ``deadlines.stop`` seconds. Does nothing for a run that has ended, or was started elsewhere."""
        if self._process is not None and not self._has_ended(0.0):
            self._process.stop(self._patience)
            self._has_ended(0.0)
            if isinstance(self._failure, RoleDied):  # it ended before it handled the signal, or was killed
                self._failure = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self._raise_failure()

    def __repr__(self) -> str:
        return f"<stretto.Run {str(self.folder)!r}, {self.state}>"

    def _pause(self) -> None:
        if self._process is None:
            time.sleep(_POLL_SECONDS)
        else:
            self._has_ended(_POLL_SECONDS)

    def _has_ended(self, seconds: float) -> bool:
        """Whether the run's process ends within `seconds`. If so, stores its error, if any, and closes it."""
        if self._process is None:
            return True
        if not self._process.heard(seconds):
            return False
        try:
            self._process.reply()
        except (StrettoError, OSError) as error:
            self._failure = error
        self._process.close()
        self._process = None
        atexit.unregister(self.stop)
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _MetricsReader:
    """Reads new training steps from a ``metrics.jsonl`` that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._decoder = msgspec.json.Decoder(MetricsLine)

    def read(self) -> list[StepMetrics]:
        """Read the steps since the last call. If a resumed run has rewritten the file, it is read from its start
        again."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())  # not of the path: the file may be replaced
                if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
                    self._file, self._offset = (found.st_dev, found.st_ino), 0
                file.seek(self._offset)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        lines = [self._decoder.decode(line) for line in whole.splitlines()]
        return [line for line in lines if isinstance(line, StepMetrics)]
