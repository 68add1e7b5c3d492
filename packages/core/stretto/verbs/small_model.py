"""`stretto.build_model`: a small model with random weights, to try things without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.doors.mistakes import checked
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.verbs.arguments import FOLDER, WHOLE, check


def build_model(folder: str | Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a new model with random weights as a Hugging Face folder; returns the folder. Each character is one token.
    An existing model in the folder is replaced.

    Example::

        folder = stretto.build_model("tiny", alphabet="0123456789", layers=1, hidden_size=32)
        print(stretto.Engine.load(folder).sample("3", max_tokens=4)[0].text)

    Args:
        **settings: keys of a recipe's section ``[model.build]``: `alphabet`, `layers`, `hidden_size`, `heads`, …

    Raises:
        ModelFolderError: the folder holds files that are no part of a model.
        RecipeError: a setting is invalid.
        OSError: the folder cannot be written.
    """
    check("build_model", folder=(folder, FOLDER), seed=(seed, WHOLE))
    place = Path(folder).expanduser()
    build_policy(checked(settings, "build_model", BuildConfig), place, seed)
    return place
