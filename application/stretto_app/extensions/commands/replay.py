"""`stretto replay`: trains again on the recorded batches of a run, without generation.

    the run's start, or its newest checkpoint up to step --from
        │  batches up to --from, with the run's own settings
        ▼
    the state after step --from
        │  batches after it, with the changed settings
        ▼
    a branch: RUN/branches/001, a folder with recipe, questions, ledger and last policy, and metrics of its own steps

A replay generates and evaluates nothing: a branch has no held-out accuracy until `stretto eval` measures it.
With unchanged settings the weights are bit-equal to the run's, on the same machine with the same number of threads.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from stretto.core.errors import CheckpointLost, Problem, RoleError, RunFolderError, StoreError
from stretto.core.machine import sync
from stretto.core.records import Update
from stretto.launch.recipe.recipe import Recipe, differences, load_recipe, to_toml
from stretto.launch.recorded import RECIPE, recorded_recipe
from stretto.loop.records.totals import SPAN_AXIS
from stretto.loop.recovery import BASE, START, Recovery, check_start
from stretto.loop.trainer_link import TrainerLink
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.spawn import FRESH, Spawner
from stretto.store.files import write_atomically
from stretto.store.inspection import CHANGED
from stretto.store.ledger.reading import last_step, read_batches, read_fact
from stretto.store.ledger.rows import update_columns
from stretto.store.ledger.schema import once_at_rest, open_for_reading
from stretto.store.ledger.seals import seal
from stretto.store.run_folder import BRANCHES, CHANGEABLE, ORIGIN, Branch, RunFolder
from stretto.store.selection import SELECTION
from stretto.store.series.metrics import MetricsLog, StepMetrics, read_metrics
from stretto.store.totals import JUDGED, TOTALS, Totals
from stretto.trainer.messages import TrainerSpec
from stretto_report.reading.policies import same_weights, weight_files, why_incomparable

_STOP_GRACE = 1.0
_COPY = ".ledger.sqlite.part"  # of the ledger, until it has its name


@dataclass(frozen=True)
class _Replayed:
    """Result of a replay. `folder`: of the branch. `equal`: whether the weights equal the run's; None if settings were
    changed, or if the weights cannot be compared. `incomparable`: why they cannot. `apart`: with changed settings, the
    norm of the difference as a share of the norm of the run's weights, and the largest difference of one weight."""

    folder: Path
    branch: Branch
    equal: bool | None
    incomparable: str = ""
    apart: tuple[float, float] | None = None

    def __str__(self) -> str:
        branch = self.branch
        text = f"steps {branch.first_step + 1} to {branch.last_step} of {branch.run} trained again: {self.folder}"
        if self.equal is not None:
            text += f"\nthe weights are {'' if self.equal else 'NOT '}bit-equal to the run's"
        elif self.incomparable:
            text += f"\nthe weights could not be compared with the run's: {self.incomparable}"
        elif self.apart is not None:
            text += f"\n{_how_far(*self.apart)}"
        policy = RunFolder(self.folder).policy(branch.last_step)
        return f"{text}\nno held-out accuracy: stretto eval {policy} --task {self.folder / 'recipe.toml'} measures it"


def _how_far(share: float, largest: float) -> str:
    if not math.isfinite(share):
        return "the weights could not be compared with the run's: some are not finite"
    if largest == 0:
        return "the weights are equal to the run's: the changed settings made no difference"
    return f"the weights differ from the run's by {share:.2%} of their norm, one weight by {largest:.3g} at most"


@dataclass(frozen=True)
class _Repeated:
    """A step that was trained again. `wall_seconds`: from the start of the replay to the end of the step; `rl_seconds`:
    from the start of its first step."""

    update: Update
    wall_seconds: float
    rl_seconds: float


def replay(
    run_dir: Path,
    first_step: int,
    overrides: Sequence[str],
    out: Path | None,
    say: Callable[[str], None] = print,
    spawner: Spawner = FRESH,
) -> _Replayed:
    """Train again on the run's batches after step `first_step`, and write the result as a branch.

    Args:
        overrides: changed settings, which apply to the repeated steps.
        out: folder of the branch; None: the next number in ``branches`` of the run folder.
        say: writes a log line.

    Raises:
        UserError: the run, the step or an override has a mistake.
        StoreError: the run has not kept the tokens of its batches.
        RoleError: the trainer failed; only its logs stay in the folder of the branch.
    """
    folder = RunFolder.open(run_dir)
    until = last_step(folder.ledger)
    if not 0 <= first_step < until:
        found = f"{first_step}, and the run has steps 1 to {until} on record"
        raise RunFolderError([Problem("--from", found, f"0 to {until - 1}")])
    before = recorded_recipe(folder, read_fact(folder.ledger, RECIPE, str))
    _refuse_edited(folder, before)
    after = load_recipe(folder.recipe, overrides)
    refused = differences(before, after, CHANGEABLE)
    if refused:
        raise RunFolderError(
            Problem(f"--set {key}", found, f"a replay may change {' and '.join(CHANGEABLE)}") for key, found in refused
        )
    changes = dict(differences(before, after))
    check_start(folder)
    target = _branch_folder(folder, out)
    try:
        until = _copy_ledger(folder, target / _COPY)  # before the training: a run that goes on takes further steps
        branch = Branch(run=str(run_dir), first_step=first_step, last_step=until, changes=changes)
        _record(folder, target, after, branch, asyncio.run(_train(folder, target, before, after, branch, say, spawner)))
    except RoleError:
        if logs := _all_but_logs_removed(target):
            say(f"logs of the trainer: {', '.join(map(str, logs))}")
        raise
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    ours, theirs = RunFolder(target).policy(until), folder.policy(until)
    if (equal := same_weights(ours, theirs)) is None:
        return _Replayed(target, branch, None, why_incomparable(ours, theirs))
    if not changes:
        return _Replayed(target, branch, equal)
    apart = (0.0, 0.0) if equal else _apart(ours, theirs)
    return _Replayed(target, branch, None, "" if apart else "they are other tensors", apart)


def _apart(ours: Path, theirs: Path) -> tuple[float, float] | None:
    """Compute how far the weights in two model folders differ: the norm of the difference divided by the norm of
    `theirs`, and the largest absolute difference. One tensor of each is in memory. None if the tensors have other names
    or shapes. Both folders must have the same number of files."""
    of_gap, of_run, largest = 0.0, 0.0, 0.0
    for mine, other in zip(weight_files(ours), weight_files(theirs), strict=True):
        with safe_open(mine, "pt") as one, safe_open(other, "pt") as run:
            if set(one.keys()) != set(run.keys()):
                return None
            for name in run.keys():  # noqa: SIM118 - it is no mapping
                first, second = one.get_tensor(name).float(), run.get_tensor(name).float()
                if first.shape != second.shape:
                    return None
                gap = first - second
                of_gap += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
                of_run += float(torch.linalg.vector_norm(second, dtype=torch.float64)) ** 2
                largest = max(largest, float(gap.abs().max()))
    return math.sqrt(of_gap) / (math.sqrt(of_run) or 1.0), largest


def _refuse_edited(folder: RunFolder, recorded: Recipe) -> None:
    """Raise RunFolderError, with each key, if ``recipe.toml`` of the run differs from the recipe in its ledger."""
    if edited := differences(recorded, load_recipe(folder.recipe)):
        remedy = "restore the run's own recipe, and change settings by --set"
        raise RunFolderError(Problem(f"{folder.recipe}: {key}", found, remedy) for key, found in edited)


async def _train(
    folder: RunFolder,
    target: Path,
    before: Recipe,
    after: Recipe,
    branch: Branch,
    say: Callable[[str], None],
    spawner: Spawner,
) -> list[_Repeated]:
    began = time.monotonic()
    recovery, log = Recovery(folder, before.store.keep_checkpoints), target / "trainer.txt"
    checkpoint: Path | None = None
    if branch.first_step:
        checkpoint = target / "start"
        async with _trainer(folder, before, log, None, spawner, recovery, branch.first_step) as trainer:
            await _saved(trainer, checkpoint)
        say(f"restored the state after step {branch.first_step}")
    repeated: list[_Repeated] = []
    async with _trainer(folder, after, log, checkpoint, spawner) as trainer:
        first = time.monotonic()
        for batch in read_batches(folder.ledger, branch.first_step, branch.last_step):
            update = await trainer.train(batch, publish=False)
            now = time.monotonic()
            repeated.append(_Repeated(update, now - began, now - first))
            say(f"step {batch.step}: loss {update.metrics.get('loss', float('nan')):.6g}")
        await trainer.save_policy(RunFolder(target).policy(branch.last_step))
    if checkpoint is not None:
        shutil.rmtree(checkpoint)
    return repeated


async def _saved(trainer: TrainerLink, checkpoint: Path) -> None:
    """Save a checkpoint to the folder `checkpoint`. If the trainer dies meanwhile, its replacement saves it."""
    while True:
        try:
            return await trainer.save_checkpoint(checkpoint)
        except CheckpointLost:
            shutil.rmtree(checkpoint, ignore_errors=True)


@asynccontextmanager
async def _trainer(
    folder: RunFolder,
    recipe: Recipe,
    log: Path,
    checkpoint: Path | None,
    spawner: Spawner,
    recovery: Recovery | None = None,
    version: int = 0,
) -> AsyncIterator[TrainerLink]:
    """Context manager: start a trainer as in a run, but without publishing; it is ended after the block.

    Args:
        folder: the run whose version 0 the trainer loads.
        log: log file of the trainer.
        checkpoint: to begin with; None: version 0 of the run.
        recovery: checkpoints and batches from which the trainer reaches `version`, and replacements are restored.
            None: a trainer that dies is not replaced, and no step is repeated to reach a `version`.
        version: to bring the trainer to.
    """
    link = TrainerLink(log, recipe.deadlines, recovery, spawner=spawner)
    model = folder.policy(0)
    spec = TrainerSpec(
        model=str(model),
        mailbox="replay",
        mailbox_folder=str(log.parent),
        trainer=recipe.trainer.model_dump_json(),
        algorithm=recipe.algorithm.model_dump_json(),
        sampling=recipe.sampling.record(load_tokenizer(model).eos_token_ids),
        threads=recipe.trainer.threads,
        checkpoint=str(checkpoint) if checkpoint is not None else None,
        kernels=str(folder.kernels) if folder.kernels.exists() else None,
        path=recipe.path or "",
    )
    try:
        await link.start(spec, version, publish=False)
        yield link
    finally:
        await link.stop(_STOP_GRACE)


def _all_but_logs_removed(target: Path) -> list[Path]:
    """Remove everything in the folder except the logs of the trainer and its ranks; returns the logs."""
    logs = sorted(target.glob("*.txt"))
    for path in [path for path in target.iterdir() if path not in logs]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return logs


def _branch_folder(folder: RunFolder, out: Path | None) -> Path:
    branches = folder.path / BRANCHES
    taken = [int(path.name) for path in branches.glob("*") if path.name.isdecimal()]
    target = out or branches / f"{max(taken, default=0) + 1:03d}"
    try:
        target.mkdir(parents=True)  # fails if it exists: a failed replay removes the folder
        (target / "policy").mkdir()
    except OSError as error:
        found = f"cannot be created: {error.strerror}"
        raise RunFolderError([Problem(str(target), found, "give a new folder with --out")]) from error
    return target


def _record(folder: RunFolder, target: Path, recipe: Recipe, branch: Branch, repeated: Sequence[_Repeated]) -> None:
    """Complete the branch in `target` as a run folder: write its recipe, the metrics of the repeated steps, its origin,
    and the repeated steps in its copy of the ledger, and copy the questions of the run in `folder`. Raises StoreError
    if that copy cannot be written.

    The ledger gets its name last. Before that, the folder of a replay that was killed holds no run.
    """
    whole = RunFolder(target)
    write_atomically(whole.recipe, to_toml(recipe).encode())
    if folder.questions.exists():
        shutil.copyfile(folder.questions, whole.questions)
    metrics, by_step = MetricsLog(whole.metrics), {one.update.step: one for one in repeated}
    for line in read_metrics(folder.metrics)[0]:
        if (again := by_step.get(line.step)) is not None:
            metrics.append(_line(line, again))
    part = target / _COPY
    _complete_ledger(folder, part, repeated)
    sync(part)
    write_atomically(target / ORIGIN, msgspec.json.format(msgspec.json.encode(branch)) + b"\n")
    part.replace(whole.ledger)
    sync(target)


def _copy_ledger(folder: RunFolder, target: Path) -> int:
    """Copy the run's ledger to the file `target`, and return its last step. Raises StoreError if SQLite cannot."""

    def copied() -> int:
        try:
            with closing(open_for_reading(folder.ledger)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
                last: int = copy.execute("SELECT max(step) FROM steps").fetchone()[0]
                return last
        except sqlite3.Error as error:
            raise StoreError(f"{target.parent}: the ledger cannot be copied: {error}") from error

    return once_at_rest(folder.ledger, copied)


def _complete_ledger(folder: RunFolder, target: Path, repeated: Sequence[_Repeated]) -> None:
    """Put the repeated updates into the copy `target` of the run's ledger, and remove the facts that hold for the run
    only; totals are counted anew. Raises StoreError if SQLite cannot."""
    try:
        with closing(sqlite3.connect(target)) as copy:
            for one in repeated:
                copy.execute(
                    "UPDATE steps SET published_version = ?, metrics = ? WHERE step = ?", update_columns(one.update)
                )
            of_the_run = (RECIPE, START, BASE, TOTALS, SELECTION, JUDGED, SPAN_AXIS)  # facts that hold for the run only
            copy.executemany("DELETE FROM meta WHERE name = ?", [(name,) for name in of_the_run])
            copy.execute("DELETE FROM events WHERE name = ?", (CHANGED,))
            totals = msgspec.json.encode(_totals(folder, repeated)).decode()
            copy.execute("INSERT INTO meta VALUES (?, ?, ?)", (TOTALS, totals, seal(TOTALS, totals)))
            copy.commit()
    except sqlite3.Error as error:
        raise StoreError(f"{target.parent}: the copy of the ledger cannot be written: {error}") from error


def _totals(folder: RunFolder, repeated: Sequence[_Repeated]) -> Totals:
    of_run = read_fact(folder.ledger, TOTALS, Totals)
    bound, last = of_run.max_staleness if of_run is not None else None, repeated[-1]
    return Totals(max_staleness=bound, wall_seconds=last.wall_seconds, rl_seconds=last.rl_seconds)


#: Fields of `StepMetrics` about the batch of a step, which the run and its replay have in common.
_OF_THE_BATCH = (
    *("step", "version", "accuracy", "reward", "length_mean", "length_max", "staleness_mean", "staleness_max"),
    *("trained_tokens", "masked_tokens", "rewards", "max_staleness", "truncated", "undecided", "undecided_reason"),
)


def _line(line: StepMetrics, again: _Repeated) -> StepMetrics:
    """Metrics of a repeated step: fields about the batch from `line` of the run, and the replay's own measurements.
    Fields that only the run measured (generated tokens, busy shares, memory, queues, goodput, canary, selection bias)
    keep their defaults."""
    return StepMetrics(
        **{name: getattr(line, name) for name in _OF_THE_BATCH},
        wall_seconds=again.wall_seconds,
        rl_seconds=again.rl_seconds,
        skipped=again.update.skipped,
        trainer=again.update.metrics,
    )
