"""The process in which a call of `stretto.train` or `stretto.evaluate` runs: orders to it, and the caller's handle.

    caller ──order──► process ──the run folder, when all is checked──► ... ──exit code, result or error──► caller

Training runs in a process of its own. So the caller keeps its own event loop (of a notebook), signals and threads, and
all roles end with that process. If the caller ends, its end of the pipe closes; the process then stops.
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

INSIDE = "STRETTO_INSIDE"  #: environment variable that is set in all processes of a run
_KILL_SECONDS = 30.0


class TrainOrder(Record, frozen=True):
    """Order to train. `recipe`: TOML text. `name`: name of the run, if `run_dir` is None. `resume`: continue the run in
    `run_dir`."""

    recipe: str
    name: str
    run_dir: str | None
    resume: bool


class EvaluationOrder(Record, frozen=True):
    """Order to evaluate a model folder on the held-out prompts of a task. `task`: a path if `is_path`, else a recipe as
    TOML text. `overrides`: values that replace those of the recipe."""

    model: str
    task: str
    is_path: bool
    overrides: dict[str, Any]


class RunProcess:
    """Handle of the process that carries out one order."""

    def __init__(self, order: TrainOrder | EvaluationOrder) -> None:
        """Start the process and send it the order.

        Raises:
            RecipeError: the caller runs inside such a process itself: a reward worker has imported the user's script,
                which would train again.
        """
        if INSIDE in os.environ:
            found = "is called while a worker of a run imports the module of its reward"
            raise RecipeError(
                [Problem("stretto", found, 'put code that must run only once under if __name__ == "__main__":')]
            )
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
        """Wait for the next message of the process, without a timeout. Ctrl-C ends the process.

        Raises:
            StrettoError, OSError: the error that the process reports.
            RoleDied: the process ended without a message.
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
        """Wait for the end of the process after its last message; after `_KILL_SECONDS` it is killed."""
        self._near.close()
        if not self._ended_within(_KILL_SECONDS):
            self._process.kill()
            self._process.wait()

    def stop(self, patience: float) -> None:
        """Stop the process: request a stop; after `patience` seconds, or on Ctrl-C, request it again, for an immediate
        stop; after `_KILL_SECONDS` more, kill it. The roles end with the process."""
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
