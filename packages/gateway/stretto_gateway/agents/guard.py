"""Guard process ``python -I guard.py PARENT COMMAND...``: runs an agent's program and ends all of its processes.

The guard becomes the parent of the program's orphans, also of those in other sessions. It ends all processes of the
program when the program, the guard's parent (the run) or the guard itself ends. The program gets SIGTERM first and is
killed later, so that a container's client can stop its container, which is not its child. If the program kills the
guard, it dies too; `programs.run_program` then finds its remaining processes by a mark in their environment.
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

from stretto.processes.kernel import adopt_descendants, signal_with_parent
from stretto.processes.tree import descendants

_ROUNDS, _PAUSE = 200, 0.01
_ASKED_SECONDS = 3.0  # from SIGTERM to SIGKILL
_NOT_FOUND = 127


def main(parent: int, command: list[str]) -> int:
    """Run the program `command`; returns its exit code, or 128 + the signal that ended it. `parent`: process id of the
    guard's parent; the guard and the program end with it. Returns 127 if the program cannot be started, and 0 if the
    parent has ended already. The program's descendants are killed at the end."""
    adopt_descendants()
    asked = list[int]()  # a SIGTERM that comes before the program is started
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
    """Send SIGTERM to a program and its process group, which it leads, and wait up to three seconds for its end.
    Afterwards it may still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(_ASKED_SECONDS)


def end_descendants() -> None:
    """Kill all descendants of this process, including processes that start meanwhile, and wait about two seconds at
    most for their end. Their exit codes are lost. Orphans are found only after `adopt_descendants`."""
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
