"""Start of an agent's program, and the wait for its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.processes.tree import kill_marked
from stretto_gateway.agents import guard

_GUARD = str(Path(guard.__file__))
_LAST_BYTES = 4096  # of a program's output that are kept
_CHUNK = 1 << 16
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between checks that the guard is running
_PAUSE = 0.01
_SHOWN = 300
_MARK = "STRETTO_PROGRAM"


@dataclass(frozen=True)
class _ProgramExit:
    """End of a program. `code`: its exit code, or 128 + the signal that ended it. `said`: its last 4,096 bytes of
    output, standard error included."""

    code: int
    said: str

    @property
    def failure(self) -> str:
        """Reason why the program failed: its exit code or signal, and its last line of output. "" if it ended with code
        0."""
        if not self.code:
            return ""
        how = f"was ended by signal {self.code - 128}" if self.code > 128 else f"ended with exit code {self.code}"
        last = self.said.strip().splitlines()[-1:] or [""]
        return f"the agent {how}" + (f": {last[0][:_SHOWN]}" if last[0] else "")


async def run_program(command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> _ProgramExit:
    """Run a program to its end; returns how it ended and the end of its output, with code 127 if there is no such
    program or it cannot be executed. Its descendants are killed at the end; if the call is cancelled, the program too.
    There is no deadline. `environment`: all its variables. `folder`: working directory; None: that of this process.

    Raises:
        OSError: the system cannot start any further process, or `folder` does not exist.
    """
    # Isolated (-I), because the environment may name modules for the program, which the guard must not load.
    whole = [sys.executable, "-I", _GUARD, str(os.getpid()), *command]
    mark = secrets.token_hex(16)
    process = await asyncio.create_subprocess_exec(
        *whole,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**environment, _MARK: mark},
        cwd=folder,
        start_new_session=True,
    )
    said = b""
    try:
        async for chunk in _printed(process):
            said = (said + chunk)[-_LAST_BYTES:]
    finally:
        if process.returncode is None:
            await _end(process)
        if process.returncode is None or process.returncode < 0:  # the guard was killed, and descendants may be left
            await asyncio.to_thread(kill_marked, f"{_MARK}={mark}")
    code = await process.wait()
    return _ProgramExit(code if code >= 0 else 128 - code, said.decode(errors="replace"))


async def _printed(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    """Yield the program's output in chunks until the guard ends. Surviving processes of a killed guard may keep the
    pipe open, so its end is not waited for."""
    assert process.stdout is not None
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                chunk = await process.stdout.read(_CHUNK)
                if not chunk:
                    await process.wait()
                    return
            yield chunk
            continue
        if process.returncode is not None:
            return


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # the guard ends its descendants
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            while process.returncode is None:  # `wait` would also wait for the pipe, which others may hold open
                await asyncio.sleep(_PAUSE)
