"""Starts an agent's program and waits for its end."""

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
_LAST_BYTES = 4096  # of what a program prints
_CHUNK = 1 << 16
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # whether the guard is still there
_PAUSE = 0.01
_SHOWN = 300
_MARK = "STRETTO_PROGRAM"


@dataclass(frozen=True)
class ProgramExit:
    """End of a program: its exit code, and the last lines that it printed."""

    code: int
    said: str

    @property
    def failure(self) -> str:
        """Why the program failed; "" if it succeeded."""
        if not self.code:
            return ""
        how = f"was ended by signal {self.code - 128}" if self.code > 128 else f"ended with exit code {self.code}"
        last = self.said.strip().splitlines()[-1:] or [""]
        return f"the agent {how}" + (f": {last[0][:_SHOWN]}" if last[0] else "")


async def run_program(command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> ProgramExit:
    """Run a program to its end; a cancellation kills it and all its descendants. No deadline: that is the caller's."""
    # Isolated: the program's own interpreter and modules are in the environment, and not meant for the guard.
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
            said = (said + chunk)[-_LAST_BYTES:]  # whatever it prints, no more is kept
    finally:
        if process.returncode is None:
            await _end(process)
        if process.returncode is None or process.returncode < 0:  # the guard was killed, and has left what was below it
            await asyncio.to_thread(kill_marked, f"{_MARK}={mark}")
    code = await process.wait()
    return ProgramExit(code if code >= 0 else 128 - code, said.decode(errors="replace"))


async def _printed(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    """Output of the program until its end; survivors of a killed guard may keep the pipe open longer."""
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
        process.terminate()  # the guard ends what is below it
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            while process.returncode is None:  # `wait` waits for the pipe too, which others may hold
                await asyncio.sleep(_PAUSE)
