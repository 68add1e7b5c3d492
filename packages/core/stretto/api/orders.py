"""Orders to the process of a run, and the caller's handle of that process.

    caller ──order──► process ──ready (the run folder)──► ... ──its end: an exit code, a result or an error──► caller

Training runs in a process of its own: the caller keeps its event loop (of a notebook), signals and threads, and all
roles end with that process. If the caller ends, its end of the pipe closes, which the process takes as a request to
stop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from typing import Any

from stretto.core.errors import Problem, RecipeError, RoleDied
from stretto.core.records import Record
from stretto.processes.spawn import describe_exit

INSIDE = "STRETTO_INSIDE"  #: the environment of a run's processes has it
_KILL_SECONDS = 30.0


class TrainOrder(Record, frozen=True):
    """Order to train by a recipe (TOML text); names the run if no folder is given."""

    recipe: str
    name: str
    run_dir: str | None
    resume: bool


class EvaluationOrder(Record, frozen=True):
    """Order to evaluate a model on the held-out prompts of a task: a path, or the TOML text of a recipe."""

    model: str
    task: str
    is_path: bool
    overrides: dict[str, Any]


class RunProcess:
    """Handle of the process that carries out one order."""

    def __init__(self, order: TrainOrder | EvaluationOrder) -> None:
        """Start the process.

        Raises:
            RecipeError: this is such a process itself: a script imported by a reward worker would train again.
        """
        if INSIDE in os.environ:
            found = "is called while a worker of a run imports the module of its reward"
            raise RecipeError([Problem("stretto", found, 'put what shall run once behind if __name__ == "__main__":')])
        self._near, far = Pipe()
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto.api.run_process", str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {INSIDE: "1"},
                pass_fds=(far.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the caller alone
            )
        self._near.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def heard(self, seconds: float) -> bool:
        """Whether the process sends a message, or ends, within `seconds`."""
        return self._near.poll(seconds)

    def reply(self) -> Any:
        """Next message of the process. Waits as long as the process lives; Ctrl-C ends the wait and the process.

        Raises:
            StrettoError, OSError: the error that the process reports.
            RoleDied: it ended without a message.
        """
        try:
            said = self._near.recv()
        except (EOFError, ConnectionError):
            raise RoleDied("the process of the run", describe_exit(self._process.wait())) from None
        except BaseException:
            self.stop(0.0)
            raise
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None:
        """Wait for the end of the process, which has sent its last message."""
        self._near.close()
        if not self._ended_within(_KILL_SECONDS):
            self._process.kill()
            self._process.wait()

    def stop(self, patience: float) -> None:
        """Request a stop; after `patience` seconds, or on Ctrl-C, request an immediate one; then kill the process. Its
        roles end with it."""
        self._process.terminate()
        interrupt: KeyboardInterrupt | None = None
        try:
            ended = self._ended_within(patience)
        except KeyboardInterrupt as pressed:
            ended, interrupt = False, pressed
        if not ended:
            self._process.terminate()
            if not self._ended_within(_KILL_SECONDS):
                self._process.kill()
                self._process.wait()
        if interrupt is not None:
            raise interrupt

    def _ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
