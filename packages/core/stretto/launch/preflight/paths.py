"""Check of the model folder, data files and functions that a recipe names. It imports little, so that a command can
report mistakes before it imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stretto.core.errors import (
    DataError,
    Mistakes,
    Problem,
    RecipeError,
    RewardFunctionError,
    UserError,
    WorkflowError,
    nearest,
)
from stretto.doors.loading import check_source, from_package
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import inspect_model_folder
from stretto.rewards.built_in import BUILT_IN
from stretto.rollout.tasks import DatasetTask, JsonlTask, RowsSource, Source, is_local
from stretto.rollout.workflow import PLACE as WORKFLOW
from stretto.rollout.workflow import WorkflowConfig

_SHOWN_NAMES = 8


def check_paths(recipe: Recipe) -> None:
    """Check that the model folder and the data files of a recipe exist; the model first.

    Raises:
        ModelFolderError: the model folder is missing or has no config.json; names missing data files, too.
        DataError: only data files are missing; names each of them.
    """
    mistakes = Mistakes(UserError)
    with mistakes:
        if recipe.model.path is not None:
            check_model_folder(Path(recipe.model.path), "model.path")
    with mistakes:
        check_data_files(data_files(recipe))
    mistakes.done()


def check_functions(recipe: Recipe) -> None:
    """Check that the rewards and the workflow of a recipe exist, without an import of their modules. Raises
    RewardFunctionError or WorkflowError if some do not; names all of them; RecipeError if the package for workflows is
    not installed."""
    mistakes, config = Mistakes(UserError), recipe.rewards
    known = {kind: one.function for kind, one in BUILT_IN.items()}
    for number, part in enumerate(config.parts):
        with mistakes:
            place = f"rewards.functions.{number}.function" if config.functions else "rewards.function"
            _check_function(RewardFunctionError, part.function, place, "reward", known, config.path)
    if isinstance(recipe.workflow, WorkflowConfig):
        own = from_package("stretto_workflows.loading:BUILT_IN", WORKFLOW)
        with mistakes:
            name, folder = recipe.workflow.function, recipe.workflow.path
            _check_function(WorkflowError, name, WORKFLOW, "workflow", own, folder)
    mistakes.done()


def _check_function(
    kind: type[UserError], name: str, place: str, what: str, built_in: Mapping[str, str], folder: str | None
) -> None:
    """Check with `check_source` that the function `name` exists; raise its RecipeError as an error of class `kind`,
    with the same problems."""
    try:
        check_source(name, place, what, built_in, folder)
    except RecipeError as error:
        raise kind(error.problems) from None


def check_model_folder(folder: Path, key: str) -> None:
    """Check that a folder has a config.json. If it has, nothing else is checked here. `key`: the recipe key that names
    it, for messages. Raises ModelFolderError if there is no folder, or no config.json in it; also names what else the
    folder lacks."""
    if not os.path.isfile(folder / "config.json"):
        inspect_model_folder(folder, key)


def data_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (recipe key, path) for each local file or folder of the recipe's data."""
    if isinstance(recipe.task, JsonlTask):
        yield "task.file", recipe.task.file
        if recipe.task.held_out_file is not None:
            yield "task.held_out_file", recipe.task.held_out_file
    listed: list[tuple[str, Source]] = []
    if isinstance(recipe.task, DatasetTask):
        listed += ((f"task.sources.{number}", one) for number, one in enumerate(recipe.task.sources))
        listed += ((f"task.held_out_sources.{number}", one) for number, one in enumerate(recipe.task.held_out_sources))
    listed += ((f"evaluation.sets.{number}.source", one.source) for number, one in enumerate(recipe.evaluation.sets))
    for key, source in listed:
        if isinstance(source, RowsSource) and is_local(source.data, Path.cwd()):
            yield f"{key}.data", source.data


def check_data_files(named: Iterable[tuple[str, str]]) -> None:
    """Check that files or folders exist. `named`: pairs of (recipe key or option that names the file, path). Raises
    DataError if some do not, or cannot be looked at; suggests the nearest name of each missing one."""
    problems = [
        Problem(name, f"{file}: {fault}", advice) for name, file in named for fault, advice in _fault(Path(file))
    ]
    if problems:
        raise DataError(problems)


def _fault(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, advice) once if the path does not exist or cannot be looked at; else nothing."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        yield "no such file", nearest_file(file)
    except OSError as error:
        yield f"cannot be read: {error.strerror}", ""


def nearest_file(path: Path) -> str:
    """Return the remedy for a missing file: the most similar name of a file in its folder, else the first eight names
    there, else that the folder has no files or does not exist."""
    try:
        names = sorted(
            entry.name for entry in path.parent.iterdir() if entry.is_file() and not entry.name.startswith(".")
        )
    except (OSError, ValueError):
        return f"there is no folder {path.parent}"
    if (near := nearest(path.name, names)).startswith("did") or not names:
        return near if names else f"the folder {path.parent} has no files"
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"the folder {path.parent} has {', '.join(names[:_SHOWN_NAMES])}{more}"
