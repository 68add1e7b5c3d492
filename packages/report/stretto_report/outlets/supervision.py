"""Supervision, in the conductor, of the processes that follow a run for its tools.

Their failures never fail the run: each is one sentence in the log until the tool works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from stretto.core.deadlines import waiting
from stretto.core.errors import UNREADABLE, DeadlineExceeded, RoleDied, described
from stretto.core.tasks import cancel_and_wait
from stretto.doors.loading import is_own
from stretto.launch.recipe.extensions import OutletsConfig
from stretto.processes.http.reach import url_of
from stretto.processes.role import RoleProcess
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.store.run_folder import RunFolder
from stretto_report.outlets.follower import Cursor
from stretto_report.outlets.points import stem
from stretto_report.outlets.role import ALL_SENT, MODULE, FollowerSpec

HUNG_SECONDS = 120.0  #: seconds without a reply after which a tool counts as hung
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before another process tries again
_END_SECONDS = 20.0  # for a tool to take the rest when the run has ended
_STOP_SECONDS = 2.0  # the same, when the run was stopped and may be resumed
_GRACE = 0.0
_LAST_WORDS = 300  # characters


@asynccontextmanager
async def followed(
    config: OutletsConfig,
    folder: RunFolder,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    path: str = "",
    hung: float = HUNG_SECONDS,
) -> AsyncIterator[None]:
    """Async context manager: each tool of the recipe follows the run during the block, in a process of its own. At the
    end of the block, each tool has 20 s to take the rest, or 2 s if the run was stopped or failed; then its process is
    killed, which `say` reports. A fault of a tool raises nothing.

    Args:
        say: gets sentences for the log.
        stopped: called at the end of the block: whether the run ends before its last step.
        path: folder that is searched first for modules of user-defined tools.
        hung: seconds in which a tool has to reply.
    """
    followers = [ToolFollower(tool, config, folder, say, hung, path) for tool in config.tools]
    tasks = {follower.tool: asyncio.create_task(follower.run(), name=follower.tool) for follower in followers}
    seconds = _STOP_SECONDS
    try:
        yield
        seconds = _STOP_SECONDS if stopped() else _END_SECONDS
    finally:
        await asyncio.gather(*(follower.end(tasks[follower.tool], seconds) for follower in followers))


class ToolFollower:
    """Keeps one process that follows a run for one tool, and replaces it when it dies: `run` as a task, then `end`."""

    def __init__(
        self,
        tool: str,
        config: OutletsConfig,
        folder: RunFolder,
        say: Callable[[str], None],
        hung: float,
        path: str = "",
    ) -> None:
        self.tool = tool
        self._say, self._log = say, folder.role_log(stem(tool))
        self._cursor = folder.outlets / f"{stem(tool)}.json"
        self._spec = FollowerSpec(
            tool=tool,
            folder=str(folder.path),
            project=config.project,
            name=config.name,
            tags=config.tags,
            until=-1,
            host=config.prometheus_host,
            port=config.prometheus_port or 0,
            path=path,
        )
        self._process = RoleProcess(stem(tool), MODULE, self._log, hung)
        self._ending = asyncio.Event()
        self._until: int | None = None  # our end of the pipe
        self._last = False  # the process was started when the run had ended
        self._told = False  # it was reported that the tool receives nothing, and this is still so
        self._before, self._fault, self._how = self._has(), "", ""

    async def run(self) -> None:
        """Keep a process of the tool running, and replace it when it dies, however often. Return once a process has
        sent everything after `end` was called, or one that was started after `end` has failed, which is reported.
        Raises only a cancellation."""
        restarts = RestartBudget(math.inf, delay=_FIRST_PAUSE, factor=2.0, longest=_LONGEST_PAUSE)
        supervisor = Supervisor(
            self.tool, self._start, restarts, lambda _: self._tell(), wanted=lambda: not self._last, sleep=self._pause
        )
        try:
            await supervisor.begin()
            while how := await self._how_it_ended(restarts):
                await supervisor.replace(how)
        except RoleDied as death:
            self._say(f"{self.tool} has not taken the end of the run: {death.how}")

    def _tell(self) -> None:
        if not self._told:
            self._say(
                f"{self.tool} receives nothing: {self._how}; the run continues without it and retries ({self._log})"
            )
            self._told = True

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds` between two processes, or until `end` is called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    def _has(self) -> bytes:
        try:
            return self._cursor.read_bytes()
        except OSError:
            return b""

    async def _start(self) -> None:
        """Start a process of the tool. One that is started after `end` was called is the last. Raises RoleDied if it
        cannot be started, also if the system has no free file descriptors."""
        self._last = self._ending.is_set()
        try:
            far, self._until = os.pipe()
        except OSError as error:
            self._how = described(error)
            raise RoleDied(self.tool, self._how) from error
        if self._ending.is_set():
            self._close()
        try:
            spec = msgspec.structs.replace(self._spec, until=far)
            # Roles run without Hugging Face's hub; a tool may need it.
            online = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
            await self._process.start(spec, 1, (far,), environment=online)
        except RoleDied as error:
            self._close()
            self._how = error.how
            raise
        finally:
            os.close(far)

    async def _how_it_ended(self, restarts: RestartBudget) -> str:
        """Wait until the process ends. Return how it ended, or "" if it has sent everything. If it has sent something
        since the last start, `restarts` is refilled. A line that it could not read is reported once."""
        how = await self._process.ended()
        self._close()
        if (has := self._has()) != self._before:
            self._before, self._told = has, False
            restarts.progressed()
        if (found := _fault(has)) not in ("", self._fault):
            self._say(f"{self.tool} lacks a line of the run: {found}")
            self._fault = found
        whole = how.endswith(f"exit code {ALL_SENT}")
        said = _last_words(self._log)
        self._how = "" if whole else f"{said} ({how.removesuffix(f' ({said})')})"
        return self._how

    async def end(self, task: asyncio.Task[None], seconds: float) -> None:
        """Tell the process that the run has ended, and wait for `task`, that of `run`, while the process sends the
        rest; after `seconds` kill the process."""
        self._ending.set()
        self._close()
        with waiting("conductor", f"{self.tool} to take the end of the run", seconds):
            await asyncio.wait([task], timeout=seconds)
        if not task.done():
            self._say(f"{self.tool} has not taken the end of the run within {seconds:g} s")
            await cancel_and_wait([task])
            with contextlib.suppress(DeadlineExceeded):  # the kernel cannot end it now: it ends with this process
                await self._process.stop(_GRACE)

    def _close(self) -> None:
        if self._until is not None:
            os.close(self._until)
            self._until = None


def _fault(cursor: bytes) -> str:
    try:
        return msgspec.json.decode(cursor, type=Cursor).fault
    except UNREADABLE:  # no cursor yet, or a damaged one, which its process reports
        return ""


def _last_words(log: Path) -> str:
    """Return the last line of a log that is not blank, cut to 300 characters; a sentence that says so if the log is
    empty or cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4 * _LAST_WORDS))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
        return described(error)
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:_LAST_WORDS] if said else "it has said nothing"


def destinations(config: OutletsConfig, run: Path, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each tool of the recipe that says where it shows the run in the folder `run`.
    `environment`: environment variables, in which tools have their settings.

    >>> destinations(OutletsConfig(to="tensorboard", prometheus_port=9400), Path("runs/first"), {})
    ['shown in tensorboard: files in runs/first/tensorboard; tensorboard --logdir runs', \
'shown in prometheus: http://127.0.0.1:9400/metrics']
    """
    return [f"shown in {tool}: {_destination(tool, config, run, environment)}" for tool in config.tools]


def _destination(tool: str, config: OutletsConfig, run: Path, environment: Mapping[str, str]) -> str:
    match tool:
        case "wandb" if environment.get("WANDB_MODE") in ("offline", "dryrun"):
            return f"files in {run}/wandb; wandb sync {run}/wandb/offline-run-*"
        case "wandb":
            return f"project {config.project} at {environment.get('WANDB_BASE_URL', 'the address of its own settings')}"
        case "tensorboard":
            return f"files in {run}/tensorboard; tensorboard --logdir {run.parent}"
        case "mlflow":
            where = environment.get("MLFLOW_TRACKING_URI", f"a database in {Path.cwd()}")
            return f"experiment {config.project} at {where}"
        case "trackio":
            names = ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_DIR")
            where = next((environment[name] for name in names if environment.get(name)), "its own folder")
            return f"project {config.project} at {where}"
        case _ if is_own(tool):
            return f"as {tool} does, project {config.project}"
    return f"{url_of(config.prometheus_host, config.prometheus_port)}/metrics"
