"""First checks of a command, ordered by the libraries that a check imports, so that mistakes are reported quickly.

folders     a recipe file, model folder or run folder exists: no library
recipe      its keys and values, and the paths that it names: pydantic
content     model, tokenizer, data, reward: torch and transformers, in the command itself
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stretto_app.cli.interrupts import importing


def refuse_file(recipe: Path) -> None:
    """Raise RecipeError if a recipe file is missing or is broken TOML."""
    from stretto.launch.recipe.file import read_toml

    read_toml(recipe)


def refuse_model(folder: Path) -> None:
    """Raise ModelFolderError if a folder has no config.json. Its other files are checked later."""
    from stretto.model.hf.inspection import inspect_model_folder

    if not os.path.isfile(folder.expanduser() / "config.json"):
        inspect_model_folder(folder)


def refuse_run(folder: Path) -> None:
    """Raise RunFolderError if a folder holds no run."""
    from stretto.store.run_folder import RunFolder

    RunFolder.open(folder)


def refuse_recipe(
    recipe: Path, overrides: Sequence[str], *, paths: bool = True, functions: bool = False
) -> tuple[str, ...]:
    """Check the keys and values of a recipe, with `paths` the paths that it names, and with `functions` its rewards and
    its workflow. Return the modules of transformers that its model needs.

    Raises:
        RecipeError: the file is missing or broken, or keys or values are wrong; names all.
        ModelFolderError: with `paths`: the model folder is missing or has no config.json.
        DataError: with `paths`: a data file is missing.
        RewardFunctionError, WorkflowError: with `functions`: a reward or the workflow cannot be found.
    """
    from stretto_app.forking.imports import imports_of_roles

    refuse_file(recipe)
    with importing(), imports_of_roles():
        from stretto.core.errors import Mistakes, UserError
        from stretto.launch.preflight.paths import check_functions, check_paths
        from stretto.launch.recipe.recipe import load_recipe

        found, mistakes = load_recipe(recipe, overrides), Mistakes(UserError)
        with mistakes:
            if paths:
                check_paths(found)
        with mistakes:
            if functions:
                check_functions(found)
        mistakes.done()
        return found.model.modules()


def refuse_training(
    recipe: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool, *, paths: bool
) -> tuple[str, ...]:
    """Check what `stretto train` is given: a recipe, or with `resume` a run folder. `run_dir`: the folder given for the
    run, or None. `paths`: also the paths and the functions that a recipe names. Return the modules of transformers that
    the model needs, or () without a check if `resume` gets both a folder and a `run_dir`.

    Raises:
        RunFolderError: there is no such run to resume; or a recipe and a run folder stand side by side.
        UserError: as `refuse_recipe` and `refuse_resumed`.
    """
    if resume and (run := next((one for one in overrides if "=" not in one and os.path.isdir(one)), None)):
        from stretto.core.errors import Problem, RunFolderError

        own = f"`stretto train --resume {run}` takes the recipe on record in {run}"
        other = f"`stretto train {recipe} --resume --run-dir {run}` takes {recipe}"
        remedy = f"{own}, {other}; either may differ from the record only where a resume may, as in trainer.steps"
        raise RunFolderError([Problem("--resume", f"{recipe} and {run} are both given", remedy)])
    if resume and run_dir is None and not (recipe.suffix or os.path.exists(recipe)):
        refuse_run(recipe)
    if not (resume and os.path.isdir(recipe)):
        return refuse_recipe(recipe, overrides, paths=paths, functions=paths)
    return refuse_resumed(recipe, overrides) if run_dir is None else ()


def refuse_preferences(recipe: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """Check the keys and values of a recipe of `stretto dpo`, but not its paths. Return the modules of transformers
    that its model needs.

    Raises:
        RecipeError: the file is missing or broken, or keys or values are wrong; names all.
    """
    from stretto_app.forking.imports import imports_of_roles

    refuse_file(recipe)
    with importing(), imports_of_roles():
        from stretto_app.extensions.commands.preferences import load_preferences

        return load_preferences(recipe, overrides).model.modules()


def refuse_resumed(run: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """Check the recipe in a run folder with the `overrides`: keys, values, paths and functions. Return the modules of
    transformers that its model needs, or () if the folder has no recipe.

    Raises:
        RunFolderError: the folder holds no run.
        RecipeError: keys or values are wrong.
        ModelFolderError: the model folder is missing or has no config.json.
        DataError: a data file is missing.
        RewardFunctionError, WorkflowError: a reward or the workflow cannot be found.
    """
    refuse_run(run)
    recipe = run / "recipe.toml"
    return refuse_recipe(recipe, overrides, functions=True) if recipe.is_file() else ()
