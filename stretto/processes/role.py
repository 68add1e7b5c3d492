"""One operating system process that plays a role: started, watched, stopped. It never outlives the conductor."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import DeadlineExceeded, RoleDied, described
from stretto.processes.heartbeat import HEARTBEAT, cpu_ticks
from stretto.processes.spawn import FRESH, RunningProcess, Spawn, Spawner

_END_SECONDS = 10.0
_REAP_SECONDS = 5.0
_LISTEN_SECONDS = 0.5
_IMPORT_SECONDS = 10.0
_LONGEST_LISTENING = 1.0
_READ_BYTES = 4096


class RoleProcess:
    """``python -m MODULE SPEC`` with its own log file, threads and process group.

    Ctrl-C reaches the conductor alone, which then stops its roles in order; should it be killed itself, the kernel
    kills them (`processes.heartbeat`).
    """

    def __init__(self, name: str, module: str, log: Path, hung: float = math.inf, starter: Spawner = FRESH) -> None:
        """`hung`: seconds without a sign of life after which it is killed. The first sign comes when it has imported
        what it needs; before it those seconds count in which it does not even compute, and ten are allowed."""
        self.name = name
        self.log = log
        self._module = module
        self._hung = hung
        self._starter = starter
        self._process: RunningProcess | None = None
        self._end: asyncio.Task[str] | None = None
        self._changing = asyncio.Lock()  # whoever stops it waits until it has been started

    async def start(self, spec: msgspec.Struct, threads: int, inherited: Sequence[int] = ()) -> None:
        """Start it; `spec` goes as JSON on the command line, `inherited` descriptors keep their numbers.

        Raises:
            RoleDied: the system has no room for another process.
        """
        async with self._changing:
            self._process = self._end = None
            with contextlib.ExitStack() as undo:
                try:
                    pulse = Heartbeat()
                    undo.callback(pulse.close)
                    self._process = await self._starter.start(
                        Spawn(
                            module=self._module,
                            spec=msgspec.json.encode(spec).decode(),
                            log=str(self.log),
                            threads=threads,
                            environment={HEARTBEAT: str(pulse.far)},
                            inherited=(*inherited, pulse.far),
                        )
                    )
                except OSError as error:
                    raise RoleDied(self.name, f"cannot be started: {described(error)}") from error
                undo.pop_all()
            pulse.let_go_of_far()
            self._end = asyncio.create_task(self._watched(self._process, pulse), name=f"watch {self.name}")

    async def _watched(self, process: RunningProcess, pulse: Heartbeat) -> str:
        """How it ends; if it gives no sign of life, by being killed. Goes on from its start to its end, whoever waits
        for what."""
        end = asyncio.ensure_future(process.wait())
        try:
            while not end.done():
                silence = pulse.silence(cpu_ticks(process.pid))
                if silence > (self._hung if pulse.begun else max(self._hung, _IMPORT_SECONDS)):
                    self.kill()
                    await end
                    return f"gave no sign of life for {silence:.0f} s and was killed"
                await asyncio.wait([end], timeout=_LISTEN_SECONDS)
            return self._starter.describe_end(process)
        finally:
            end.cancel()
            pulse.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def killed(self) -> bool:
        """Has it ended by a signal? One that ends by itself may do so again."""
        return self._process is not None and (self._process.returncode or 0) < 0

    def cpu_seconds(self) -> float:
        """Seconds for which it has computed, or the kernel for it; 0 once it has ended."""
        return cpu_ticks(self.pid) / os.sysconf("SC_CLK_TCK")

    async def ended(self) -> str:
        """Wait until it ends, and say how. The owner of this wait is whoever supervises the role: it has no end
        of its own, because a healthy role runs as long as the run. One that gives no sign of life is killed."""
        assert self._end is not None, "start() comes first"
        return await asyncio.shield(self._end)

    async def last_words(self) -> str:
        """How it ended, for a role that has closed its connection; it is killed if it has not ended."""
        try:
            async with deadline("conductor", f"{self.name} to end", _END_SECONDS):
                return await self.ended()
        except DeadlineExceeded:
            self.kill()
            return "closed its connection and went on running"

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to its whole process group after `grace` seconds; returns when it is gone.

        Raises:
            DeadlineExceeded: the kernel does not let go of it (a disk or a device that does not answer).
        """
        async with self._changing:
            if self._process is None:
                return
            if self.running:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been waited for yet
                    self._process.terminate()
                try:
                    async with deadline("conductor", f"{self.name} to stop", grace):
                        await self.ended()
                except DeadlineExceeded:
                    self.kill()
            async with deadline("conductor", f"{self.name} to end after SIGKILL", _REAP_SECONDS):
                await self.ended()

    def kill(self) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been waited for yet
                os.killpg(self.pid, signal.SIGKILL)


class Heartbeat:
    """The conductor's end of the pipe for a role's heartbeats (`processes.heartbeat`); `far` is the role's."""

    def __init__(self) -> None:
        self._near, self.far = os.pipe()
        self.begun = self._beaten = False
        self._ticks = 0
        self._stillness = StallTimer(_LONGEST_LISTENING)
        os.set_blocking(self._near, False)
        asyncio.get_running_loop().add_reader(self._near, self._hear)

    def silence(self, ticks: int) -> float:
        """Seconds since the last sign of life; before the first, since `ticks` of computing have changed last. To be
        asked about twice a second."""
        moved = self._beaten or (not self.begun and ticks != self._ticks)
        self._beaten, self._ticks = False, ticks
        return self._stillness.look(moved=moved)

    def let_go_of_far(self) -> None:
        """The role has it."""
        os.close(self.far)
        self.far = -1

    def close(self) -> None:
        """Listen no more."""
        asyncio.get_running_loop().remove_reader(self._near)
        os.close(self._near)
        if self.far >= 0:
            self.let_go_of_far()

    def _hear(self) -> None:
        if os.read(self._near, _READ_BYTES):
            self.begun = self._beaten = True
        else:  # the role has ended; its end is waited for elsewhere
            asyncio.get_running_loop().remove_reader(self._near)
