"""`stretto eval`: the held-out accuracy of a model folder, measured by the same engine, sampling and reward."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.core.tasks import gather_or_cancel, run_beside
from stretto.launch.assemble.specs import Endpoints, engine_specs, socket_folder
from stretto.launch.preflight.plan import Plan, digest, make_plan
from stretto.launch.recipe.overrides import Overrides
from stretto.launch.recipe.recipe import Recipe, override, parse_recipe, validate
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.evaluation import Evaluation
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.rewards.service.pool import RewardPool


def evaluate(
    model: Path,
    task: Path,
    overrides: Overrides,
    starter: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Ask the task's held-out prompts; `task` is a recipe, or a JSONL file all of whose rows are asked.

    Raises:
        UserError: the folder, the task or an override is not what it should be.
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
    return until_cut_short(_examine(plan, starter))


def _recipe(model: Path, task: Path, overrides: Overrides) -> Recipe:
    if task.suffix == ".jsonl":
        rows = {"kind": "jsonl", "file": str(task.resolve()), "held_out_file": str(task.resolve())}
        tree: dict[str, Any] = {"task": rows, "trainer": {}, "evaluation": {"prompts": sys.maxsize}}
        override(tree, overrides)
    else:
        tree = parse_recipe(task, overrides)
    tree["model"] = {"path": str(model)}
    tree.pop("warm_start", None)
    if isinstance(tree.get("trainer"), dict):
        tree["trainer"].pop("device", None)  # nothing is trained
    return validate(tree, str(task))


async def _examine(plan: Plan, starter: Spawner) -> Evaluation:
    recipe, stopped = plan.recipe, StopSignal()
    folder = socket_folder()
    meeting = Endpoints(
        mailbox=digest(folder), mailbox_folder=folder, sockets=folder
    )  # nothing is ever published in it
    specs = engine_specs(plan, plan.base.path, meeting, published=False)
    fleet = EnginePool(specs, folder, recipe.deadlines, starter=starter)
    rewards = RewardPool(recipe.rewards, rows=plan.rows)
    failed = True
    try:
        await stopped.unless(gather_or_cancel(rewards.start(), fleet.start(0)))
        evaluate = Evaluator(
            plan.held_out,
            plan.sampling,
            recipe.evaluation.seed,
            fleet.generate,
            rewards.score_group,
            plan.tokenizer.decode,
        )
        evaluation = await stopped.unless(run_beside(fleet.supervise(), evaluate()))
        failed = False
    finally:
        await asyncio.gather(fleet.stop(1.0), rewards.close())
        if not failed:  # the message of a failure names a log in this folder
            shutil.rmtree(folder, ignore_errors=True)
    return evaluation or sys.exit(stopped.exit_code)
