"""`stretto train`: from a recipe file to a run folder that explains itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from stretto.core.errors import Problem, RecipeError, RunFolderError, StrettoError, described
from stretto.launch.assemble.run import StartState, run
from stretto.launch.preflight.plan import Plan, digest, estimate_disk, estimate_memory, make_plan, warnings
from stretto.launch.preflight.trainable import check_checkpoint
from stretto.launch.recipe.recipe import Recipe, differences, load_recipe, to_toml
from stretto.launch.recipe.recorded import RECIPE, record_recipe, recorded_recipe
from stretto.loop.records.log import RunLog
from stretto.loop.records.reporter import Reporter
from stretto.model.hf.inspection import read_weights
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import until_cut_short
from stretto.store.export import ExportedQuestion
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

_QUESTIONS, _MODEL = "questions", "model"
_HOPELESS = 2.0  # times the memory that is available


def check(recipe_path: Path, overrides: Sequence[str], resume: bool = False, run_dir: Path | None = None) -> None:
    """`stretto train --dry-run`: everything is read and measured, nothing is started.

    Raises:
        UserError: with every mistake that was found.
    """
    if resume:
        prepared = prepare(recipe_path, overrides, run_dir, resume, write=False)
        prepared.folder.release()
        plan = prepared.plan
        for sentence in prepared.beginning.sentences():
            print(f"resume      {sentence}")
    else:
        plan = _fitting(make_plan(load_recipe(recipe_path, overrides)))
    recipe = plan.recipe
    print(f"recipe      {recipe_path}: {recipe.trainer.steps} steps of {recipe.rollout.batch_size} groups of ", end="")
    print(f"{recipe.rollout.group_size} answers")
    print(f"model       {plan.base.path}: {plan.base.architecture}, {plan.base.parameters:,} parameters")
    asked = (
        ""
        if len(plan.held_out) == plan.kept_apart
        else f" of which evaluation.prompts = {len(plan.held_out):,} are asked,"
    )
    print(f"questions   {len(plan.training):,} for training, {plan.kept_apart:,} held out,{asked} ", end="")
    print(f"{len(plan.demonstrations):,} demonstrations")
    print(f"longest     prompt {plan.longest_prompt} + answer {plan.sampling.max_tokens} tokens, ", end="")
    print(f"context {plan.base.context_length}")
    print(f"memory      {estimate_memory(plan)}")
    print(f"disk        {estimate_disk(plan, Path.cwd() / 'runs')}")
    told = warnings(plan)
    for warning in told:
        print(f"warning     {warning}")
    print(f"{f'{len(told)} lines of warnings' if told else 'all is well'}; nothing was started")


def prepare(
    recipe_path: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool, write: bool = True
) -> Prepared:
    """Check everything, take the run folder; nothing is started yet. `write`: a resumed run gets the new recipe.

    A run that goes on is named by its folder in the place of a recipe (its own is taken), or by `run_dir`.

    Raises:
        UserError: something is wrong that the user can put right.
    """
    if resume and recipe_path.is_dir():
        if run_dir is not None and run_dir.resolve() != recipe_path.resolve():
            found = f"{recipe_path} is to go on, and --run-dir is {run_dir}"
            raise RunFolderError([Problem("--resume", found, "name the run once: stretto train --resume RUN_DIR")])
        recipe_path, run_dir = RunFolder.open(recipe_path).recipe, recipe_path
    if resume and run_dir is None:
        remedy = "say which run is to go on: stretto train --resume RUN_DIR"
        raise RunFolderError([Problem("--resume", "without --run-dir", remedy)])
    recipe = load_recipe(recipe_path, overrides)
    path = run_dir or Path("runs") / f"{recipe_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = _fitting(make_plan(recipe, begun=resume and RunFolder(path).policy(0).exists()))
    if not resume:
        return Prepared(plan, _new(path, plan), StartState())
    folder = RunFolder.resume(path)
    try:
        prepared = Prepared(plan, folder, _where_it_ended(folder, plan))
        if write:
            with closing(Ledger(folder.ledger, recipe.store)) as ledger:
                record_recipe(ledger, recipe)
            folder.write("recipe.toml", to_toml(recipe))
    except BaseException:
        folder.release()
        raise
    return prepared


def _fitting(plan: Plan) -> Plan:
    """The plan, unless it needs so much more memory than there is that no estimate can be that wrong.

    Raises:
        RecipeError: it does.
    """
    memory = estimate_memory(plan)
    if memory.total > _HOPELESS * memory.available and not torch.cuda.is_available():
        remedy = "a smaller model, fewer engines or engine.slots, a smaller engine.cache_gib or trainer.lora need less"
        raise RecipeError([Problem("memory", f"the run needs {memory}", remedy)])
    return plan


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

    def train(self, stage: Reporter, spawner: Spawner = FRESH) -> int:
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
                code = until_cut_short(run(self.plan, self.folder, self.beginning, logbook, spawner))
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
        ledger.put(_MODEL, _model_fingerprint(plan))
    file = getattr(plan.recipe.task, "file", None)  # of rows, whose questions are named after their lines
    asked = [ExportedQuestion(p.id, p.text, p.answer, file and f"{file}:{p.id}") for p in plan.training]
    folder.write("questions.jsonl", "".join(f"{msgspec.json.encode(question).decode()}\n" for question in asked))
    folder.write("versions.json", _json(library_versions()))
    folder.write("machine.json", _json(machine()))
    return folder


def _fingerprint(plan: Plan) -> str:
    """Differs when any training prompt does."""
    return digest(msgspec.json.encode(plan.training))


def _check_moved(folder: RunFolder, before: Recipe, plan: Plan) -> tuple[str, ...]:
    """The paths that may be others than they were: what lies there is the same, or is compared as questions."""
    with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
        known = ledger.get(_MODEL, str)
    moved = before.model.path != plan.recipe.model.path
    if moved and known is not None and known != _model_fingerprint(plan):
        found = f"was {before.model.path!r}, and {str(plan.base.path)!r} holds another model"
        raise RunFolderError([Problem(f"{folder.path}: model.path", found, "give the same model in its new place")])
    files = () if before.task.kind != "jsonl" else ("task.file", "task.held_out_file")
    return (*files, "rewards.path", *(("model.path",) if known is not None else ()))


def _model_fingerprint(plan: Plan) -> str:
    """Differs when the config, the tokenizer, or a name or shape of a weight does; the weights themselves are the run's
    own from version 0 on."""
    tensors = sorted((name, tensor.dtype, tensor.shape) for name, tensor in read_weights(plan.base.path).items())
    texts = [(plan.base.path / name).read_text() for name in ("config.json", "tokenizer.json")]
    return digest(*texts, tensors)


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
    moved = _check_moved(folder, before, plan)
    changes = differences(before, recipe, (*_MAY_CHANGE, *moved))
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
