"""One worker process: start, requests, kill, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import UNREADABLE, Problem, RewardFunctionError, RoleDied, WireError
from stretto.core.frames import Unframer, frame
from stretto.processes.kernel import has_exited
from stretto.processes.tree import cpu_ticks, descendants, kill_marked
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.judging import PLACE
from stretto.rewards.service.wire import (
    LARGEST_REPLY,
    FromWorker,
    JudgingCounter,
    PartSettings,
    Refused,
    Request,
    Verdicts,
    WorkerReady,
    WorkerSettings,
    Worth,
)
from stretto_verify.sandbox.cgroups import remove_groups_of

FORGED = "something wrote into its replies"
_REAP_SECONDS = 5.0
_MARK = "STRETTO_REWARD_WORKER"  # environment variable of a worker, which its descendants inherit


class WorkerProcess:
    """A worker process, started once. `on_reply` is called with each reply; if it raises WireError, the worker is
    killed. `on_lost` is called once, if the wire of a worker that was ready closes, from either end. `facts`, `takes`:
    facts about the reward, and the further fields of a row that it takes, as the worker reports when it is ready
    (`WorkerReady`)."""

    def __init__(self, name: str, on_reply: Callable[[Verdicts], None], on_lost: Callable[[], None]) -> None:
        self.name = name
        self.facts: dict[str, str] = {}
        self.takes: tuple[str, ...] | None = ()
        self._wire = _Wire(self._received, self._lost, self.give_up)
        self._on_reply, self._on_lost = on_reply, on_lost
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._progress: JudgingCounter | None = None
        self._why = ""  # of `give_up`
        self._mark = f"{_MARK}={uuid.uuid4().hex}"

    async def start(self, config: RewardsConfig, log: Path | None) -> None:
        """Start the process; returns when it has loaded the reward. After an error the process is gone.

        Raises:
            RewardFunctionError: the worker cannot use the reward function.
            RoleDied: it ended while starting.
            DeadlineExceeded: it was not ready after ``rewards.start_timeout`` seconds.
            OSError: no process or descriptor could be made.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as inherited:
            inherited.callback(theirs.close)
            try:
                self._progress, descriptor = JudgingCounter.create()
                inherited.callback(os.close, descriptor)
                settings = WorkerSettings(
                    parts=tuple(_parts(config)),
                    worth=Worth(right=config.right, wrong=config.wrong),
                    socket=theirs.fileno(),
                    progress=descriptor,
                    parent=os.getpid(),
                    memory=int(config.memory_gib * (1 << 30)),
                    path=config.path,
                )
                self._process = _spawn(settings, log, self._mark)
            except OSError:
                ours.close()
                await self.end()
                raise
        await asyncio.get_running_loop().create_connection(lambda: self._wire, sock=ours)
        try:
            async with deadline("rewards", f"{self.name} to import {config.title}", config.start_timeout):
                await self._ready
        except EOFError:
            how = await self.end()
            raise RoleDied(self.name, f"ended while starting: {how}", str(log or "")) from None
        except BaseException:
            await self.end()
            raise

    @property
    def progress(self) -> int:
        """Progress counter: twice the items judged since the start, plus one while an item is being judged; 0 if no
        worker runs."""
        return self._progress.count if self._progress is not None else 0

    @property
    def signs(self) -> object:
        """Value that changes while a starting or waiting worker is alive: its number of heartbeats, or its CPU time
        before the first one. None if no worker runs."""
        if self._process is None or self._progress is None:
            return None
        return self._progress.beats or cpu_ticks(self._process.pid)

    @property
    def processor_seconds(self) -> float:
        """CPU seconds of the worker and its running descendants; 0 if no worker runs."""
        if self._process is None:
            return 0.0
        return sum(map(cpu_ticks, (self._process.pid, *descendants(self._process.pid)))) / 100

    @property
    def pids(self) -> list[int]:
        """Process id; empty before the process was started."""
        return [self._process.pid] if self._process is not None else []

    @property
    def ended(self) -> bool:
        """Whether the process has exited and was not yet reaped (by `end`). A process that it forked may still hold its
        socket open, so that `on_lost` is not called."""
        process = self._process
        return process is not None and process.returncode is None and has_exited(process.pid)

    def give_up(self, why: str) -> None:
        """Kill the worker and close its wire; `end` then returns `why`, if it is not empty."""
        self._why = self._why or why
        self.kill()
        self._wire.close()

    def send(self, request: Request) -> None:
        """Send one request; without a connection it is dropped. Raises UnicodeEncodeError if a text holds a lone
        surrogate, which no wire and no file can carry."""
        self._wire.write(frame(request))

    def kill(self) -> None:
        """Send SIGKILL to the worker and all its descendants, also those in other sessions; does nothing if it has
        ended."""
        if self._process is not None and self._process.returncode is None:
            for pid in (*descendants(self._process.pid), self._process.pid):
                for send in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        send(pid, signal.SIGKILL)

    async def end(self) -> str:
        """Kill the worker and everything that it started, remove its sandbox's groups, and wait for its exit, at most 5
        seconds. Returns how it ended: ``signal 9``, ``exit status 3``, the reason given to `give_up`, or that it is
        still there."""
        self.kill()
        self._wire.close()
        self._ready.cancel()
        code = await self._exit_code()
        if self._process is not None:
            await asyncio.to_thread(kill_marked, self._mark)
        if self._process is not None and self.facts:  # it had a sandbox
            await asyncio.to_thread(remove_groups_of, self._process.pid)
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if code is None:
            return f"still there {_REAP_SECONDS:g} s after SIGKILL"
        if self._why:
            return self._why
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    async def _exit_code(self) -> int | None:
        pause, give_up = 0.001, time.monotonic() + _REAP_SECONDS
        while self._process is not None and time.monotonic() < give_up:
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return None

    def _received(self, message: FromWorker) -> None:
        match message:
            case Verdicts():
                self._on_reply(message)
            case WorkerReady() if not self._ready.done():
                self.facts, self.takes = message.facts, message.takes
                self._ready.set_result(None)
            case Refused() if not self._ready.done():
                problem = Problem(message.place, message.found, message.remedy)
                self._ready.set_exception(RewardFunctionError([problem]))

    def _lost(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(EOFError())
        elif not self._ready.cancelled() and self._ready.exception() is None:
            self._on_lost()


def _parts(config: RewardsConfig) -> Iterator[PartSettings]:
    for number, part in enumerate(config.parts):
        settings, named = config.section(part.function), bool(config.functions)
        place = f"rewards.functions.{number}.function" if named else PLACE
        name = part.title if named else ""
        yield PartSettings(part.function, settings, place, name, part.weight, part.sources)


def _spawn(settings: WorkerSettings, log: Path | None, mark: str) -> subprocess.Popen[bytes]:
    """Start the worker's process in its own session, so that Ctrl-C in the terminal reaches only the conductor; raises
    OSError. Its output is appended to `log`; None: it is dropped. `mark`: ``NAME=VALUE`` for its environment, to find
    its descendants."""
    arguments = [sys.executable, "-m", "stretto.rewards.service.worker", msgspec.json.encode(settings).decode()]
    output: IO[bytes] | int = subprocess.DEVNULL if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(settings.socket, settings.progress),
            env=os.environ | {"OMP_NUM_THREADS": "1", _MARK: mark.removeprefix(f"{_MARK}=")},
            start_new_session=True,
        )
    finally:
        if not isinstance(output, int):
            output.close()


class _Wire(asyncio.Protocol):
    def __init__(
        self, received: Callable[[FromWorker], None], lost: Callable[[], None], distrust: Callable[[str], None]
    ) -> None:
        self._received, self._lost, self._distrust = received, lost, distrust
        self._transport: asyncio.Transport | None = None
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._unframer = Unframer(LARGEST_REPLY)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._unframer.feed(data):
                self._received(self._decoder.decode(body))
        except (WireError, *UNREADABLE):
            self._distrust(FORGED)  # user code has written to the worker's descriptor

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def write(self, data: bytes | bytearray) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
