"""The doors of a recipe (keys that may name user-defined parts), and the folder in which their modules are searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.doors.door import Door
from stretto.doors.loading import is_own
from stretto.engine.config import MAKES
from stretto.launch.recipe.outlets import OUTLETS
from stretto.rollout.config import FILTERS, PACINGS
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.surrogates import LOSSES

DOORS: tuple[Door[Any], ...] = (LOSSES, CORRECTIONS, ESTIMATORS, FILTERS, PACINGS, MAKES, OUTLETS)


def find_parts(tree: dict[str, Any], folder: Path) -> None:
    """Set the key `path` of a parsed recipe to its folder, if a user-defined part's module is there and no `path` is
    given. Changes `tree`."""
    if "path" not in tree and any(is_beside(name, folder) for name in named_in_doors(tree)):
        tree["path"] = str(folder.resolve())


def is_beside(name: object, folder: Path) -> bool:
    """Whether `name` is that of a user-defined part (``module:name``) whose module is in the folder."""
    if not (isinstance(name, str) and is_own(name)):
        return False
    module = folder / name.partition(":")[0].partition(".")[0]
    return module.is_dir() or module.with_suffix(".py").is_file()


def named_in_doors(tree: Mapping[str, Any]) -> Iterator[object]:
    """Yield the names of parts in the keys of all doors."""
    for door in DOORS:
        found: Any = tree
        for key in door.key.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        for one in found if isinstance(found, list | tuple) else [found]:
            yield one.get("kind") if isinstance(one, dict) else one
