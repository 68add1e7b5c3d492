"""The base model before any training: a folder, or a new model that is built once and cached."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import cache_folder
from stretto.launch.recipe.sections import ModelConfig
from stretto.model.hf.build import build_policy
from stretto.model.hf.inspection import weight_files


def base_folder(model: ModelConfig, seed: int) -> Path:
    """Return the folder of the base model: `model.path`, which is not checked, or a new model from ``[model.build]``.

    A new model is built in the cache, with weights drawn from `seed`, unless an earlier call has built it.

    Raises:
        RecipeError: a model must be built, and the cache cannot be written, or the memory has no room for the model.
    """
    if model.path is not None:
        return Path(model.path)
    assert model.build is not None, "validated: either a path or a build"
    folder = cache_folder() / "models" / digest(model.build.model_dump_json(), seed)
    if not folder.exists():
        check_cache()
        build_policy(model.build, folder, seed)
    return folder


def check_cache() -> None:
    """Raise RecipeError if the cache of built models and warm starts cannot be written; UserError if there is no folder
    for it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        found = f"the cache of built models and warm starts cannot be written: {error}"
        raise RecipeError([Problem(str(folder), found, "set STRETTO_CACHE to a folder of your own")]) from None


def loaded_files(folder: Path) -> set[str]:
    """Names of the files from which the weights of the model in `folder` are loaded; other libraries may have others
    beside them."""
    return {str(file.relative_to(folder)) for file in weight_files(folder).values()}


def digest(*parts: object) -> str:
    """Compute a hash of the parts, each converted to text: 20 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=10)
    for place, part in enumerate(parts):  # one by one: those of a whole data set are larger than all else of a start
        found.update(f"\x1f{part}".encode() if place else str(part).encode())
    return found.hexdigest()
