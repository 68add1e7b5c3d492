"""`stretto.train` and `stretto.evaluate`: the commands ``stretto train`` and ``stretto eval`` as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.run import EvaluationOrder, Run, RunProcess, TrainOrder
from stretto.core.errors import Problem, RecipeError
from stretto.loop.records.evaluation import Evaluation
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import StepMetrics

if TYPE_CHECKING:
    from stretto.launch.recipe.recipe import Recipe


#: A reward: a function, or the name of a built-in reward.
Judge = Callable[..., object] | str
Rewards = Judge | Sequence[Judge]


def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    reward: Rewards | None = None,
    on_step: Callable[[StepMetrics], object] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    **overrides: Any,
) -> Run:
    """Train a policy by asynchronous reinforcement learning, as ``stretto train`` does.

    Returns when recipe, data, model and reward are checked; the run itself goes on in other processes.

    Args:
        recipe: a TOML file, a `stretto.Recipe`, or a dict of its sections; with `resume`, the folder of the run.
        reward: judges the completions (docs/how_to/rewards.md): a function, synchronous or not, that another process
            can import; the name of a built-in reward; or a list of these, whose rewards are added. Default: the
            recipe's.
        on_step: called with each training step; `train` then returns only when the run has ended. An exception in it
            stops the run.
        run_dir: folder of the run; default: ``runs/RECIPE-DATE``.
        resume: continue a run that was stopped or killed.
        overrides: values that replace those of the recipe: ``trainer={"steps": 100}``, or
            ``**{"trainer.steps": 100}``.

    Example::

        run = stretto.train("recipe.toml", run_dir="runs/first", trainer={"steps": 3})
        for step in run:
            print(step.step, step.accuracy, step.staleness_max)
        print(run.accuracy)

    Raises:
        UserError: the recipe, the data, the model, the reward or the folder is invalid; with the message of the command
            line.
    """
    _check(on_step=on_step, run_dir=run_dir)
    overrides |= _judges(reward)
    place = recipe
    if resume and isinstance(recipe, str | Path):
        place, run_dir = RunFolder.open(recipe).recipe, recipe
    found = _recipe(place, overrides)
    from stretto.launch.recipe.recipe import to_toml

    name = Path(recipe).stem if isinstance(recipe, str | Path) else "recipe"
    order = TrainOrder(
        recipe=to_toml(found), name=name, run_dir=None if run_dir is None else str(run_dir), resume=resume
    )
    run = Run.of_process(RunProcess(order), found.deadlines.stop)
    if on_step is not None:
        for step in run:
            on_step(step)
    return run


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
        UserError: the folder, the task or an override is invalid.
        RoleError: an engine or a reward worker failed.
    """
    from stretto.launch.recipe.overrides import with_named_reward
    from stretto.launch.recipe.recipe import override, to_toml

    if not isinstance(model, str | Path):
        raise _unfit("model", model, "the path of a model folder")
    overrides |= _judges(reward)
    is_path, tree = isinstance(task, str | Path), dict[str, Any]()
    override(tree, overrides)
    if "rewards" in tree:
        try:
            tree["rewards"] = with_named_reward(tree["rewards"])
        except ValueError as error:
            place = f"{task if is_path else 'Recipe'}: rewards"
            raise RecipeError([Problem(place, str(error))]) from None
    process = RunProcess(
        EvaluationOrder(
            model=str(model),
            task=str(task) if is_path else to_toml(_recipe(task, {})),
            is_path=is_path,
            overrides=tree,
        )
    )
    try:
        evaluation: Evaluation = process.reply()
    finally:
        process.close()
    return evaluation


def _recipe(recipe: str | Path | Recipe | Mapping[str, Any], overrides: dict[str, Any]) -> Recipe:
    from stretto.launch.recipe.overrides import as_parsed
    from stretto.launch.recipe.recipe import Recipe, load_recipe, override, validate

    if isinstance(recipe, str | Path):
        return load_recipe(Path(recipe), overrides)
    if not isinstance(recipe, Recipe | Mapping):
        raise _unfit("recipe", recipe, "a TOML file, a stretto.Recipe, or a dict of its sections")
    if isinstance(recipe, Recipe):
        place, tree = "Recipe", recipe.model_dump(mode="python", exclude_none=True)
    else:
        place, tree = "recipe", as_parsed(recipe)
    override(tree, overrides)
    return validate(tree, place, overrides)


def _judges(reward: object) -> dict[str, Any]:
    """Convert the argument `reward` to overrides of the recipe; empty for None. Raises RecipeError if it is neither a
    function, a name nor a list of them."""
    if reward is None:
        return {}
    if isinstance(reward, list | tuple) and reward and all(callable(one) or isinstance(one, str) for one in reward):
        return {"rewards.functions": [{"function": one} for one in reward]}
    if callable(reward) or isinstance(reward, str):
        return {"rewards.function": reward}
    raise _unfit("reward", reward, "a function, the name of a built-in one, or a list of them")


def _check(*, on_step: object, run_dir: object) -> None:
    """Check the types of arguments that would otherwise fail only after the run has started. Raises RecipeError."""
    if on_step is not None and not callable(on_step):
        raise _unfit("on_step", on_step, "a function that is called with each step, a stretto.StepMetrics")
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise _unfit("run_dir", run_dir, "the path of a folder")


def _unfit(argument: str, value: object, allowed: str) -> RecipeError:
    return RecipeError([Problem(argument, f"{value!r:.80} is of the type {type(value).__name__}", f"give {allowed}")])
