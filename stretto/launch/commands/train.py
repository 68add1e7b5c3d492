"""`stretto train`: from a recipe file to a run folder that explains itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RunFolderError, StrettoError, described
from stretto.launch.assemble.run import StartState, run
from stretto.launch.preflight.plan import Plan, digest, estimate_disk, estimate_memory, make_plan, warnings
from stretto.launch.preflight.trainable import check_checkpoint
from stretto.launch.recipe.recipe import differences, load_recipe, to_toml
from stretto.loop.learner.recovery import RECIPE, record_recipe, recorded_recipe
from stretto.loop.records.log import RunLog
from stretto.loop.records.reporter import Reporter
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import until_cut_short
from stretto.store.folder.checkpoints import Checkpoints
from stretto.store.folder.provenance import library_versions, machine
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger
from stretto.trainer.config import TrainerConfig
from stretto.trainer.optimizer import learning_rate

#: What may be changed when a run is resumed: how long it goes on, on how much, and how patient it is.
_MAY_CHANGE = (
    "trainer.steps",
    "trainer.ranks",
    "trainer.keep_versions",
    "trainer.checkpoint_every",
    "evaluation",
    "deadlines",
    "store",
)

_QUESTIONS = "questions"


def check(recipe_path: Path, overrides: Sequence[str], resume: bool = False) -> None:
    """`stretto train --dry-run`: everything is read and measured, nothing is started.

    Raises:
        UserError: with every mistake that was found.
    """
    if resume and recipe_path.is_dir():
        recipe_path = RunFolder.open(recipe_path).recipe
    plan = make_plan(load_recipe(recipe_path, overrides))
    recipe = plan.recipe
    print(f"recipe      {recipe_path}: {recipe.trainer.steps} steps of {recipe.rollout.batch_size} groups of ", end="")
    print(f"{recipe.rollout.group_size} answers")
    print(f"model       {plan.base.path}: {plan.base.architecture}, {plan.base.parameters:,} parameters")
    print(f"questions   {len(plan.training):,} for training, {len(plan.held_out):,} held out, ", end="")
    print(f"{len(plan.demonstrations):,} demonstrations")
    print(f"longest     prompt {plan.longest_prompt} + answer {plan.sampling.max_tokens} tokens, ", end="")
    print(f"context {plan.base.context_length}")
    print(f"memory      {estimate_memory(plan)}")
    print(f"disk        {estimate_disk(plan, Path.cwd() / 'runs')}")
    for warning in warnings(plan):
        print(f"warning     {warning}")
    print("all is well; nothing was started")


def prepare(recipe_path: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool) -> Prepared:
    """Check everything, take the run folder; nothing is started yet.

    A run that goes on is named by its folder in the place of a recipe (its own is taken), or by `run_dir`.

    Raises:
        UserError: something is wrong that the user can put right.
    """
    if resume and recipe_path.is_dir():
        recipe_path, run_dir = RunFolder.open(recipe_path).recipe, run_dir or recipe_path
    if resume and run_dir is None:
        remedy = "say which run is to go on: stretto train --resume RUN_DIR"
        raise RunFolderError([Problem("--resume", "without --run-dir", remedy)])
    recipe = load_recipe(recipe_path, overrides)
    path = run_dir or Path("runs") / f"{recipe_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = make_plan(recipe, begun=resume and RunFolder(path).policy(0).exists())
    if not resume:
        return Prepared(plan, _new(path, plan), StartState())
    folder = RunFolder.resume(path)
    try:
        prepared = Prepared(plan, folder, _where_it_ended(folder, plan))
        with closing(Ledger(folder.ledger, recipe.store)) as ledger:
            record_recipe(ledger, recipe)
        folder.write("recipe.toml", to_toml(recipe))
    except BaseException:
        folder.release()
        raise
    return prepared


@dataclass(frozen=True)
class Prepared:
    """A plan, a run folder that is ours, and where the run in it begins."""

    plan: Plan
    folder: RunFolder
    beginning: StartState

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def steps(self) -> int:
        return self.plan.recipe.trainer.steps

    def train(self, stage: Reporter, starter: Spawner = FRESH) -> int:
        """Train; the exit code: 0, or 128 + the signal that stopped the run.

        Raises:
            StrettoError: the run could not go on; it is resumable from its last checkpoint.
        """
        with self.folder:
            logbook = RunLog(self.folder.log, stage)
            logbook.note(f"begins at version {self.beginning.version}")
            for warning in warnings(self.plan):
                logbook.say(f"warning: {warning}")
            try:
                code = until_cut_short(run(self.plan, self.folder, self.beginning, logbook, starter))
            except SystemExit as end:
                code = int(end.code or 0)  # the last checkpoint stands
            except StrettoError as error:
                logbook.note(f"failed: {error}")
                raise
            except OSError as error:
                logbook.note(f"failed: {described(error)}")
                raise
            logbook.note(f"ends with exit code {code}")
            return code


def _new(path: Path, plan: Plan) -> RunFolder:
    folder = RunFolder.create(path)
    folder.write("recipe.toml", to_toml(plan.recipe))
    with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:  # from now on the run can be resumed
        ledger.put(_QUESTIONS, _fingerprint(plan))
        record_recipe(ledger, plan.recipe)
    folder.write("versions.json", _json(library_versions()))
    folder.write("machine.json", _json(machine()))
    return folder


def _fingerprint(plan: Plan) -> str:
    """Differs when any training prompt does."""
    return digest(msgspec.json.encode(plan.training))


def _check_questions(folder: RunFolder, plan: Plan) -> None:
    """Positions in a checkpoint mean these questions in this order."""
    with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
        known = ledger.get(_QUESTIONS, str)
        if known is None:  # it was killed when it had a ledger and nothing in it
            ledger.put(_QUESTIONS, _fingerprint(plan))
    if known is not None and known != _fingerprint(plan):
        found = "its training questions were others (the data or the tokenizer has changed)"
        raise RunFolderError([Problem(str(folder.path), found, "bring them back, or begin a new run")])


def _where_it_ended(folder: RunFolder, plan: Plan) -> StartState:
    with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
        recipe, before = plan.recipe, recorded_recipe(folder, ledger.get(RECIPE, str))
    changes = differences(before, recipe, _MAY_CHANGE)
    if changes:
        remedy = f"a resumed run may change only {', '.join(_MAY_CHANGE)}"
        raise RunFolderError(Problem(f"{folder.path}: {key}", found, remedy) for key, found in changes)
    _check_questions(folder, plan)
    beginning = StartState.of(folder, recipe.store.keep_checkpoints)
    if beginning.saved_step:
        check_checkpoint(Checkpoints(folder.checkpoints).path(beginning.saved_step), recipe.trainer, folder.policy(0))
    if beginning.version > recipe.trainer.steps:
        found = f"{recipe.trainer.steps}, and the run has done {beginning.version} steps"
        raise RunFolderError([Problem(f"{folder.path}: trainer.steps", found, "ask for more steps")])
    _check_rates(folder, before.trainer, recipe.trainer, beginning)
    return beginning


def _check_rates(folder: RunFolder, before: TrainerConfig, after: TrainerConfig, beginning: StartState) -> None:
    """Steps that are done again are done at the learning rates at which they were done."""
    again = range(beginning.saved_step, beginning.version)  # the versions at which they are
    if all(learning_rate(before, at, before.steps) == learning_rate(after, at, after.steps) for at in again):
        return
    found = (
        f"was {before.steps} and is {after.steps}, and steps {again.start + 1} to {again.stop}, which are done again "
        f'behind the last checkpoint, would have other learning rates by trainer.schedule = "{after.schedule}"'
    )
    remedy = (
        f"go on with trainer.steps={before.steps}: at its end, or stopped by Ctrl-C, the run has a checkpoint of its "
        "last step, and the number of steps can be changed"
    )
    raise RunFolderError([Problem(f"{folder.path}: trainer.steps", found, remedy)])


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
