"""`stretto.train`: the command ``stretto train`` as a function. `stretto.Run`: access to a run's folder and, if the run
was started here, to the process that writes it; the orders to that process.

    caller ──order──► process ──the run folder, when all is checked──► ... ──exit code, result or error──► caller

Training runs in a process of its own. So the caller keeps its own event loop (of a notebook), signals and threads, and
all roles end with that process. If the caller ends, its end of the pipe closes; the process then stops.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from stretto.core.errors import Problem, RecipeError, RoleDied, StoreError, StrettoError
from stretto.core.records import Record
from stretto.doors.loading import from_package
from stretto.doors.mistakes import shown
from stretto.processes.spawn import Spawner, describe_exit
from stretto.store import lock
from stretto.store.ending import condition
from stretto.store.inspection import Inspection
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, EvaluationLine, StepMetrics, read_metrics

if TYPE_CHECKING:
    from stretto.launch.recipe.recipe import Recipe

INSIDE = "STRETTO_INSIDE"  #: environment variable that is set in all processes of a run
_KILL_SECONDS = 30.0
_READING = "stretto_report.reading"


class Order(Record, frozen=True):
    """Work that a `RunProcess` sends to its process (by pickle), which calls `carry_out`."""

    def carry_out(self, folder: Path, say: Callable[[str], None], spawner: Spawner) -> object:
        """Do the work; the result, or a raised StrettoError or OSError, becomes the last message to the caller.
        `folder`: empty, deleted afterwards. `say`: sends the caller a message before that. `spawner`: starts roles."""
        raise NotImplementedError


class _TrainOrder(Order, frozen=True):
    """Order to train. `recipe`: TOML text. `name`: of the recipe file, without ``.toml``. `run_dir`: the run folder;
    None: a new folder ``runs/NAME-DATE``. `resume`: continue the run in `run_dir`. The process says the path of the run
    folder once all is checked, and replies with the result of the training at the end."""

    recipe: str
    name: str
    run_dir: str | None
    resume: bool

    def carry_out(self, folder: Path, say: Callable[[str], None], spawner: Spawner) -> object:
        from stretto.launch.train import prepare
        from stretto.loop.records.reporter import SilentReporter

        recipe = folder / f"{self.name}.toml"
        recipe.write_text(self.recipe, encoding="utf-8")
        prepared = prepare(recipe, (), Path(self.run_dir) if self.run_dir else None, self.resume)
        say(str(prepared.path.resolve()))
        return prepared.train(SilentReporter(), spawner)


class RunProcess:
    """Handle of the process that carries out one order."""

    def __init__(self, order: Order) -> None:
        """Start the process and send it the order.

        Raises:
            RecipeError: the caller runs inside such a process itself: a reward worker has imported the user's script,
                which would train again.
        """
        if INSIDE in os.environ:
            found = "is called while a worker of a run imports the module of its reward"
            raise RecipeError(
                [Problem("stretto", found, 'put code that must run only once under if __name__ == "__main__":')]
            )
        self._near, far = Pipe()
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto.run_process", str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {INSIDE: "1"},
                pass_fds=(far.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the caller alone
            )
        self._near.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def heard(self, seconds: float) -> bool:
        """Wait until the process has sent a message or has ended; False if `seconds` pass before."""
        return self._near.poll(seconds)

    def reply(self) -> Any:
        """Wait for the next message of the process, without a timeout. Ctrl-C ends the process.

        Raises:
            StrettoError, OSError: the error that the process reports.
            RoleDied: the process ended without a message.
        """
        try:
            said = self._near.recv()
        except (EOFError, ConnectionError):
            raise RoleDied("the process of the run", describe_exit(self._process.wait())) from None
        except BaseException:
            self.stop(0.0)
            raise
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None:
        """Close the pipe, and wait for the end of the process; after 30 seconds it is killed. Call it after the last
        message has been read."""
        self._near.close()
        if not self._ended_within(_KILL_SECONDS):
            self._process.kill()
            self._process.wait()

    def stop(self, patience: float) -> None:
        """Stop the process, and wait for its end: request a stop by SIGTERM; after `patience` seconds, or on Ctrl-C,
        request it again, for an immediate stop; after 30 seconds more, kill it. The roles end with the process. Ctrl-C
        is raised at the end."""
        self._process.terminate()
        interrupt: KeyboardInterrupt | None = None
        try:
            ended = self._ended_within(patience)
        except KeyboardInterrupt as pressed:
            ended, interrupt = False, pressed
        if not ended:
            self._process.terminate()
            if not self._ended_within(_KILL_SECONDS):
                self._process.kill()
                self._process.wait()
        if interrupt is not None:
            raise interrupt

    def _ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


_POLL_SECONDS = 0.1
_SAVING_SECONDS = 60.0  # beyond `deadlines.stop`: a checkpoint and a policy are written


def open_run(folder: str | Path) -> Run:
    """Open a run that was started elsewhere, for reading. It may be running, finished or dead, and is never stopped
    through the returned object.

    Example::

        run = stretto.open_run("runs/first")
        print(run.accuracy, run.metrics[-1].staleness_max)

    Raises:
        RunFolderError: the folder holds no run.
    """
    return Run(RunFolder.open(folder))


class Run:
    """A run: gives its training steps as they happen, its accuracy, and its trajectories.

    A run from `stretto.train` continues until its last step or until it is stopped: by `stop`, at the end of a ``with``
    block, by leaving a loop over its steps early (``break``, an exception, Ctrl-C), or at the end of the program. A
    stopped run has a checkpoint; ``stretto.train(run.folder, resume=True)`` resumes it.

    Example::

        run = stretto.open_run("runs/first")
        accuracies = [step.accuracy for step in run]
        rows = list(run.trajectories())      # pandas.DataFrame(rows), datasets.Dataset.from_list(rows)
        print(len(accuracies), rows[0]["prompt"], rows[0]["text"], rows[0]["reward"])
    """

    def __init__(self, folder: RunFolder, process: RunProcess | None = None, patience: float = 0.0) -> None:
        """Take a run's folder, which exists. `process`: writes the folder; None: the run was started elsewhere.
        `patience`: seconds that `stop` waits before it requests an immediate stop. With a process, the run is stopped
        at the end of the program."""
        self._folder = folder
        self._process = process
        self._patience = patience
        self._failure: StrettoError | OSError | None = None
        if process is not None:
            atexit.register(self.stop)

    @classmethod
    def of_process(cls, process: RunProcess, patience: float) -> Self:
        """Wait until a newly started process has checked recipe, data and folder; returns its run. `patience`:
        `deadlines.stop` of the recipe, in seconds.

        Raises:
            UserError: the recipe, the data or the folder has a mistake.
            StrettoError, OSError: any other error that the process reports; RoleDied if it ended without a report.
        """
        try:
            folder = process.reply()
        except (StrettoError, OSError):
            process.close()
            raise
        return cls(RunFolder(Path(folder)), process, patience + _SAVING_SECONDS)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def running(self) -> bool:
        """Whether the run is still running."""
        return lock.is_held(self.folder) if self._process is None else not self._has_ended(0.0)

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped`` by a signal, or ``dead`` (killed, or ended by an error). Raises
        StoreError if the ledger or the log cannot be read."""
        return "running" if self.running else condition(self.folder).state

    @property
    def metrics(self) -> list[StepMetrics]:
        """Measurements of all training steps so far (docs/reference/metrics.md). Raises StoreError if a line of
        ``metrics.jsonl`` is damaged, OSError if the file cannot be read."""
        return read_metrics(self._folder.metrics)[0]

    @property
    def evaluations(self) -> list[EvaluationLine]:
        """All evaluations of the held-out accuracy so far, those of further sets left out. Raises StoreError or
        OSError as `metrics`."""
        return read_metrics(self._folder.metrics)[1]

    @property
    def accuracy(self) -> float | None:
        """Last measured held-out accuracy; None before the first, or if no completion has a verdict."""
        evaluations = self.evaluations
        return evaluations[-1].known if evaluations else None

    def summary(self) -> Inspection:
        """Summarise the run in numbers, as ``stretto inspect`` does. Raises RunFolderError if there is no run,
        StoreError if its ledger cannot be read, RecipeError if the package stretto-report is not installed."""
        found: Inspection = from_package(f"{_READING}.inspection:inspect_run", "Run.summary")(self.folder)
        return found

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """Iterate over all trajectories issued so far, each as a dict: prompt, tokens, log-probabilities, versions,
        reward, state, and more. Raises RecipeError if the package stretto-report is not installed, and StoreError,
        during the iteration, if the ledger cannot be read."""
        read = from_package(f"{_READING}.export:read_trajectories", "Run.trajectories")
        return (msgspec.structs.asdict(trajectory) for trajectory in read(self.folder))

    def __iter__(self) -> Iterator[StepMetrics]:
        """Iterate over all training steps from the first on, each as soon as it is done, until the run ends.

        Leaving the loop early stops the run. So does dropping the iterator, as ``next(iter(run))`` does. To look at a
        part of the steps, use `metrics`, or a run from `open_run`, which iterating does not stop.

        Raises:
            StrettoError, OSError: the run failed, and was started here; of another run read `state`.
        """
        lines, last = _MetricsReader(self._folder.metrics), 0
        try:
            ended = False
            while not ended:
                ended = not self.running
                for step in lines.read():
                    if step.step > last:
                        last = step.step
                        yield step
                if not ended:
                    self._pause()
        except BaseException:
            self.stop()
            raise
        self._raise_failure()

    def wait(self) -> Self:
        """Wait until the run has ended; returns the run. Raises the error of a run that was started here and has
        failed. Ctrl-C stops the run."""
        for _ in self:
            pass
        return self

    def stop(self) -> None:
        """Stop the run and wait until its processes have ended. The step in progress is finished if it takes at most
        ``deadlines.stop`` seconds. Does nothing for a run that has ended, or was started elsewhere."""
        if self._process is not None and not self._has_ended(0.0):
            self._process.stop(self._patience)
            self._has_ended(0.0)
            if isinstance(self._failure, RoleDied):  # it ended before it handled the signal, or was killed
                self._failure = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        if error is None:
            self._raise_failure()

    def __repr__(self) -> str:
        return f"<stretto.Run {str(self.folder)!r}, {self.state}>"

    def _pause(self) -> None:
        if self._process is None:
            time.sleep(_POLL_SECONDS)
        else:
            self._has_ended(_POLL_SECONDS)

    def _has_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the run's process; returns whether it has ended, True also if the run was
        started elsewhere. Its error, if any, is kept for `_raise_failure`."""
        if self._process is None:
            return True
        if not self._process.heard(seconds):
            return False
        try:
            self._process.reply()
        except (StrettoError, OSError) as error:
            self._failure = error
        self._process.close()
        self._process = None
        atexit.unregister(self.stop)
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _MetricsReader:
    """Reads new training steps from a ``metrics.jsonl`` that grows."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path, METRICS, links=True)

    def read(self) -> list[StepMetrics]:
        """Read the steps since the last call, without the other lines; empty if there are none or no file yet. An
        unfinished last line is left for the next call. If a resumed run has rewritten the file, it is read from its
        start again. Raises StoreError if a complete line cannot be read."""
        found, self._lines.more = list[StepMetrics](), True
        while self._lines.more:
            lines, _ = self._lines.read_on()
            found += [line for line in lines if isinstance(line, StepMetrics)]
        if self._lines.fault is not None:
            raise StoreError(self._lines.fault)
        return found


#: A reward: a function, or the name of a built-in reward.
Judge = Callable[..., object] | str
Rewards = Judge | Sequence[Judge]


def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    reward: Rewards | None = None,
    on_step: Callable[[StepMetrics], object] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    **overrides: Any,
) -> Run:
    """Train a policy by asynchronous reinforcement learning, as ``stretto train`` does.

    Returns when recipe, data, model and reward are checked; the run itself goes on in other processes.

    Args:
        recipe: a TOML file, a `stretto.Recipe`, or a dict of its sections; with `resume`, the folder of the run.
        reward: judges the completions (docs/how_to/rewards.md): a function, synchronous or not, that another process
            can import; the name of a built-in reward; or a list of these, whose rewards are added. Default: the
            recipe's.
        on_step: called with each training step, its result is ignored; `train` then returns only when the run has
            ended, and raises its error. An exception in it stops the run and is raised.
        run_dir: folder of the run; default: ``runs/RECIPE-DATE``.
        resume: continue a run that was stopped or killed.
        overrides: values that replace those of the recipe: ``trainer={"steps": 100}``, or
            ``**{"trainer.steps": 100}``.

    Example::

        run = stretto.train("recipe.toml", run_dir="runs/first", trainer={"steps": 3})
        for step in run:
            print(step.step, step.accuracy, step.staleness_max)
        print(run.accuracy)

    Raises:
        UserError: the recipe, the data, the model, the reward or the folder is invalid; with the message of the command
            line.
    """
    _check(on_step=on_step, run_dir=run_dir)
    overrides |= overrides_of(reward)
    place = recipe
    if resume and isinstance(recipe, str | Path):
        place, run_dir = RunFolder.open(recipe).recipe, recipe
    found = recipe_of(place, overrides)
    from stretto.launch.recipe.recipe import to_toml

    name = Path(recipe).stem if isinstance(recipe, str | Path) else "recipe"
    order = _TrainOrder(
        recipe=to_toml(found), name=name, run_dir=None if run_dir is None else str(run_dir), resume=resume
    )
    run = Run.of_process(RunProcess(order), found.deadlines.stop)
    if on_step is not None:
        for step in run:
            on_step(step)
    return run


def recipe_of(recipe: str | Path | Recipe | Mapping[str, Any], overrides: dict[str, Any]) -> Recipe:
    """Load the recipe (a TOML file, a `Recipe`, or a dict of its sections), apply `overrides` (as those of `train`) and
    validate it. Raises RecipeError if it is none of these or has mistakes."""
    from stretto.launch.recipe.overrides import as_parsed
    from stretto.launch.recipe.recipe import Recipe, load_recipe, override, validate

    if isinstance(recipe, str | Path):
        return load_recipe(Path(recipe), overrides)
    if not isinstance(recipe, Recipe | Mapping):
        raise unfit("recipe", recipe, "a TOML file, a stretto.Recipe, or a dict of its sections")
    if isinstance(recipe, Recipe):
        place, tree = "Recipe", recipe.model_dump(mode="python", exclude_none=True)
    else:
        place, tree = "recipe", as_parsed(recipe)
    override(tree, overrides)
    return validate(tree, place, overrides)


def overrides_of(reward: object) -> dict[str, Any]:
    """Convert the argument `reward` of `train` to an override of the recipe: ``rewards.function``, or for a list
    ``rewards.functions``; empty for None. Raises RecipeError if it is neither a function, a name nor a list of them."""
    if reward is None:
        return {}
    if isinstance(reward, list | tuple) and reward and all(callable(one) or isinstance(one, str) for one in reward):
        return {"rewards.functions": [{"function": one} for one in reward]}
    if callable(reward) or isinstance(reward, str):
        return {"rewards.function": reward}
    raise unfit("reward", reward, "a function, the name of a built-in one, or a list of them")


def _check(*, on_step: object, run_dir: object) -> None:
    """Check that `on_step` is callable and `run_dir` a path, since a mistake would otherwise show only after the run
    has started. Raises RecipeError."""
    if on_step is not None and not callable(on_step):
        raise unfit("on_step", on_step, "a function that is called with each step, a stretto.StepMetrics")
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise unfit("run_dir", run_dir, "the path of a folder")


def unfit(argument: str, value: object, allowed: str) -> RecipeError:
    """Make the error for an argument of a wrong type. `allowed`: what to give instead, as "the path of a folder"."""
    return RecipeError([Problem(argument, f"{shown(value)} is of the type {type(value).__name__}", f"give {allowed}")])
