"""Train the runs of a study, each by `stretto train` in a process of its own, as many at the same time as the cores
allow. Finished runs are never repeated; the result of a run is read from its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stretto.core.deadlines import deadline, waiting
from stretto.core.errors import DeadlineExceeded, RunFolderError, StoreError, several
from stretto.core.machine import cores
from stretto.core.records import Record
from stretto.core.tasks import gather_or_cancel
from stretto.launch.recipe.extensions import AgentConfig
from stretto.launch.recipe.recipe import Recipe
from stretto.processes.heartbeat import die_with_parent
from stretto.processes.spawn import describe_exit
from stretto.processes.stopping import StopSignal
from stretto.store.ending import condition, read_ending
from stretto.store.run_folder import RunFolder, machine
from stretto.store.series.metrics import read_metrics
from stretto_app.study.definition import PlannedRun, Study
from stretto_app.study.folder import StudyFolder
from stretto_app.study.statistics import Evaluated
from stretto_report.reading.inspection import inspect_run


class RunOutcome(Record, frozen=True):
    """Result of a finished run. `seconds`: from the first admitted prompt to the last update; rates are over this time.
    `accuracy`: held-out accuracy of the last version. `trajectories`: trained ones. `seed`, `digest`: of the planned
    run."""

    seed: int
    digest: str
    accuracy: float
    seconds: float
    trajectories: int
    trained_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    wasted_tokens: int
    staleness_mean: float
    staleness_max: int
    evaluations: tuple[Evaluated, ...]

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second (effective throughput)."""
        return self.trained_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def generated_per_second(self) -> float:
        """Generated tokens per second; 0 if no second was counted."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds until an evaluation first reached this held-out accuracy; None if none reached it."""
        return next((one.seconds for one in self.evaluations if one.accuracy >= accuracy), None)


def read_outcome(path: Path, steps: int, seed: int, digest: str) -> RunOutcome | None:
    """Read the outcome of the run in a folder. None if there is no run, it is not finished, it had fewer than `steps`
    steps, or its version `steps` was not evaluated. `seed` and `digest` are copied into the outcome.

    Raises:
        StoreError: the run folder cannot be read.
    """
    if not (path / "ledger.sqlite").is_file() or condition(path).state != "finished":
        return None
    _, lines = read_metrics(RunFolder.open(path).metrics)
    seen = inspect_run(path)
    last = [line.accuracy for line in lines if line.version == steps]
    if seen.steps < steps or not last:
        return None
    return RunOutcome(
        seed=seed,
        digest=digest,
        accuracy=last[-1],
        seconds=seen.rl_seconds,
        trajectories=seen.trajectories.trained,
        trained_tokens=seen.tokens.trained,
        generated_tokens=seen.tokens.generated,
        recomputed_tokens=seen.tokens.recomputed,
        wasted_tokens=seen.tokens.wasted,
        staleness_mean=seen.staleness.mean,
        staleness_max=seen.staleness.max,
        evaluations=tuple(Evaluated(line.step, line.rl_seconds, line.accuracy) for line in lines),
    )


_STOPPING = 120.0  # seconds for the current step and a checkpoint; the run's own deadlines are shorter


class TrainProcesses:
    """Runs ``stretto train``, which resumes a run that an earlier process of the study started. The processes end with
    this one, and draw no plots, because a study has its own."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder

    async def train(self, run: PlannedRun, stop: StopSignal) -> str | None:
        """Train the run to its end; resume it if its folder has a ledger. Return None if it has ended with exit code 0,
        else a description of the exit code with the reason. A requested `stop` ends it early."""
        place = self._folder.run(run)
        resumes = (place / "ledger.sqlite").is_file()
        what = [str(place), "--resume"] if resumes else [str(self._folder.recipe(run)), "--run-dir", str(place)]
        command = [sys.executable, "-m", "stretto_app.cli.main", "train", *what, "--no-plots"]
        log = self._folder.log(run)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
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
        last = _reason(place) or log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"{describe_exit(code)}: {last}" if last else describe_exit(code)

    async def _ended(self, process: asyncio.subprocess.Process, run: PlannedRun, stop: StopSignal) -> int:
        """Wait for the process; return its exit code. Once asked to stop, it has two minutes; if it still runs
        then, the result is -SIGKILL, but it is not killed here. Before, there is no limit, because a run has its own
        deadlines and watchdog."""
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


Say = Callable[[str], None]


@dataclass
class StudyProgress:
    """State of a study's runs, by the digest of a run: outcomes of the finished ones, and why the others failed. Runs
    that were stopped are in neither. `exit_code`: 128 + the signal that stopped the study, or 1 if runs have failed."""

    finished: dict[str, RunOutcome] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0


async def conduct(
    study: Study, folder: StudyFolder, runner: TrainProcesses, say: Say, jobs: int | None = None
) -> StudyProgress:
    """Train the unfinished runs of a study by `runner`, `jobs` at the same time (None: as many as the cores carry; one
    after the other if any uses a GPU, a fixed port or engines of another make), until all have ended or a signal stops
    them; return what became of them. A run whose folder cannot be read counts as failed; the folder is not changed.
    `say` gets lines of progress."""
    stop, progress, waiting = StopSignal(), StudyProgress(), deque[PlannedRun]()
    for run in study.runs:
        try:
            if (outcome := _outcome(folder, run)) is not None:
                progress.finished[run.digest] = outcome
            else:
                waiting.append(run)
        except (StoreError, RunFolderError) as error:
            progress.failed[run.digest] = str(error)
            say(f"{_name(study, run)}: failed: {error}")
    total = len(study.runs)
    if progress.finished:
        say(f"{len(progress.finished)} of {several(total, 'run is', 'runs are')} finished already")

    async def work() -> None:
        while waiting and not stop.requested:
            run, start = waiting.popleft(), time.monotonic()
            failure, outcome = await runner.train(run, stop), None
            try:
                outcome = _outcome(folder, run)
            except (StoreError, RunFolderError) as error:
                failure = f"{failure}; {error}" if failure else str(error)
            if outcome is not None:
                progress.finished[run.digest] = outcome
                told = f"accuracy {outcome.accuracy:.3f} in {outcome.seconds:.1f} s"
            elif stop.requested:
                told = "stopped; the study resumes it when it is started again"
            else:
                progress.failed[run.digest] = failure or "it ended before its last evaluation"
                told = f"failed: {progress.failed[run.digest]}; {folder.log(run)}"
            seconds = time.monotonic() - start
            say(f"[{len(progress.finished)}/{total}] {_name(study, run)}: {told} ({seconds:.0f} s in all)")

    at_a_time = min(len(waiting), side_by_side([run.recipe for run in waiting], jobs))
    await gather_or_cancel(*(work() for _ in range(at_a_time)))
    progress.exit_code = stop.exit_code or int(bool(progress.failed))
    return progress


def _name(study: Study, run: PlannedRun) -> str:
    return f"{study.cells[run.cell].name}, seed {run.seed}"


def side_by_side(recipes: Sequence[Recipe], asked: int | None = None) -> int:
    """Number of runs to train at the same time: 1 if a run has a fixed port or engines of another make, or uses a GPU;
    else `asked`; None: as many as this machine's cores allow.

    A run needs the cores of its engines and its trainer; with more runs their times would be wrong.
    """
    if any(_is_alone(recipe) for recipe in recipes):
        return 1
    if asked is not None:
        return asked
    largest = max((_threads(recipe) for recipe in recipes), default=1)
    return max(1, cores() // largest)


def _is_alone(recipe: Recipe) -> bool:
    devices = (recipe.engine.device, recipe.trainer.device)
    accelerated = "cuda" in devices or ("auto" in devices and bool(machine().accelerators))
    return accelerated or recipe.engine.kind != "native" or _has_a_fixed_port(recipe)


def _has_a_fixed_port(recipe: Recipe) -> bool:
    gateway = recipe.gateway.port if isinstance(recipe.workflow, AgentConfig) else 0
    joining = recipe.cluster.listen.rpartition(":")[2]
    page = recipe.logging.prometheus_port
    return recipe.engine.transport == "tcp" or bool(gateway) or joining not in ("", "0") or page is not None


def _threads(recipe: Recipe) -> int:
    engines = recipe.engine.count * recipe.engine.threads
    return engines + recipe.trainer.ranks * recipe.trainer.threads


def _outcome(folder: StudyFolder, run: PlannedRun) -> RunOutcome | None:
    return read_outcome(folder.run(run), run.recipe.trainer.steps, run.seed, run.digest)
