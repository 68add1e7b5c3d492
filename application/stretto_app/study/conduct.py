"""Train the runs of a study, as many at the same time as the cores allow. Finished runs are never repeated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.core.errors import RunFolderError, StoreError
from stretto.core.machine import cores
from stretto.core.tasks import gather_or_cancel
from stretto.launch.recipe.recipe import Recipe
from stretto.processes.stopping import StopSignal
from stretto.store.folder.provenance import machine
from stretto_app.study.definition import PlannedRun, Study
from stretto_app.study.folder import StudyFolder
from stretto_app.study.outcome import RunOutcome, read_outcome
from stretto_app.study.runner import TrainProcesses

Say = Callable[[str], None]


@dataclass
class StudyProgress:
    """State of a study's runs, by digest: outcomes of the finished runs, and the reason for each failed one."""

    finished: dict[str, RunOutcome] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0  # 128 + the signal that stopped the study, or 1 if runs have failed


async def conduct(
    study: Study, folder: StudyFolder, runner: TrainProcesses, say: Say, jobs: int | None = None
) -> StudyProgress:
    """Train unfinished runs, `jobs` at the same time, until all are finished or a stop is requested. A run whose folder
    cannot be read counts as failed; the folder is not changed."""
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
        say(f"{len(progress.finished)} of {total} runs are finished already")

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
    """Number of runs to train at the same time: `asked`, or as many as this machine's cores allow; 1 if the runs have
    fixed ports or use a GPU.

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
    return accelerated or recipe.engine.kind != "native" or recipe.engine.transport == "tcp"


def _threads(recipe: Recipe) -> int:
    engines = recipe.engine.count * recipe.engine.threads
    return engines + recipe.trainer.ranks * recipe.trainer.threads


def _outcome(folder: StudyFolder, run: PlannedRun) -> RunOutcome | None:
    return read_outcome(folder.run(run), run.recipe.trainer.steps, run.seed, run.digest)
