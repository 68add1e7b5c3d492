"""`stretto.evaluate`: the command ``stretto eval`` as a function, run in a process of its own as `stretto.train` is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RecipeError
from stretto.doors.loading import from_package
from stretto.launch.recipe.overrides import with_named_reward
from stretto.launch.recipe.recipe import Recipe, override, to_toml
from stretto.loop.records.evaluation import Evaluation
from stretto.processes.spawn import Spawner
from stretto.run import Order, Rewards, RunProcess, overrides_of, recipe_of, unfit


class _EvaluationOrder(Order, frozen=True):
    """Order to evaluate a model folder on the held-out prompts of a task; its result is an `Evaluation`. `task`: a path
    if `is_path`, else a recipe as TOML text. `overrides`: values that replace those of the recipe."""

    model: str
    task: str
    is_path: bool
    overrides: dict[str, Any]

    def carry_out(self, folder: Path, say: Callable[[str], None], spawner: Spawner) -> object:
        task = Path(self.task)
        if not self.is_path:
            task = folder / "recipe.toml"
            task.write_text(self.task, encoding="utf-8")
        measure = from_package("stretto_app.extensions.commands.evaluate:evaluate", "stretto.evaluate")
        return measure(Path(self.model), task, self.overrides, spawner)


def evaluate(
    model: str | Path,
    task: str | Path | Recipe | Mapping[str, Any],
    *,
    reward: Rewards | None = None,
    **overrides: Any,
) -> Evaluation:
    """Measure the accuracy of a model on the held-out prompts of a task, as ``stretto eval`` does. Waits for the
    result.

    Args:
        model: a model folder.
        task: a recipe (a TOML file, a `stretto.Recipe` or a dict), or a JSONL file, of which all rows are used.
        reward: judges the completions: a function, the name of a built-in reward, or a list of these; default: the
            recipe's.
        **overrides: values that replace those of the recipe: ``evaluation={"prompts": 8}``.

    Example::

        evaluation = stretto.evaluate("model", "recipe.toml", evaluation={"prompts": 8})
        print(evaluation.accuracy, evaluation.right, evaluation.prompts)

    Raises:
        UserError: the folder, the task, the reward or an override is invalid.
        RoleError: an engine or a reward worker failed, or the process of the evaluation died.
    """
    if not isinstance(model, str | Path):
        raise unfit("model", model, "the path of a model folder")
    overrides |= overrides_of(reward)
    is_path, tree = isinstance(task, str | Path), dict[str, Any]()
    override(tree, overrides)
    if "rewards" in tree:
        try:
            tree["rewards"] = with_named_reward(tree["rewards"])
        except ValueError as error:
            place = f"{task if is_path else 'Recipe'}: rewards"
            raise RecipeError([Problem(place, str(error))]) from None
    process = RunProcess(
        _EvaluationOrder(
            model=str(model),
            task=str(task) if is_path else to_toml(recipe_of(task, {})),
            is_path=is_path,
            overrides=tree,
        )
    )
    try:
        evaluation: Evaluation = process.reply()
    finally:
        process.close()
    return evaluation
