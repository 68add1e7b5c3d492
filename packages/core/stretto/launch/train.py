"""`stretto train`: checks a recipe, creates or resumes its run folder, and trains."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stretto.core.errors import (
    Problem,
    RoleDied,
    RoleFailed,
    RunFolderError,
    StoreError,
    StrettoError,
    described,
    several,
)
from stretto.doors.loading import from_package, of_application
from stretto.launch.assemble.run import StartState, run
from stretto.launch.preflight.base import loaded_files
from stretto.launch.preflight.checks import check_checkpoint
from stretto.launch.preflight.devices import placed, seat_of_warm_start, seats_of, usable_gpus
from stretto.launch.preflight.plan import Plan, advice, make_plan
from stretto.launch.recipe.extensions import OUTLETS, OutletsConfig
from stretto.launch.recipe.recipe import Recipe, differences, load_recipe, to_toml
from stretto.launch.recipe.sections import EvaluationConfig
from stretto.launch.recorded import (
    DATA,
    FIELDS,
    RECIPE,
    DataRecord,
    changed_sources,
    check_fields,
    model_fingerprint,
    question_fingerprints,
    record_recipe,
    record_sources,
    recorded_recipe,
    with_stops_on_record,
    write_questions,
)
from stretto.loop.records.reporter import Reporter, RunLog, SilentReporter
from stretto.loop.recovery import BASE, weights_digest
from stretto.processes import event_loop
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import until_cut_short
from stretto.store.checkpoints import Checkpoints, seal_files
from stretto.store.ending import ENDING, Ending, read_ending, record_end
from stretto.store.files import unreplaced
from stretto.store.ledger.ledger import Ledger, put_fact
from stretto.store.ledger.schema import page_for
from stretto.store.run_folder import RunFolder, library_versions, machine
from stretto.store.series.metrics import read_evaluations
from stretto.store.totals import TOTALS, Totals
from stretto.trainer.config import TrainerConfig
from stretto.trainer.optimizer import learning_rate
from stretto.weights.folder import SHARED

#: Settings that may change when a run is resumed.
_MAY_CHANGE = (
    "trainer.steps",
    "trainer.ranks",
    "trainer.remote_ranks",
    "trainer.tensor_parallel",
    "trainer.context_parallel",
    "trainer.keep_versions",
    "trainer.checkpoint_every",
    "evaluation",
    "deadlines",
    "store",
    "cluster",
    "logging",
)
#: Keys of [evaluation]: those by which a run that has ended early may go on, and one that has done its steps may keep
#: another policy.
_KEEPS = ("keep_best", "best_of")
_ENDS_EARLY = (*_KEEPS, "patience", "least_gain", "goal", "goal_holds", "prompts", "samples", "seed", "sets")

_JOIN = "join.json"  # file of a run that other machines could join; another conductor may have a copy of the folder
#: Names of the ledger's facts with digests of the training questions, the held-out ones, evaluation sets, the model.
_QUESTIONS, _HELD_OUT, _SETS, _MODEL = "questions", "held out", "evaluation sets", "model"
_FOLDERS = ("rewards.path", "workflow.path")  # of modules
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "disk is full")  # the last one: SQLite's
_CONTAINERS = 1_000_000  # allocations between two garbage collections


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Context manager: make garbage collection rare within the block. Existing objects are exempt, and a collection
    starts only after a million further allocations.

    Records have no reference cycles. With the usual settings, collection would take a third of the time of a conductor
    with hundreds of engines (docs/how_to/cluster.md). After the block the settings are restored. Objects are unfrozen
    only if none were frozen before: earlier ones are shared with another process, or large.
    """
    (first, *others), frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(_CONTAINERS, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
        if not frozen:
            gc.unfreeze()


def prepare(
    recipe_path: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool, write: bool = True
) -> Prepared:
    """Check everything, and create or open the run folder and lock it; nothing is started.

    Args:
        recipe_path: recipe file; with `resume`, it may be a run folder, whose own recipe is then used.
        overrides: texts ``section.key=value``.
        run_dir: run folder; None: ``runs/RECIPE-DATE``, or the folder given as `recipe_path`.
        resume: continue a run. Then `run_dir`, or a folder as `recipe_path`, is needed.
        write: replace the recipe in the folder and ledger of a resumed run that is not done; False for a dry run. A new
            run is always written.

    Raises:
        UserError: the recipe, what it names, or the run folder is wrong; has every mistake. A resumed run may change
            only some settings, and not its questions.
        StoreError: the ledger, a line of the metrics, or every checkpoint of a resumed run is damaged, or the ledger
            has another format.
    """
    if resume and os.path.isdir(recipe_path):
        if run_dir is not None and run_dir.resolve() != recipe_path.resolve():
            found = f"{recipe_path} is to be resumed, and --run-dir is {run_dir}"
            raise RunFolderError([Problem("--resume", found, "name the run once: stretto train --resume RUN_DIR")])
        recipe_path, run_dir = RunFolder.open(recipe_path).recipe, recipe_path
    if resume and run_dir is None:
        remedy = "name the run to resume: stretto train --resume RUN_DIR"
        raise RunFolderError([Problem("--resume", "without --run-dir", remedy)])
    recipe = load_recipe(recipe_path, overrides)
    path = place_of_run(recipe_path, run_dir)
    has_policy = resume and os.path.exists(RunFolder(path).policy(0))
    plan = fitting(make_plan(recipe, has_policy=has_policy, dry=not write), dry=not write)
    if not resume:
        return Prepared(plan, _new(path, plan), StartState())
    folder = RunFolder.resume(path)
    try:
        _assert_alone(path, recipe)
        # One ledger for all: to open it, all trajectories of a run that an earlier version has begun are counted.
        with closing(Ledger(folder.ledger, recipe.store)) as ledger:
            beginning = _where_it_ended(folder, plan, ledger)
            lacking = _check_questions(folder, plan, ledger)
            write = write and not beginning.done
            prepared = Prepared(with_stops_on_record(plan, ledger, write=write), folder, beginning)
            if write:
                for key, fact in lacking.items():
                    ledger.put(key, fact)
                record_recipe(ledger, recipe)
                record_sources(ledger, recipe, beginning.changed)
        if write:
            folder.write("recipe.toml", to_toml(recipe))
            if not folder.questions.exists():  # the run was killed before it had written them
                write_questions(folder, plan)
    except BaseException:
        folder.release()
        raise
    return prepared


def place_of_run(recipe_path: Path, run_dir: Path | None) -> Path:
    """Return the folder of a run of this recipe: `run_dir`, or, if that is None, ``runs/RECIPE-YYYYMMDD-HHMMSS``;
    nothing is created. Raises RunFolderError for a `run_dir` with a variable or a ``~`` that no shell has replaced."""
    if run_dir is None:
        return Path("runs") / f"{recipe_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if remedy := unreplaced(str(run_dir), run_dir):
        raise RunFolderError([Problem("--run-dir", f"{str(run_dir)!r:.80}", remedy)])
    return run_dir


def _assert_alone(path: Path, recipe: Recipe) -> None:
    """Raise RunFolderError if another conductor of this run is alive, on another copy of its folder. Does nothing if no
    machine could ever join the run."""
    if (path / _JOIN).exists():
        alone = from_package("stretto_cluster.succession:assert_alone", f"{path / _JOIN}")
        asyncio.run(alone(path, recipe.cluster.tls or ""))


def fitting(plan: Plan, *, dry: bool = False) -> Plan:
    """Return the plan with GPUs assigned to its roles and its warm start. `dry`: GPUs may be assumed (`usable_gpus`).
    Raises RecipeError if torch cannot use the GPUs (`usable_gpus`), the roles do not fit on them (`seats_of`), or, with
    the application installed, the run needs more than twice the available memory."""
    there = usable_gpus(plan.recipe, dry=dry)
    plan = replace(plan, seats=seats_of(plan, there), warm_seat=seat_of_warm_start(plan, there))
    advice("estimates:check_memory", plan)
    return plan


@dataclass(frozen=True)
class Prepared:
    """A checked run that is ready to train: its plan, the locked run folder, and the starting point. Made by `prepare`.
    `train` unlocks the folder; a caller that does not train calls `folder.release`."""

    plan: Plan
    folder: RunFolder
    beginning: StartState

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def steps(self) -> int:
        return self.plan.recipe.trainer.steps

    def note(self, line: str) -> None:
        """Append a line to the run's log alone."""
        RunLog(self.folder.log, SilentReporter()).note(line)

    def train(self, reporter: Reporter, spawner: Spawner = FRESH) -> int:
        """Train; returns the exit code: 0, or 128 + the signal that stopped the run. At the end the folder is unlocked,
        and the ending is in the ledger. A run without anything left to do says so, nothing is started or written, and 0
        is returned.

        Args:
            reporter: gets log lines and measurements, to show them.
            spawner: starts the processes of the roles.

        Raises:
            StrettoError: the run failed; it can be resumed from its last checkpoint.
        """
        with self.folder:
            if self.beginning.done:
                for sentence in self.beginning.sentences():
                    reporter.say(sentence)
                return 0
            put_fact(self.folder.ledger, ENDING, Ending("running"))
            logbook = RunLog(self.folder.log, reporter, self.steps)
            logbook.note(f"starts at version {self.beginning.version}")
            for sentence in _destinations(self.plan.recipe.logging, self.path):
                logbook.say(sentence)
            for sentence in placed(self.plan, self.plan.seats):
                logbook.say(sentence)
            warnings = of_application("extensions.preflight.estimates:warnings", lambda plan, folder: plan.notes)
            for warning in warnings(self.plan, self.path):
                logbook.say(f"warning: {warning}")
            try:
                with collected_seldom():
                    code = until_cut_short(
                        run(self.plan, self.folder, self.beginning, logbook, spawner), conductor_loop(self.plan)
                    )
            except SystemExit as end:
                code = int(end.code or 0)  # the run can be resumed from the last checkpoint
            except Exception as error:  # an error of stretto, or a bug: both end the run and are recorded
                told = described(error) if isinstance(error, OSError) else str(error)
                failed = error
                if room := _room_needed(told, self.path):
                    failed = _advised(error, told, room)
                    told = str(failed)
                logbook.ends()
                logbook.note(f"failed: {told}")
                with suppress(StoreError, OSError):  # the ledger may have ended the run: report that error
                    put_fact(self.folder.ledger, ENDING, Ending.of_error(error, told))
                if room:
                    raise failed from error
                raise
            logbook.ends()
            logbook.note(f"ends with exit code {code}")
            with closing(Ledger(self.folder.ledger, self.plan.recipe.store)) as ledger:
                record_end(ledger, code)
            return code


def _room_needed(told: str, run_dir: Path) -> str:
    """Words to append to the error `told` if a full disk has ended the run: how much is free on the disk of the file
    that it names (else on the fullest that the run writes to), and what to do; "" for another error."""
    if not any(words in told for words in _FULL):
        return ""
    named_in = told.partition("; see the end of ")[0]  # a role's log has a name too
    disks = list[tuple[bool, int, Path]]()
    for folder in (run_dir, SHARED, None):
        with suppress(OSError):  # it is gone; or every folder for temporary files is full, then there is none
            place = folder or Path(tempfile.gettempdir())
            if named := re.search(rf"{re.escape(str(place))}/[^:'\"]+", named_in):
                place = next(one for one in Path(named[0]).parents if one.exists())
            disks.append((named is None, shutil.disk_usage(place).free, place))
    if not disks:
        return ""
    _, free, place = min(disks)
    remedy = f"make room there, and go on with `stretto train --resume {run_dir}`"
    return f"; of the disk of {place} {free / (1 << 20):.1f} MiB are free: {remedy}"


def _advised(error: Exception, told: str, advice: str) -> StrettoError:
    """Return the error of a run that a full disk has ended, `told` in words, with `advice` behind them. The error of a
    role keeps its class and the name of the role; another is a StoreError."""
    match error:
        case RoleDied():
            return RoleDied(error.role, error.how + advice, error.log)
        case RoleFailed():
            return RoleFailed(error.role, error.problem + advice, error.exit_code)
    return StoreError(told + advice)


def conductor_loop(plan: Plan) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what creates the event loop of a conductor: `event_loop.new_event_loop`, and asyncio's for a run whose
    gate asks for TLS. uvloop may read a caller's first words before the gate begins TLS, and these are lost."""
    return asyncio.new_event_loop if plan.recipe.cluster.tls else event_loop.new_event_loop


def _destinations(config: OutletsConfig, folder: Path) -> list[str]:
    """Return a sentence for each tool that says where it shows the run."""
    if not config.tools:
        return []
    destinations = from_package("stretto_report.outlets.supervision:destinations", OUTLETS.key)
    return list(destinations(config, folder, os.environ))


def _new(path: Path, plan: Plan) -> RunFolder:
    """Create and lock the folder of a new run, and record in it what a resumed run is compared with. Raises
    RunFolderError if the folder holds another run or other files, is in use, or cannot be written."""
    folder = RunFolder.create(path)
    try:
        _fill(folder, plan)
    except BaseException:
        folder.release()
        raise
    return folder


def _fill(folder: RunFolder, plan: Plan) -> None:
    """Write what a new run folder has from the start: recipe, ledger, questions, versions and machine."""
    folder.write("recipe.toml", to_toml(plan.recipe))
    rollout = plan.recipe.rollout
    page = page_for(rollout.batch_size * rollout.group_size * plan.sampling.max_tokens)
    with closing(Ledger(folder.ledger, plan.recipe.store, page=page)) as ledger:  # from now on the run can be resumed
        ledger.put(_QUESTIONS, question_fingerprints(plan)[0])
        ledger.put(_HELD_OUT, plan.kept_apart_digest)
        ledger.put(_SETS, plan.set_digests)
        ledger.put(FIELDS, plan.fields)
        record_recipe(ledger, plan.recipe)
        record_sources(ledger, plan.recipe)
        ledger.put(_MODEL, model_fingerprint(plan))
        ledger.put(DATA, DataRecord.of(plan))
        with_stops_on_record(plan, ledger)
        ledger.put(TOTALS, Totals(max_staleness=rollout.staleness_bounds[1]))  # readers see the bound at once
    write_questions(folder, plan)
    folder.write("versions.json", _json(library_versions()))
    folder.write("machine.json", _json(machine()))


def _check_moved(folder: RunFolder, before: Recipe, plan: Plan, ledger: Ledger) -> tuple[str, ...]:
    """Check that a model at another path is the same one, and return the keys of paths that a resume may change.

    Their contents are compared instead: of the model here, of the data by `_check_questions`, of modules by
    `changed_sources`. `before`: the recorded recipe. Raises RunFolderError for another model.
    """
    known, paths = ledger.get(_MODEL, str), (before.model.path, plan.recipe.model.path)
    moved, place = paths[0] != paths[1], f"{folder.path}: model"
    if moved and None in paths:
        was, now = ("[model.build]" if path is None else f"model.path = {path!r}" for path in paths)
        found = f"the run began with {was}, and now has {now}"
        raise RunFolderError([Problem(place, found, "a resumed run keeps its model: leave it out")])
    if moved and known is not None:
        began = ledger.get(BASE, str)  # None: an older run, whose weights are not compared
        path = plan.base.path
        weights = weights_digest(seal_files(path), loaded_files(path)) if began is not None else None
        other = f"other weights (their digest is {weights:.8}, on record is {began:.8})" if weights != began else ""
        if holds := "another model" if known != model_fingerprint(plan) else other:
            found = f"was {paths[0]!r}, and {str(plan.base.path)!r} holds {holds}"
            raise RunFolderError([Problem(f"{place}.path", found, "give the new path of the same model")])
    files = {"jsonl": ("task.file", "task.held_out_file"), "dataset": ("task.sources", "task.held_out_sources")}
    return (*files.get(before.task.kind, ()), *_FOLDERS, *(("model.path",) if known is not None else ()))


def _check_questions(folder: RunFolder, plan: Plan, ledger: Ledger) -> dict[str, object]:
    """Raise RunFolderError if the questions of a resumed run, or their order, have changed: the run continues at a
    position in the training questions. An evaluation set may be new or left out. Returns the facts that are not on
    record, by name."""
    lacking, sets = dict[str, object](), ledger.get(_SETS, dict[str, str]) or {}
    if plan.set_digests.keys() - sets.keys():
        lacking[_SETS] = {**plan.set_digests, **sets}
    for what, key, known, found in (
        ("training questions", _QUESTIONS, ledger.get(_QUESTIONS, str), question_fingerprints(plan)),
        ("held-out questions", _HELD_OUT, ledger.get(_HELD_OUT, str), (plan.kept_apart_digest,)),
        *(
            (f"questions of evaluation set {name}", _SETS, sets.get(name, one), (one,))
            for name, one in plan.set_digests.items()
        ),
    ):
        if known is None:  # the run was killed before it was recorded, or began with an earlier version of stretto
            lacking[key] = found[0]
        elif known not in found:
            changed = (
                f"the {what} are not those of the run (the data or the tokenizer has changed: their digest "
                f"is {found[0]}, on record is {known})"
            )
            way_out = "give the set another name" if key == _SETS else "start a new run"
            raise RunFolderError([Problem(str(folder.path), changed, f"restore them, or {way_out}")])
    order, found_order = ledger.get(DATA, DataRecord), DataRecord.of(plan)
    if order is None:
        lacking[DATA] = found_order
    elif order != found_order:
        changed = "the sources, their weights or the curriculum are not those of the run; they determine the order"
        raise RunFolderError([Problem(str(folder.path), changed, "restore them, or start a new run")])
    return lacking | check_fields(folder, plan, ledger)


def _where_it_ended(folder: RunFolder, plan: Plan, ledger: Ledger) -> StartState:
    """Return the starting point of a resumed run.

    Raises:
        RecipeError: this version of stretto does not accept the recorded recipe.
        RunFolderError: settings or model have changed that may not change; the checkpoint is of another model; or more
            steps are done than asked for.
        StoreError: the ledger, a line of the metrics, or every checkpoint is damaged.
    """
    recipe, before = plan.recipe, recorded_recipe(folder, ledger.get(RECIPE, str))
    changed = changed_sources(ledger, recipe)
    moved = _check_moved(folder, before, plan, ledger)
    changes = differences(before, recipe, (*_MAY_CHANGE, *moved))
    if changes:
        remedy = f"a resumed run may change only {', '.join(_MAY_CHANGE)}"
        raise RunFolderError(Problem(f"{folder.path}: {key}", found, remedy) for key, found in changes)
    beginning = StartState.of(folder, recipe.store.keep_checkpoints)
    if beginning.saved_step:
        check_checkpoint(Checkpoints(folder.checkpoints).path(beginning.saved_step), recipe.trainer, folder.policy(0))
    if beginning.version > recipe.trainer.steps:
        found = f"{recipe.trainer.steps}, and the run has done {several(beginning.version, 'step')}"
        raise RunFolderError([Problem(f"{folder.path}: trainer.steps", found, "ask for more steps")])
    _check_rates(folder, before.trainer, recipe.trainer, beginning)
    ending = _end_of(folder, beginning.version, recipe.evaluation)
    early = ending.reason if ending is not None else ""
    asked, now = before.evaluation, recipe.evaluation
    goes_on = any(getattr(asked, key) != getattr(now, key) for key in (_ENDS_EARLY if early else _KEEPS))
    done = ending is not None and bool(early or beginning.version >= recipe.trainer.steps) and not goes_on
    return replace(beginning, changed=changed, done=done, early=early if done else "")


def _end_of(folder: RunFolder, version: int, evaluation: EvaluationConfig) -> Ending | None:
    """Return how the run has finished; None if it has not, or `version`, its last, is not evaluated on every set.
    Raises StoreError for a line of the metrics that cannot be read."""
    ending = read_ending(folder.ledger)
    if ending is None or ending.how != "finished" or not folder.metrics.exists():
        return None
    found = read_evaluations(folder.metrics)
    sets = ("", *(one.name for one in evaluation.sets))
    return ending if all(version in {line.step for line in found.get(name, ())} for name in sets) else None


def _check_rates(folder: RunFolder, before: TrainerConfig, after: TrainerConfig, beginning: StartState) -> None:
    """Raise RunFolderError if the steps to repeat after the last checkpoint would get other learning rates than before,
    since `trainer.steps` was changed. `before`, `after`: settings on record, and of the resume."""
    again = range(beginning.saved_step, beginning.version)  # versions before the repeated steps
    if all(learning_rate(before, at, before.steps) == learning_rate(after, at, after.steps) for at in again):
        return
    found = (
        f"was {before.steps} and is {after.steps}; steps {again.start + 1} to {again.stop}, which are repeated after "
        f'the last checkpoint, would get other learning rates by trainer.schedule = "{after.schedule}"'
    )
    remedy = (
        f"resume with trainer.steps={before.steps}: once the run ends, or is stopped by Ctrl-C, it has a checkpoint of "
        "its last step, and the number of steps can be changed"
    )
    raise RunFolderError([Problem(f"{folder.path}: trainer.steps", found, remedy)])


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
