"""Handle of a role's process in the conductor: start, watch, stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from stretto.core.deadlines import StallTimer, deadline
from stretto.core.errors import DeadlineExceeded, RoleDied, described
from stretto.processes.heartbeat import HEARTBEAT
from stretto.processes.spawn import FRESH, GUESS, RunningProcess, Spawn, Spawner, cause_in
from stretto.processes.tree import cpu_ticks, resident_bytes

_END_SECONDS = 10.0
_REAP_SECONDS = 5.0
_LISTEN_SECONDS = 0.5
_IMPORT_SECONDS = 10.0
_LONGEST_POLL = 1.0
_READ_BYTES = 4096
_MIB = 1 << 20


class RoleProcess:
    """A process ``python -m MODULE SPEC`` with its own log file, threads and process group.

    Ctrl-C reaches only the conductor, which then stops its roles in order; if it is killed itself, the kernel kills
    them (`processes.heartbeat`).
    """

    def __init__(
        self,
        name: str,
        module: str,
        log: Path,
        hung: float = math.inf,
        spawner: Spawner = FRESH,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prepare the process, without starting it.

        Args:
            name, module: name of the role, and the Python module that it runs.
            log: file to which its output is appended.
            spawner: starts the process: as a fresh interpreter, or as a fork.
            environment: further variables of every start.
            hung: seconds without a heartbeat after which the process is killed. The first heartbeat comes once the role
                has imported its modules; until then only seconds without CPU use count, and at least ten are allowed.
        """
        self.name = name
        self.log = log
        self.clock_offset = 0.0  # same machine, same clock
        self._module, self._environment = module, environment
        self._hung = hung
        self._spawner = spawner
        self._process: RunningProcess | None = None
        self._end: asyncio.Task[str] | None = None
        self._killed_here = False  # by `kill`
        self._loaded = 0
        self._changing = asyncio.Lock()  # `stop` waits until `start` is done

    async def start(
        self,
        spec: msgspec.Struct | msgspec.Raw,
        threads: int,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the process; an earlier one must have ended. Returns before the role has imported its modules.

        Args:
            threads: of its numeric libraries.
            spec: its settings, JSON on the command line, which all users of the machine can read.
            environment: further variables, which other users cannot read.
            inherited: descriptors that it keeps under their numbers.

        Raises:
            RoleDied: the system has no room for another process.
        """
        async with self._changing:
            self._process = self._end = None
            self._killed_here, self._loaded = False, 0
            with contextlib.ExitStack() as undo:
                try:
                    before = self.log.stat().st_size if self.log.exists() else 0
                    heartbeat = Heartbeat()
                    undo.callback(heartbeat.close)
                    self._process = await self._spawner.start(
                        Spawn(
                            module=self._module,
                            spec=msgspec.json.encode(spec).decode(),
                            log=str(self.log),
                            threads=threads,
                            environment={**self._environment, **environment, HEARTBEAT: str(heartbeat.far)},
                            inherited=(*inherited, heartbeat.far),
                        )
                    )
                except OSError as error:
                    raise RoleDied(self.name, f"cannot be started: {described(error)}") from error
                undo.pop_all()
            heartbeat.close_far()
            watching = self._watched(self._process, heartbeat, before)
            self._end = asyncio.create_task(watching, name=f"watch {self.name}")
            if self._killed_here:  # while the spawner was at work
                self.kill()

    async def _watched(self, process: RunningProcess, heartbeat: Heartbeat, before: int) -> str:
        """Watch the process until its end; returns how it ended, as "was killed by SIGKILL", with the error that it did
        not catch. `before`: bytes of the log before its start. It is killed if heartbeats stop for too long (`hung`).
        After its end, processes left in its process group are killed."""
        end = asyncio.ensure_future(process.wait())
        try:
            while not end.done():
                silence = heartbeat.silence(cpu_ticks(process.pid))
                if silence > (self._hung if heartbeat.heard else max(self._hung, _IMPORT_SECONDS)):
                    self.kill()
                    await end
                    return f"sent no heartbeat for {silence:.0f} s and was killed"
                await asyncio.wait([end], timeout=_LISTEN_SECONDS)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left, or they are another user's
                os.killpg(process.pid, signal.SIGKILL)
            how = self._spawner.describe_end(process)
            if cause := cause_in(self.log, process.returncode or 0, before):
                return f"{how} ({cause})"
            return how.removesuffix(GUESS) if self._killed_here else how
        finally:
            end.cancel()
            heartbeat.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Process id; empty if the process is not running."""
        return [self.pid] if self.running else []

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def killed(self) -> bool:
        """Whether a signal ended the process; False if it runs, or has exited by itself."""
        return self._process is not None and (self._process.returncode or 0) < 0

    def cpu_seconds(self) -> float:
        """CPU seconds so far, kernel time included; 0 once it has ended."""
        return cpu_ticks(self.pid) / os.sysconf("SC_CLK_TCK")

    def loaded(self) -> int:
        """Most memory that the process and its descendants had at a call of this since its start, in MiB: it grows
        while the role loads a model, and stands still when it hangs."""
        self._loaded = max([self._loaded, *(resident_bytes(pid) // _MIB for pid in self.pids)])
        return self._loaded

    async def ended(self) -> str:
        """Wait for the end of the process; returns how it ended, as "was killed by SIGKILL". No deadline: a healthy
        role runs as long as the run. Call it after `start`, from any number of tasks."""
        assert self._end is not None, "start() comes first"
        return await asyncio.shield(self._end)

    async def last_words(self) -> str:
        """Wait up to 10 seconds for the end of a role that has closed its connection; returns how it ended, as "ended
        with exit code 1". A role that still runs is then killed, and described as going on."""
        try:
            async with deadline("conductor", f"{self.name} to end", _END_SECONDS):
                return await self.ended()
        except DeadlineExceeded:
            self.kill()
            return "closed its connection and went on running"

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, then SIGKILL to the process group after `grace` seconds; returns when the process is gone, at
        once if none was started or it has ended. Raises DeadlineExceeded if the kernel does not end it, because a disk
        or a device does not respond."""
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
        """Send SIGKILL to the process group, if the process runs, or as soon as a start in progress has made it; return
        without waiting. The description of the end then guesses at no reason."""
        self._killed_here |= self.running or self._changing.locked()
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been waited for yet
                os.killpg(self.pid, signal.SIGKILL)


class Heartbeat:
    """The conductor's end of the pipe for a role's heartbeats (`processes.heartbeat`); made in its event loop. `far`:
    descriptor of the role's end, -1 once it is closed here. `heard`: whether any heartbeat has come."""

    def __init__(self) -> None:
        self._near, self.far = os.pipe()
        self.heard = self._beat = False
        self._ticks = 0
        self._stall = StallTimer(_LONGEST_POLL)
        os.set_blocking(self._near, False)
        asyncio.get_running_loop().add_reader(self._near, self._hear)

    def silence(self, ticks: int) -> float:
        """Seconds since the last heartbeat; before the first, seconds since `ticks`, the role's CPU time, last changed.
        Call it twice a second."""
        moved = self._beat or (not self.heard and ticks != self._ticks)
        self._beat, self._ticks = False, ticks
        return self._stall.poll(moved=moved)

    def close_far(self) -> None:
        """Close this process's copy of the role's end, once the role has inherited it."""
        os.close(self.far)
        self.far = -1

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._near)
        os.close(self._near)
        if self.far >= 0:
            self.close_far()

    def _hear(self) -> None:
        if os.read(self._near, _READ_BYTES):
            self.heard = self._beat = True
        else:  # the role has ended, which `ended` reports
            asyncio.get_running_loop().remove_reader(self._near)


class ReplaceableProcess(Protocol):
    """A role's process as its supervisor sees it: `RoleProcess`, or one on another machine
    (`stretto_cluster.machine`)."""

    @property
    def log(self) -> Path: ...

    @property
    def clock_offset(self) -> float:
        """Seconds to add to times of the clock of the process's machine to get times of the conductor's clock."""

    @property
    def pids(self) -> Sequence[int]:
        """Process id; empty if the process is not running, or runs on another machine."""

    @property
    def running(self) -> bool: ...

    @property
    def killed(self) -> bool: ...

    def loaded(self) -> int:
        """A number that grows while the process loads its model; 0: not known."""

    async def start(self, spec: msgspec.Struct, threads: int) -> None:
        """Start the process with its `spec` as JSON and `threads` threads of numeric libraries.

        Raises:
            RoleDied: the system has no room for another process.
            MachineLost: its machine is gone.
        """

    async def ended(self) -> str: ...

    async def stop(self, grace: float) -> None: ...

    def kill(self) -> None: ...
