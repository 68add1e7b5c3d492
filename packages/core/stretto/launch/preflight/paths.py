"""What a recipe names by a path; light, so that a command can refuse it before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from stretto.core.errors import DataError, Problem
from stretto.core.jsonl import nearest_file
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import inspect_model_folder
from stretto.worlds.data.dataset import JsonlTask
from stretto.worlds.sources.readers import is_local
from stretto.worlds.sources.rows_source import RowsSource
from stretto.worlds.sources.task import DatasetTask, Source


def check_paths(recipe: Recipe) -> None:
    """Check that the model and the data of a recipe are there.

    Raises:
        ModelFolderError, DataError: they are not; the model first.
    """
    if recipe.model.path is not None:
        check_model_folder(Path(recipe.model.path))
    check_data_files(data_files(recipe))


def check_model_folder(folder: Path) -> None:
    """Check that a folder is one of a model; what is in it is read later.

    Raises:
        ModelFolderError: there is no folder, or no config in it; with everything else that is wrong.
    """
    if not (folder / "config.json").is_file():
        inspect_model_folder(folder)


def data_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Local files and folders of the recipe's data, each with its key."""
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
    """Check that files exist; `named` pairs each with the user's name for it.

    Raises:
        DataError: some do not; with the nearest name of each.
    """
    missing = [(name, Path(file)) for name, file in named if not Path(file).exists()]
    if missing:
        raise DataError(Problem(name, f"{file}: no such file", nearest_file(file)) for name, file in missing)
