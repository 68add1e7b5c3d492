"""``python -I guard.py PARENT COMMAND...``: runs an agent's program and leaves none of its processes behind.

All processes that the program has started end with it, with the guard, and with the run; orphans in other sessions are
adopted by the guard. The program is asked to end before it is killed, so that the client of a container can stop the
container, which is not its child. If the program kills the guard, it dies too; `programs.run_program` finds its
remaining processes by a mark in their environment.
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
    """Run the program; returns its exit code, or 128 + the signal that ended it."""
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
    """Ask a program and its session to end, and wait briefly."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(_ASKED_SECONDS)


def end_descendants() -> None:
    """Kill all descendants of this process, including those started meanwhile."""
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
