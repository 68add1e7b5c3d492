"""Supervised warm start, trained in its own process with all cores; the result is cached for later runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from stretto import __version__
from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import cache_folder
from stretto.engine.config import EngineConfig
from stretto.launch.assemble.supervised import OnLearning, refuse_old, train_in_process, train_into
from stretto.launch.preflight.base import check_cache, digest
from stretto.launch.preflight.devices import seat_of_warm_start, usable_gpus
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.machines import ClusterConfig
from stretto.launch.recipe.recipe import load_recipe
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.messages import Demonstrations
from stretto.weights.config import WeightsConfig


async def warm_start(
    plan: Plan,
    log: Path,
    on_learning: OnLearning,
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Folder of version 0 of the policy: the base itself if the recipe has no warm start.

    Raises:
        RoleDied, DeadlineExceeded, RoleFailed: the process that trains failed.
    """
    if plan.recipe.warm_start is None:
        return plan.base.path
    folder = cache_folder() / "warm-starts" / warm_start_key(plan)
    if folder.exists():
        say(f"phase 1 of 3: warm start, cached by an earlier run in {folder}")
    else:
        check_cache()
        steps, count = plan.recipe.warm_start.steps, len(plan.demonstrations)
        say(f"phase 1 of 3: warm start, {steps:,} supervised steps on {count:,} demonstrations; cached in {folder}")
        await fine_tune_to(plan, folder, log, on_learning, spawner, say)
    return folder


def warm_start_key(plan: Plan) -> str:
    """Digest of everything that determines the result: base model, demonstrations, settings."""
    recipe = plan.recipe
    assert recipe.warm_start is not None
    weights = xxhash.xxh3_128()
    for file in sorted(path for path in plan.base.path.iterdir() if path.is_file()):
        weights.update(file.name.encode())
        weights.update(file.read_bytes())
    shown = xxhash.xxh3_128(msgspec.msgpack.encode(plan.demonstrations)).hexdigest()
    return digest(__version__, weights.hexdigest(), shown, recipe.warm_start.model_dump_json(), recipe.seed)


async def fine_tune_to(
    plan: Plan,
    folder: Path,
    log: Path,
    on_learning: OnLearning,
    spawner: Spawner,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Train the plan's base on its demonstrations; `folder` appears once the policy in it is complete."""
    recipe = plan.recipe
    assert recipe.warm_start is not None
    await train_in_process(
        "warm start",
        plan.base.path,
        Demonstrations(examples=plan.demonstrations),
        recipe.warm_start,
        folder,
        log,
        seed=recipe.seed,
        seconds=recipe.deadlines.warm_start,
        hung=recipe.deadlines.hung,
        on_learning=on_learning,
        spawner=spawner,
        say=say,
        seat=plan.warm_seat,
    )


def sft(
    recipe_path: Path, overrides: Sequence[str], out: Path, on_learning: OnLearning, spawner: Spawner = FRESH
) -> None:
    """Run the recipe's warm start alone and write the policy to `out` (`stretto sft`).

    Raises:
        UserError: the recipe has no warm start, or something that it names is wrong.
        RoleError: the process that trains failed.
        SystemExit: a signal ended it; nothing is left.
    """
    recipe = load_recipe(recipe_path, overrides)
    if recipe.warm_start is None:
        raise RecipeError([Problem(f"{recipe_path}: warm_start", "missing", "`stretto sft` runs this section")])
    refuse_old(out)
    alone = {"engine": EngineConfig(), "weights": WeightsConfig(), "cluster": ClusterConfig()}  # nothing is generated
    plan = make_plan(recipe.model_copy(update=alone))
    plan = replace(plan, warm_seat=seat_of_warm_start(plan, usable_gpus(plan.recipe)))
    train_into(out, lambda log: fine_tune_to(plan, out, log, on_learning, spawner))


def copy_policy(source: Path, target: Path, copied: Callable[[Path], None] = lambda part: None) -> None:
    """Copy a policy folder, completely or not at all; `copied` is called with the copy before it is renamed."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    copied(part)
    part.rename(target)
