"""Overrides of a recipe's values: texts of a command line, or Python values, whose functions are replaced by their
names.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from stretto.core.errors import Problem

#: ``"section.key=value"`` texts, or values by their keys: ``{"trainer.steps": 100, "rollout": {"group_size": 4}}``.
Overrides = Sequence[str] | Mapping[str, Any]

#: Keys that exclude each other, by their section: an override of one removes the other.
_INSTEAD = {
    ("rewards", "function"): "functions",
    ("rewards", "functions"): "function",
    ("model", "path"): "build",
    ("model", "build"): "path",
}


def put(tree: dict[str, Any], key: str, value: Any, place: str) -> Problem | None:
    """Set a dotted key of a parsed recipe, and remove the key that excludes it. Missing sections are added. A table is
    merged into a table of the same `kind`: only the keys that `value` has change. Changes `tree`.

    Returns a problem, at `place`, if a section on the way to the key is a plain value; else None.
    """
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return Problem(place, f"{section} is a value, not a section")
    tree.pop(_INSTEAD.get((sections[-1] if sections else "", last), ""), None)
    tree[last] = _merged(last, tree.get(last), value)
    return None


def at_override(problem: Problem, place: str, overrides: Overrides) -> Problem:
    """Return the problem with the override that caused it in its place; unchanged if no override did.

    An override causes problems of its own key and of keys below it: the place becomes "override KEY". It also causes a
    problem of its section that mentions the last part of its key: then " with override KEY" is added to the place.
    `place`: name of the recipe with which `problem.place` begins.
    """
    key = problem.place.removeprefix(place).removeprefix(": ")
    for own in _keys(overrides):
        if f"{key}.".startswith(f"{own}."):
            return replace(problem, place=f"override {key}")
        within = not key or own.startswith(f"{key}.")
        if within and problem.found == "unknown key":  # a section of that name
            return replace(problem, place=f"override {own}")
        if within and re.search(rf"(?<!\w){re.escape(own.rpartition('.')[2])}(?!\w)", problem.found):
            return replace(problem, place=f"{problem.place} with override {own}")
    return problem


def _keys(overrides: Overrides) -> Iterator[str]:
    """Yield the dotted names of the keys that the overrides set; for a table, those of the keys in it."""
    if isinstance(overrides, Mapping):
        given = ((key, as_parsed(value)) for key, value in overrides.items())
    else:
        parts = (text.partition("=") for text in overrides)
        given = ((key.strip(), parsed_value(text.strip())) for key, _, text in parts)
    for key, value in given:
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in _keys(value))
        else:
            yield key


def as_parsed(value: Any) -> Any:
    """Convert a Python value to the form that a parsed TOML file has. A section becomes a dict of the keys that were
    given, a `Path` a text; other values stay."""
    match value:
        case BaseModel():
            return value.model_dump(mode="python", exclude_unset=True)
        case Mapping():
            return {key: as_parsed(inner) for key, inner in value.items()}
        case Path():
            return str(value)
    return value


def _merged(name: str, old: Any, new: Any) -> Any:
    """Merge an overriding value of the key `name` with the old one. A table changes only the keys that it has, unless
    its `kind` differs; any other value replaces the old one."""
    if not isinstance(old, dict) or not isinstance(new, dict) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    instead = {_INSTEAD.get((name, key)) for key in new}
    kept = {key: value for key, value in old.items() if key not in instead}
    return kept | {key: _merged(key, old.get(key), value) for key, value in new.items()}


def parsed_value(text: str) -> Any:
    """Parse a TOML value; a text that is no TOML is returned as it is, so ``rollout.beyond_bound=wait`` needs no
    quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # ValueError: TOMLDecodeError, or a number of thousands of digits
        return text
    return found["value"] if len(found) == 1 else text  # further lines would be lost


_REMEDY = "write it into a file beside the recipe or the notebook, import it from there, and give that"


def with_named_reward(section: Any) -> Any:
    """Return a section ``[rewards]`` or ``[workflow]`` in which Python functions are replaced by their names, and
    `path` by the folder of their modules. A function in place of the section becomes a section with `function` and
    `path`. Any other value, such as a section without function objects, is returned as it is.

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
    function's module. Without a function object: `part` as it is, and ""."""
    if not isinstance(part, Mapping) or not callable(part.get("function")):
        return part, ""
    named = named_reward(part["function"])
    return {**part, "function": named["function"]}, named["path"]


def named_reward(function: Callable[..., object]) -> dict[str, str]:
    """Return the keys `function` (``package.module:name``) and `path` (the folder to import it from) of ``[rewards]``,
    with which a worker process can import the function. Raises ValueError if another process could not import it; says
    why."""
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
    """Return the name by which another process can import the module; for a script, the name of its file `path` without
    ``.py``."""
    if module.__name__ != "__main__":
        return module.__name__
    return module.__spec__.name if module.__spec__ is not None else path.stem


def _found(module: ModuleType, name: str) -> object:
    """Return the object with this qualified name in the module; None if there is none."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
