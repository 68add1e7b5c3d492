"""The supervised warm start: trained in a process of its own before the run, and cached for later runs."""

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
    """Return the folder of version 0 of the policy: the result of the warm start, from the cache or trained now. If the
    recipe has no warm start, it is the base model.

    Raises:
        RoleDied, DeadlineExceeded, RoleFailed: the training failed.
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
    """Compute a digest of everything that determines the result of the warm start: base model, demonstrations,
    settings, seed, and version of stretto. It names the folder in the cache."""
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
    """Train the base model of the plan on its demonstrations; `folder` appears once the policy in it is complete.
    Raises as `train_in_process`."""
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
        UserError: the recipe has no warm start, or has a mistake; or `out` exists.
        RoleError: the training failed.
        SystemExit: a signal stopped the training; `out` does not exist.
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
    """Copy a policy folder to `target`, completely or not at all. `copied`: called with the finished copy before it is
    renamed to `target`."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    copied(part)
    part.rename(target)
