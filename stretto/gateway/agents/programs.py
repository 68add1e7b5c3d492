"""Starts an agent's program, and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.gateway.agents import guard

_GUARD = str(Path(guard.__file__))
_LAST_BYTES = 4096  # of what a program prints
_CHUNK = 1 << 16
_GRACE_SECONDS = 5.0
_SHOWN = 300


@dataclass(frozen=True)
class ProgramExit:
    """How a program ended, and the last words that it printed."""

    code: int
    said: str

    @property
    def failure(self) -> str:
        """Why it is none; "" if it ended well."""
        if not self.code:
            return ""
        how = f"was ended by signal {self.code - 128}" if self.code > 128 else f"ended with exit code {self.code}"
        last = self.said.strip().splitlines()[-1:] or [""]
        return f"the agent {how}" + (f": {last[0][:_SHOWN]}" if last[0] else "")


async def run_program(command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> ProgramExit:
    """Run it to its end; a cancellation ends it, and everything that it has started. The caller has the deadline."""
    # Isolated: the program's own interpreter and modules are in the environment, and not meant for the guard.
    whole = [sys.executable, "-I", _GUARD, str(os.getpid()), *command]
    process = await asyncio.create_subprocess_exec(
        *whole,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    said = b""
    try:
        assert process.stdout is not None
        while chunk := await process.stdout.read(_CHUNK):
            said = (said + chunk)[-_LAST_BYTES:]  # whatever it prints, no more is kept
        code = await process.wait()
    finally:
        if process.returncode is None:
            await _end(process)
    return ProgramExit(code, said.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # the guard ends what is below it
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
