"""Train one run of a study by `stretto train`, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

from stretto.core.deadlines import deadline, waiting
from stretto.core.errors import DeadlineExceeded, StoreError
from stretto.processes.heartbeat import die_with_parent
from stretto.processes.spawn import describe_exit
from stretto.processes.stopping import StopSignal
from stretto.store.ending import read_ending
from stretto.store.folder.run_folder import RunFolder
from stretto_app.study.definition import PlannedRun
from stretto_app.study.folder import StudyFolder

_STOPPING = 120.0  # seconds for the current step and a checkpoint; the run's own deadlines are shorter


class TrainProcesses:
    """Runs ``stretto train``, which resumes a run that an earlier process of the study started. The processes end with
    this one, and draw no plots, because a study has its own."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder

    async def train(self, run: PlannedRun, stop: StopSignal) -> str | None:
        """Train the run to its end, or resume it. Return None, or the reason of its failure. A requested `stop` ends it
        early."""
        place = self._folder.run(run)
        resumes = (place / "ledger.sqlite").is_file()
        what = [str(place), "--resume"] if resumes else [str(self._folder.recipe(run)), "--run-dir", str(place)]
        log = self._folder.log(run)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "stretto_app.cli.main",
                "train",
                *what,
                "--no-plots",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the study, which then stops its runs
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        stop.call(partial(_terminate, process))
        try:
            code = await self._ended(process, run, stop)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code == 0:
            return None
        last = _reason(place) or log.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"{describe_exit(code)}: {last}" if last else describe_exit(code)

    async def _ended(self, process: asyncio.subprocess.Process, run: PlannedRun, stop: StopSignal) -> int:
        """Wait for the process; return its exit code. Once asked to stop, it has `_STOPPING` seconds; before, there is
        no limit, because a run has its own deadlines and watchdog."""
        owner, awaited = "study", f"the run {run.digest}"
        with waiting(owner, awaited, run.recipe.deadlines.still):
            code = await stop.unless(process.wait())
        if code is None:
            with contextlib.suppress(DeadlineExceeded):  # it will be killed, and can be resumed
                async with deadline(owner, f"{awaited} to stop", _STOPPING):
                    await process.wait()
        return process.returncode if process.returncode is not None else -signal.SIGKILL


def _reason(place: Path) -> str:
    """Reason of a run's failure on record in its ledger; "" if there is none, as for a refused or killed run."""
    try:
        ending = read_ending(RunFolder(place).ledger)
    except StoreError:  # reported when the outcome is read
        return ""
    return ending.reason if ending is not None and ending.how == "failed" else ""


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
