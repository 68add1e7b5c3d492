"""`stretto eval`: the held-out accuracy of a model folder, with the engine, sampling and reward of a run."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.core.tasks import gather_or_cancel, run_beside
from stretto.launch.assemble.specs import Endpoints, engine_role, engine_specs, socket_folder
from stretto.launch.preflight.base import digest
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.overrides import Overrides
from stretto.launch.recipe.recipe import Recipe, override, parse_recipe, validate
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.recorder import Evaluation
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.rewards.service.pool import RewardPool


def evaluate(
    model: Path,
    task: Path,
    overrides: Overrides,
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Evaluate the model on the held-out prompts of `task`: a recipe, or a JSONL file with all its rows.

    Raises:
        UserError: the folder, the task or an override is wrong.
        RoleError: an engine or a reward worker failed.
        SystemExit: a signal ended it.
    """
    plan = make_plan(_recipe(model, task, overrides))
    sampling = plan.sampling
    say(
        f"reward {plan.recipe.rewards.function} | temperature {sampling.temperature:g}, at most {sampling.max_tokens} "
        f"tokens | {len(plan.held_out):,} prompts | sampling seed {plan.recipe.evaluation.seed}"
    )
    for note in plan.notes:
        say(f"warning: {note}")
    return until_cut_short(_evaluate(plan, spawner))


def _recipe(model: Path, task: Path, overrides: Overrides) -> Recipe:
    if task.suffix == ".jsonl":
        rows = {"kind": "jsonl", "file": str(task.resolve()), "held_out_file": str(task.resolve())}
        tree: dict[str, Any] = {"task": rows, "trainer": {}, "evaluation": {"prompts": sys.maxsize}}
        override(tree, overrides)
    else:
        tree = parse_recipe(task, overrides)
    tree["model"] = {"path": str(model.expanduser())}
    tree.pop("warm_start", None)
    if isinstance(tree.get("trainer"), dict):
        tree["trainer"].pop("device", None)  # nothing is trained
    return validate(tree, str(task))


async def _evaluate(plan: Plan, spawner: Spawner) -> Evaluation:
    recipe, stopped, folder = plan.recipe, StopSignal(), socket_folder()
    endpoints = Endpoints(mailbox=digest(folder), mailbox_folder=folder, sockets=folder)  # no weights are published
    specs = engine_specs(plan, plan.base.path, endpoints, published=False)
    engines = EnginePool(specs, folder, recipe.deadlines, engine_role(recipe.engine), spawner=spawner)
    rewards = RewardPool(recipe.rewards, rows=plan.rows)
    failed = True
    try:
        await stopped.unless(gather_or_cancel(rewards.start(), engines.start(0)))
        evaluate = Evaluator(
            plan.held_out,
            plan.sampling,
            recipe.evaluation.seed,
            engines.generate,
            rewards.score_group,
            plan.tokenizer.decode,
        )
        evaluation = await stopped.unless(run_beside(engines.supervise(), evaluate()))
        failed = False
    finally:
        await asyncio.gather(engines.stop(1.0), rewards.close())
        if not failed:  # the message of a failure names a log in this folder
            shutil.rmtree(folder, ignore_errors=True)
    return evaluation or sys.exit(stopped.exit_code)
