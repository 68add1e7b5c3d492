"""`stretto eval`: measures the accuracy of a model folder on held-out questions, with the engine, sampling and reward
that a run has."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import Problem, RecipeError, nearest, several
from stretto.core.machine import Seat
from stretto.core.tasks import gather_or_cancel, run_beside
from stretto.doors.loading import from_package
from stretto.launch.assemble.beside import conversing, workflow_pool
from stretto.launch.assemble.evaluations import with_samples
from stretto.launch.assemble.specs import Endpoints, engine_specs
from stretto.launch.preflight.base import digest
from stretto.launch.preflight.devices import seats_of, usable_gpus
from stretto.launch.preflight.paths import check_data_files
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.overrides import Overrides
from stretto.launch.recipe.recipe import Recipe, override, parse_recipe, validate
from stretto.launch.recipe.sections import SamplingConfig
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.evaluation import Evaluation, QuestionResult
from stretto.model.hf.inspection import inspect_model_folder
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.rewards.service.pool import RewardPool
from stretto.rollout.tasks import MAPPINGS, is_local
from stretto.store import lock
from stretto.store.files import write_atomically

_GYM = "reasoning-gym:"
_GYM_QUESTIONS = 256
_SEED = 20_250_530  # seed of generated questions, different from the default seed of runs


@dataclass(frozen=True)
class DataChoice:
    """Datasets to evaluate on, with all of their rows. `data`: files, folders, names on the hub, or
    ``reasoning-gym:TASK``; `mapping`: name of the mapping from rows to questions; None: rows are questions as they
    are."""

    data: tuple[str, ...]
    mapping: str | None = None  # None: rows are used as they are

    def tree(self, overrides: Overrides = ()) -> dict[str, Any]:
        """Return the sections of a recipe for evaluating on these datasets. The reward is the mapping's or Reasoning
        Gym's, unless an override names one. Overrides of ``source.KEY`` apply to each dataset.

        Raises:
            RecipeError: the mapping is unknown, or an override is malformed.
        """
        if self.mapping is not None and self.mapping not in MAPPINGS:
            raise RecipeError([Problem("--mapping", repr(self.mapping), nearest(self.mapping, MAPPINGS))])
        tree: dict[str, Any] = {"source": {}}
        override(tree, overrides)
        if not isinstance(further := tree.pop("source"), dict):
            raise RecipeError([Problem("override 'source'", repr(further), "e.g. source.prompt_field=question")])
        gym = all(place.startswith(_GYM) for place in self.data)
        asked = [self._source(place) | further for place in self.data]
        reward = "reasoning_gym" if gym else self._mapped.reward if self._mapped is not None else None
        if isinstance(rewards := tree.get("rewards"), dict) and rewards.get("functions"):
            reward = None  # the section has rewards of its own
        for section, defaults in (
            ("task", {"kind": "dataset", "sources": asked, "held_out_sources": asked}),
            ("trainer", {}),
            ("evaluation", {"prompts": sys.maxsize}),
            ("rewards", {"function": reward} if reward is not None else {}),
        ):
            if isinstance(tree.setdefault(section, {}), dict):
                tree[section] = defaults | tree[section]
        tree.setdefault("seed", _SEED)
        return tree

    @property
    def _mapped(self) -> Any:
        """The mapping of `stretto_workflows.data.mappings`; None without one."""
        if self.mapping is None:
            return None
        return from_package("stretto_workflows.data.mappings:MAPPINGS", "--mapping")[self.mapping]

    def _source(self, place: str) -> dict[str, Any]:
        if place.startswith(_GYM):
            name = place.removeprefix(_GYM)
            return {"kind": "reasoning_gym", "task": name, "size": _GYM_QUESTIONS, "held_out": 0}
        chosen = self._mapped
        local = is_local(place, Path.cwd())
        found = {
            "data": str(Path(place).expanduser().resolve()) if local else place,
            "split": "test",
            "mapping": self.mapping,
            "chat_template": "none" if chosen is not None and chosen.continued else "auto",
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Asked:
    """Options of `stretto eval` beside the recipe. `samples`: completions per question (None: as in the recipe);
    `rows`: file for the results by question (None: none). `evaluate` appends these results to `results`."""

    samples: int | None = None
    rows: Path | None = None
    results: list[QuestionResult] = field(default_factory=list)


def evaluate(
    model: Path,
    task: Path | DataChoice,
    overrides: Overrides,
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
    asked: Asked | None = None,
) -> Evaluation:
    """Evaluate a model on the held-out prompts of a task.

    Args:
        model: model folder.
        task: a recipe, a JSONL file (all rows are used), or datasets.
        overrides: values that replace those of the recipe, or of the datasets' source.
        say: writes a log line.
        asked: further options, and where the results go; None: the recipe's number of completions, and no results by
            question.

    Raises:
        UserError: the folder, the task or an override has a mistake.
        RoleError: an engine or a reward worker failed.
        SystemExit: a signal stopped the evaluation.
    """
    asked = asked or Asked()
    if asked.rows is not None and (asked.rows.is_dir() or not os.path.isdir(asked.rows.absolute().parent)):
        fault = "is a folder" if asked.rows.is_dir() else "its folder does not exist"
        raise RecipeError([Problem("--rows", f"{asked.rows}: {fault}", "give a file in a folder")])
    recipe = _recipe(model, task, overrides, asked.samples)
    check_data_files(_files(task))
    plan = make_plan(recipe, trains=False)
    sampling = plan.sampling
    say(
        f"reward {plan.recipe.rewards.title} | temperature {sampling.temperature:g}, at most {sampling.max_tokens} "
        f"tokens | {several(len(plan.held_out), 'prompt')} | sampling seed {plan.recipe.evaluation.seed}"
    )
    for note in dict.fromkeys(plan.notes):
        say(f"warning: {note}")
    found = until_cut_short(_evaluate(plan, spawner, asked.results.extend))
    if asked.rows is not None:
        lines = (msgspec.json.encode(result) + b"\n" for result in asked.results)
        write_atomically(asked.rows, b"".join(lines))
    return found


def _recipe(model: Path, task: Path | DataChoice, overrides: Overrides, samples: int | None) -> Recipe:
    if isinstance(task, DataChoice):
        tree, place = task.tree(overrides), "--data"
    elif task.suffix == ".jsonl":
        rows = {"kind": "jsonl", "file": str(task.resolve()), "held_out_file": str(task.resolve())}
        tree, place = {"task": rows, "trainer": {}, "evaluation": {"prompts": sys.maxsize}}, str(task)
        override(tree, overrides)
    else:
        tree, place = parse_recipe(task, overrides), str(task)
    tree["model"] = {"path": str(model.expanduser())}
    if isinstance(task, DataChoice) or task.suffix == ".jsonl":
        _leave_room(tree, model)
    tree.pop("warm_start", None)
    if isinstance(cluster := tree.pop("cluster", None), dict) and "trusted_network" in cluster:
        tree["cluster"] = {"trusted_network": cluster["trusted_network"]}  # engines of this machine answer
    if isinstance(tree.get("trainer"), dict):
        for key in ("device", "ranks", "remote_ranks", "tensor_parallel", "context_parallel"):  # nothing is trained
            tree["trainer"].pop(key, None)
    if isinstance(tree.get("evaluation", {}), dict):
        chosen = {"samples": samples} if samples is not None else {}
        tree["evaluation"] = {**tree.get("evaluation", {}), "sets": [], "best_of": "", **chosen}
    return validate(tree, place, overrides)


def _leave_room(tree: dict[str, Any], model: Path) -> None:
    """Limit completions to half of the model's context if no override says how long they may be and the default is
    longer."""
    sampling = tree.setdefault("sampling", {})
    if isinstance(sampling, dict) and "max_tokens" not in sampling:
        half = inspect_model_folder(model.expanduser()).context_length // 2
        sampling["max_tokens"] = max(1, min(half, SamplingConfig().max_tokens))


def _files(task: Path | DataChoice) -> Iterator[tuple[str, str]]:
    """Yield (option, file) for each local file that the command line names; other datasets are left out."""
    if isinstance(task, Path):
        yield "--task", str(task)
        return
    local = [place for place in task.data if not place.startswith(_GYM) and is_local(place, Path.cwd())]
    yield from (("--data", str(Path(place).expanduser())) for place in local)


async def _evaluate(plan: Plan, spawner: Spawner, keep: Callable[[Sequence[QuestionResult]], None]) -> Evaluation:
    recipe, stopped = plan.recipe, StopSignal()
    seats = seats_of(plan, usable_gpus(recipe), ranks=False)
    folder, held = lock.temporary_folder()
    engines = engines_of_folder(recipe, plan.base.path, folder, folder, spawner, seats)
    rewards = RewardPool(recipe.rewards, rows=plan.rows)
    workflows = workflow_pool(plan, folder / "workflow.txt")
    asked = (rewards.start(),) if workflows is None else (rewards.start(), workflows.start())
    failed = True
    try:
        await stopped.unless(gather_or_cancel(*asked, engines.start(0)))
        evaluate = Evaluator(
            plan.held_out,
            plan.sampling,
            recipe.evaluation.seed,
            engines.generate,
            rewards.score_group,
            plan.tokenizer.decode,
            rows=keep,
            converse=conversing(plan, workflows, engines.generate, rewards.score_group),
        )
        evaluation = await stopped.unless(run_beside(engines.supervise(), with_samples(evaluate, plan)()))
        failed = False
    finally:
        ends = (rewards.close(),) if workflows is None else (rewards.close(), workflows.close())
        await asyncio.gather(engines.stop(1.0), *ends)
        lock.let_go(folder, held, kept=failed)  # the message of a failure names a log in this folder
    return evaluation or sys.exit(stopped.exit_code)


def engines_of_folder(
    recipe: Recipe,
    model: Path,
    folder: Path,
    logs: Path,
    spawner: Spawner,
    seats: tuple[Seat, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> EnginePool:
    """Create a pool of engines that serve a model folder without a trainer; they are not started yet.

    Args:
        model: model folder.
        folder: for the sockets (`lock.temporary_folder`).
        logs: folder for the logs.
        seats: assignment of engines to GPUs; empty: they run on the CPU.
        say: gets a log line for every engine that is replaced.
    """
    endpoints = Endpoints(mailbox=digest(folder), mailbox_folder=folder, sockets=folder, seats=seats)  # no weights
    specs = engine_specs(recipe, model, endpoints, published=False)
    return EnginePool(specs, logs, recipe.deadlines, recipe.engine.role, spawner=spawner, say=say)
