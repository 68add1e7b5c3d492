"""Replays started from the browser: one `stretto replay` process at a time, each with a folder of its own.

Only the form of a request is checked here. The command checks everything else; its output is the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import field as renamed

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, Problem, RefusedRequest, described
from stretto.core.records import Record
from stretto.processes.heartbeat import PARENT
from stretto.store.run_folder import CHANGEABLE, ORIGIN
from stretto_report.watch.index.files import read_text
from stretto_report.watch.runs.catalog import id_of
from stretto_report.watch.runs.run import WatchedRun
from stretto_report.watch.web.guard import PASSWORD

_PROGRAM = (
    "import os; from stretto.processes.heartbeat import die_with_parent; "
    f"die_with_parent(int(os.environ.pop({PARENT!r}))); from stretto_app.cli.main import main; main()"
)
#: Command to start, followed by the arguments of `stretto replay`. It is killed when this process ends.
COMMAND = (sys.executable, "-c", _PROGRAM)
_GRACE_SECONDS = 5.0  # seconds after a stop request until the process is killed
_LOG_SHOWN = 32 << 10
_MOST_SETTINGS, _LONGEST_SETTING = 32, 500
_MOST_MINUTES = 7 * 24 * 60
_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+", re.ASCII)


class Busy(RefusedRequest):
    """Error 429: another replay or comparison is in progress."""


class NotAllowed(RefusedRequest):
    """Error 403: the server was started without permission for replays."""


class ReplayOrder(Record, frozen=True, forbid_unknown_fields=True):
    """Body of a request for a replay: train the batches after step `first` again, with the settings `set`
    (``SECTION.KEY=VALUE``), for at most `minutes`."""

    first: int = renamed(default=0, name="from")
    set: tuple[str, ...] = ()
    minutes: float = 60.0


class ReplayState(Record, frozen=True):
    """A replay of the run with the id `run`. `first`, `set`: those of its order. `state`: ``running``, ``done``,
    ``refused`` (a user's mistake; `log` has the command's message), ``stopped`` (its result is deleted) or ``failed``.
    `reason`: why it was stopped or could not be started; "" otherwise. `seconds`: since its start, or from start to
    end. `log`: end of its output. `branch`: id of its result; None unless it is done."""

    run: str
    first: int = renamed(name="from")
    set: tuple[str, ...]
    state: str
    reason: str
    seconds: float
    log: str
    branch: str | None


@dataclass(eq=False)
class _Replay:
    run: str
    order: ReplayOrder
    target: Path
    log: Path
    since: float = field(default_factory=time.monotonic)
    ended: float | None = None
    state: str = "running"
    reason: str = ""
    process: Process | None = None
    task: asyncio.Task[None] | None = None

    @property
    def made(self) -> bool:
        return (self.target / ORIGIN).is_file()

    def shown(self) -> ReplayState:
        return ReplayState(
            run=self.run,
            first=self.order.first,
            set=self.order.set,
            state=self.state,
            reason=self.reason,
            seconds=round((self.ended or time.monotonic()) - self.since, 1),
            log=read_text(self.log, _LOG_SHOWN, end=True) or "",
            branch=id_of(self.target) if self.state == "done" else None,
        )


class Replays:
    """Replays of one server, one at a time. `folder`: results are written below it; None: replays are forbidden.
    `command`: words of the command line before the arguments of `stretto replay`."""

    def __init__(self, folder: Path | None, command: Sequence[str] = COMMAND) -> None:
        self._folder, self._command = folder, command
        self._newest: _Replay | None = None

    def require_allowed(self) -> Path:
        """Return the folder for replays. Raises NotAllowed if replays are forbidden."""
        if self._folder is None:
            found, allowed = "not allowed by this server", "start it with: stretto watch DIR --allow-replay"
            raise NotAllowed("replay", found, allowed)
        return self._folder

    @property
    def allowed(self) -> bool:
        return self._folder is not None

    def state(self) -> ReplayState | None:
        """Return the state of the newest replay; None before the first."""
        return None if self._newest is None else self._newest.shown()

    async def begin(self, run: WatchedRun, order: ReplayOrder) -> ReplayState:
        """Start a replay of `run` in a process, and return its state. The process is ended after `order.minutes`.

        Raises:
            NotAllowed: replays are forbidden.
            Busy: another one is running.
            RefusedRequest: the order is malformed, or the folder of replays cannot be written.
            OSError: the system cannot start another process.
        """
        folder = self.require_allowed()
        if self._newest is not None and self._newest.state == "running":
            raise Busy("replay", "another one is running", "wait for its end, or stop it")
        _check(order)
        try:
            target = _new_folder(folder / f"{run.folder.name}-{run.id}")
            log = target.with_suffix(".log").open("wb")
        except OSError as error:
            allowed = "start it with a folder that can be written: --replays DIR"
            raise RefusedRequest("replay", described(error), allowed) from error
        self._newest = replay = _Replay(run.id, order, target, Path(log.name))
        words = ["replay", str(run.folder), f"--from={order.first}", f"--out={target}"]
        environment = {name: value for name, value in os.environ.items() if name != PASSWORD}
        try:
            with log:
                replay.process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *words,
                    *(f"--set={setting}" for setting in order.set),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                    env=environment | {PARENT: str(os.getpid())},
                )
        except OSError as error:
            replay.state, replay.reason, replay.ended = "failed", str(error), time.monotonic()
            raise
        replay.task = asyncio.create_task(self._attend(replay, replay.process))
        return replay.shown()

    def stop(self) -> ReplayState | None:
        """Ask the running replay to end, and kill it after five seconds. Return the state of the newest replay, which
        may still be running; None if there was none. Raises NotAllowed if replays are forbidden."""
        self.require_allowed()
        if (newest := self._newest) is not None and newest.state == "running" and newest.process is not None:
            newest.reason = newest.reason or "stopped from the page"
            _end(newest.process)
        return self.state()

    async def _attend(self, replay: _Replay, process: Process) -> None:
        try:
            async with deadline("stretto watch", "the replay", 60 * replay.order.minutes):
                await process.wait()
        except DeadlineExceeded as error:
            replay.reason = str(error)
            _end(process)
            await process.wait()  # `_end` kills it if it does not end
        finally:
            if process.returncode is None:
                replay.reason = "the server ends"
                _kill(process)
                await process.wait()
            replay.ended = time.monotonic()
            replay.state = _outcome(replay, process.returncode)
            if replay.state == "stopped":  # kept after a failure: the log names files in it
                shutil.rmtree(replay.target, ignore_errors=True)


def _outcome(replay: _Replay, code: int | None) -> str:
    if code in (0, 1) and replay.made:  # 1: the weights differ although no setting was changed; the log reports it
        return "done"
    if replay.reason:
        return "stopped"
    return "refused" if code == 2 else "failed"


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    asyncio.get_running_loop().call_later(_GRACE_SECONDS, _kill, process)


def _kill(process: Process) -> None:
    """Kill the process and its session; do nothing if it has ended. (Its children in other sessions end with their
    parent.)"""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _new_folder(folder: Path) -> Path:
    """Create `folder` if it is missing, and return a path in it (``001``, ``002``, ...) that no folder or log uses yet.
    The path itself is not created."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = {int(path.stem) for path in folder.iterdir() if path.stem.isdecimal()}
    return folder / f"{max(taken, default=0) + 1:03d}"


def _check(order: ReplayOrder) -> None:
    problems = [str(problem) for problem in _problems(order)]
    if problems:
        raise RefusedRequest("replay", "\n".join(problems), f"a replay may change {' and '.join(CHANGEABLE)}")


def _problems(order: ReplayOrder) -> Iterable[Problem]:
    if order.first < 0:
        yield Problem("--from", str(order.first), "0, or a step of the run")
    if not 0 < order.minutes <= _MOST_MINUTES:
        yield Problem("minutes", f"{order.minutes:g}", f"more than 0, and at most {_MOST_MINUTES}")
    if len(order.set) > _MOST_SETTINGS:
        yield Problem("--set", f"{len(order.set)} settings", f"at most {_MOST_SETTINGS}")
    for setting in order.set[:_MOST_SETTINGS]:
        yield from _problems_of(setting)


def _problems_of(setting: str) -> Iterator[Problem]:
    """Yield the problem of one setting, or nothing. It is a problem if the setting does not have the form
    ``SECTION.KEY=VALUE``, if a replay may not change its section, or if its value is a path: a browser must not name
    files of this machine."""
    key, equals, value = setting.partition("=")
    place = f"--set {key.strip()[:80]}"
    if not equals or len(setting) > _LONGEST_SETTING or not setting.isprintable():
        yield Problem(f"--set {setting[:80]!r}", "not of the form SECTION.KEY=VALUE", "e.g. algorithm.loss=gspo")
    elif not _KEY.fullmatch(key.strip()) or key.strip().partition(".")[0] not in CHANGEABLE:
        yield Problem(place, "cannot be changed", f"a replay may change {' and '.join(CHANGEABLE)}")
    elif any(mark in value for mark in "/\\~") or ".." in value:
        yield Problem(place, "has a path", "give it on the command line: stretto replay")
