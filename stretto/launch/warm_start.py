"""The supervised warm start: a process of its own, all cores for it alone, its result cached for later runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from stretto import __version__
from stretto.core.deadlines import deadline
from stretto.core.errors import Problem, RecipeError, RoleDied, RoleFailed, RunFolderError
from stretto.launch.channel import ConductorEnd
from stretto.launch.messages import Failed
from stretto.launch.plan import Plan, cache_folder, digest, make_plan
from stretto.launch.process import RoleProcess
from stretto.launch.recipe import load_recipe
from stretto.launch.stopping import Stopped, until_cut_short
from stretto.launch.supervised_role import (
    FROM_SUPERVISED,
    Demonstrations,
    FromSupervised,
    Learning,
    Learnt,
    SupervisedSpec,
)

OnLearning = Callable[[Learning], None]


async def warm_start(plan: Plan, log: Path, on_learning: OnLearning) -> Path:
    """The folder of the policy that reinforcement starts from: the base itself if the recipe has no warm start.

    Raises:
        RoleDied, DeadlineExceeded, RoleFailed: the process that trains failed.
    """
    if plan.recipe.warm_start is None:
        return plan.base.path
    folder = cache_folder() / "warm-starts" / warm_start_key(plan)
    if not folder.exists():
        await fine_tune_to(plan, folder, log, on_learning)
    return folder


def warm_start_key(plan: Plan) -> str:
    """Names everything that the result depends on: every file of the base, every demonstration, all settings."""
    recipe = plan.recipe
    assert recipe.warm_start is not None
    weights = xxhash.xxh3_128()
    for file in sorted(path for path in plan.base.path.iterdir() if path.is_file()):
        weights.update(file.name.encode())
        weights.update(file.read_bytes())
    shown = xxhash.xxh3_128(msgspec.msgpack.encode(plan.demonstrations)).hexdigest()
    return digest(__version__, weights.hexdigest(), shown, recipe.warm_start.model_dump_json(), recipe.seed)


async def fine_tune_to(plan: Plan, folder: Path, log: Path, on_learning: OnLearning) -> None:
    """Train the plan's base on its demonstrations; `folder` appears when the policy in it is whole."""
    recipe = plan.recipe
    assert recipe.warm_start is not None
    folder.parent.mkdir(parents=True, exist_ok=True)
    shown = folder.with_name(f".{folder.name}.{os.getpid()}.demonstrations")
    process = RoleProcess("warm start", "stretto.launch.supervised_role", log)
    channel: ConductorEnd[FromSupervised] = ConductorEnd("warm start", FROM_SUPERVISED, str(log))
    spec = SupervisedSpec(
        parent=os.getpid(),
        model=str(plan.base.path),
        demonstrations=str(shown),
        out=str(folder),
        config=recipe.warm_start.model_dump_json(),
        seed=recipe.seed,
        threads=recipe.warm_start.threads,
        descriptor=channel.far.fileno(),
    )
    try:
        shown.write_bytes(msgspec.msgpack.encode(Demonstrations(examples=plan.demonstrations)))
        await process.start(spec, spec.threads, (spec.descriptor,))
        await channel.open()
        await _follow(channel, process, recipe.deadlines.warm_start, on_learning)
    finally:
        channel.close()
        await process.stop(grace=1.0)
        shown.unlink(missing_ok=True)


async def _follow(
    channel: ConductorEnd[FromSupervised], process: RoleProcess, seconds: float, on_learning: OnLearning
) -> None:
    awaited = "to learn from the demonstrations"
    async with deadline("conductor", f"warm start {awaited}", seconds):
        while True:
            try:
                message = await channel.receive(awaited, seconds)
            except RoleDied:
                raise RoleDied("warm start", await process.last_words(), str(process.log)) from None
            match message:
                case Learning():
                    on_learning(message)
                case Learnt():
                    return
                case Failed():
                    raise RoleFailed("warm start", message.problem, message.exit_code)


def sft(recipe_path: Path, overrides: Sequence[str], out: Path, on_learning: OnLearning) -> None:
    """`stretto sft`: the recipe's warm start alone, written to `out`.

    Raises:
        UserError: the recipe has no warm start, or something it names is not what it should be.
        RoleError: the process that trains failed.
        SystemExit: a signal ended it; nothing is left.
    """
    recipe = load_recipe(recipe_path, overrides)
    if recipe.warm_start is None:
        raise RecipeError([Problem(f"{recipe_path}: warm_start", "missing", "`stretto sft` runs this section")])
    if out.exists():
        raise RunFolderError([Problem(str(out), "exists already", "give a new folder")])
    plan = make_plan(recipe)
    try:
        until_cut_short(_sft(plan, out, on_learning))
    except OSError as error:
        place = str(error.filename or out)
        raise RunFolderError([Problem(place, f"cannot be written: {error.strerror}", "give another folder")]) from error


async def _sft(plan: Plan, out: Path, on_learning: OnLearning) -> None:
    stopped = Stopped()
    await stopped.unless(fine_tune_to(plan, out, out.with_name(f"{out.name}.log"), on_learning))
    if stopped.requested:
        sys.exit(stopped.exit_code)


def copy_policy(source: Path, target: Path) -> None:
    """A policy folder, copied whole or not at all."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    part.rename(target)
