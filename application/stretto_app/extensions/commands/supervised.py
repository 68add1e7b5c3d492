"""`stretto sft`: runs the warm start of a recipe alone; also the functions that it shares with `stretto dpo`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RecipeError, RunFolderError
from stretto.engine.config import EngineConfig
from stretto.launch.assemble.supervised import OnLearning, fine_tune_to
from stretto.launch.preflight.devices import seat_of_warm_start, usable_gpus
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.extensions import ClusterConfig
from stretto.launch.recipe.recipe import load_recipe
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.weights.config import WeightsConfig


def refuse_old(out: Path) -> None:
    """Raise RunFolderError if the output folder of a command exists."""
    if out.exists():
        raise RunFolderError([Problem(str(out), "exists already", "give a new folder")])


def train_into(out: Path, training: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    """Run a training that writes the folder `out`, until it is done or a signal stops it.

    `training`: takes the path of the log file, ``OUT.log`` beside `out`, and returns the coroutine to run.

    Raises:
        RunFolderError: the folder cannot be written.
        SystemExit: a signal stopped the training; `out` does not exist, unless the training had just ended.
    """

    async def until_stopped() -> None:
        stopped = StopSignal()
        await stopped.unless(training(out.with_name(f"{out.name}.log")))
        if stopped.requested:
            sys.exit(stopped.exit_code)

    try:
        until_cut_short(until_stopped())
    except OSError as error:
        place = str(error.filename or out)
        raise RunFolderError([Problem(place, f"cannot be written: {error.strerror}", "give another folder")]) from error


def sft(
    recipe_path: Path, overrides: Sequence[str], out: Path, on_learning: OnLearning, spawner: Spawner = FRESH
) -> None:
    """Run the recipe's warm start alone and write the policy to `out` (`stretto sft`). `on_learning` is called with the
    progress.

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
