"""``python -I guard.py PARENT COMMAND...``: runs an agent's program, and leaves nothing of it behind.

What the program has started ends with it, and all of it ends with the guard, with the run, and with the machine's
patience: children that hide in sessions of their own come to the guard when their parents end. The program is asked
to end before it is killed: the client of a container stops the container then, which is no process below it. The
program itself ends with a guard that it kills; what else it has started `programs.run_program` finds by a mark in the
environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import NoReturn

from stretto.processes.kernel.requests import adopt_descendants, signal_with_parent
from stretto.processes.tree import descendants

_ROUNDS, _PAUSE = 200, 0.01
_ASKED_SECONDS = 3.0  # for a program to end when it is asked to
_NOT_FOUND = 127


def main(parent: int, command: list[str]) -> int:
    """The program's exit code; 128 + the signal that ended it."""
    adopt_descendants()
    asked = list[int]()  # before the program is there, which is to be asked in its turn
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the request took effect
        return 0
    program = None
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal_with_parent(signal.SIGKILL),
        )
        signal.signal(signal.SIGTERM, _leave)
        if asked:
            _leave(asked[0], None)
        code = program.wait()
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return _NOT_FOUND
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if program is not None and program.poll() is None:
            ask_to_end(program)
        end_descendants()
    return code if code >= 0 else 128 - code


def ask_to_end(program: subprocess.Popen[bytes]) -> None:
    """Ask a program, and those of its session, to end, and wait for it for a moment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(_ASKED_SECONDS)


def end_descendants() -> None:
    """Kill every process below this one, those that they start meanwhile too."""
    for _ in range(_ROUNDS):
        found = descendants(os.getpid())
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
