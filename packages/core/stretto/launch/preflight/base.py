"""Base policy before any training: a folder, or a model that is built once and cached."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import cache_folder
from stretto.launch.recipe.sections import ModelConfig
from stretto.model.hf.build import build_policy


def base_folder(model: ModelConfig, seed: int) -> Path:
    """Folder of the policy before any training; a model from `[model.build]` is built once and cached."""
    if model.path is not None:
        return Path(model.path)
    assert model.build is not None, "validated: either a path or a build"
    folder = cache_folder() / "models" / digest(model.build.model_dump_json(), seed)
    if not folder.exists():
        check_cache()
        build_policy(model.build, folder, seed)
    return folder


def check_cache() -> None:
    """Check that the cache of built models and warm starts can be written.

    Raises:
        RecipeError: it cannot.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        found = f"the cache of built models and warm starts cannot be written: {error}"
        raise RecipeError([Problem(str(folder), found, "set STRETTO_CACHE to a folder of your own")]) from None


def digest(*parts: object) -> str:
    """Short name that depends on all parts."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=10).hexdigest()
