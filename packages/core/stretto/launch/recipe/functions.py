"""Converting rewards given as Python functions to names, by which worker processes import them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_REMEDY = "write it into a file beside the recipe or the notebook, import it from there, and give that"


def with_named_reward(section: Any) -> Any:
    """Return the section ``[rewards]`` with functions replaced by their names and the folder of their modules. The
    section may be a function itself.

    Raises:
        ValueError: another process could not import a function, or their modules are in several folders.
    """
    if callable(section):
        return named_reward(section)
    if not isinstance(section, Mapping):
        return section
    if callable(section.get("function")):
        section = {**section, **named_reward(section["function"])}
    parts = section.get("functions")
    if isinstance(parts, list | tuple) and any(isinstance(part, Mapping) for part in parts):
        named = [_named_part(part) for part in parts]
        paths = {path for _, path in named if path} | ({str(section["path"])} if section.get("path") else set())
        if len(paths) > 1:
            raise ValueError(f"the functions are in modules of several folders: {', '.join(sorted(paths))}")
        section = {**section, "functions": [part for part, _ in named], "path": next(iter(paths), None)}
    return section


def _named_part(part: Any) -> tuple[Any, str]:
    """Return a table of ``[[rewards.functions]]`` with its function replaced by its name, and the folder of the
    function's module ("" if the table has no function object)."""
    if not isinstance(part, Mapping) or not callable(part.get("function")):
        return part, ""
    named = named_reward(part["function"])
    return {**part, "function": named["function"]}, named["path"]


def named_reward(function: Callable[..., object]) -> dict[str, str]:
    """Return the keys `function` and `path` of ``[rewards]`` with which a worker process can import the function.

    Raises:
        ValueError: another process could not import it; says why.
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not name or module is None:
        raise ValueError(f"{function!r} has no name by which its worker could import it; {_REMEDY}"[:300])
    if "<lambda>" in name:
        raise ValueError(f"a lambda has no name by which its worker could import it; {_REMEDY}")
    if "<locals>" in name:
        raise ValueError(f"{name!r} is defined inside of a function, so that its worker cannot import it; {_REMEDY}")
    if _found(module, name) is not function:
        raise ValueError(f"{module.__name__}:{name} is another object than the function of that name; {_REMEDY}")
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(f"{name!r} is defined in no file, so that its worker cannot import it; {_REMEDY}")
    path = Path(file).resolve()
    imported = _imported_as(module, path)
    steps = imported.count(".") + (path.name == "__init__.py")
    return {"function": f"{imported}:{name}", "path": str(path.parents[steps])}


def _imported_as(module: ModuleType, path: Path) -> str:
    """Return the name by which another process can import the module; for a script, the name of its file."""
    if module.__name__ != "__main__":
        return module.__name__
    return module.__spec__.name if module.__spec__ is not None else path.stem


def _found(module: ModuleType, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
