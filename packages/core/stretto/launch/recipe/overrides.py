"""Overrides of a recipe: texts of a command line, or Python values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stretto.core.errors import Problem

#: ``"section.key=value"`` texts, or values by their keys: ``{"trainer.steps": 100, "rollout": {"group_size": 4}}``.
Overrides = Sequence[str] | Mapping[str, Any]


#: Keys that stand in place of each other: an override of one takes the other away.
_INSTEAD = {"function": "functions", "functions": "function"}


def put(tree: dict[str, Any], key: str, value: Any, place: str) -> Problem | None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return Problem(place, f"{section} is a value, not a section")
    tree.pop(_INSTEAD.get(last, ""), None)
    tree[last] = _merged(tree.get(last), value)
    return None


def at_override(problem: Problem, place: str, overrides: Overrides) -> Problem:
    """Attribute a problem of the recipe `place` to the override that caused it, if there is one: an override of its key
    or, for a problem of a whole section, of a key that the problem mentions."""
    key = problem.place.removeprefix(place).removeprefix(": ")
    for own in _keys(overrides):
        if f"{key}.".startswith(f"{own}."):
            return replace(problem, place=f"override {key}")
        within = not key or own.startswith(f"{key}.")
        if within and re.search(rf"(?<!\w){re.escape(own.rpartition('.')[2])}(?!\w)", problem.found):
            return replace(problem, place=f"{problem.place} with override {own}")
    return problem


def _keys(overrides: Overrides) -> Iterator[str]:
    """Keys that overrides set; of tables, the keys inside."""
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
    """A Python value as a parsed file would hold it; of a section only the given keys."""
    match value:
        case BaseModel():
            return value.model_dump(mode="python", exclude_unset=True)
        case Mapping():
            return {key: as_parsed(inner) for key, inner in value.items()}
        case Path():
            return str(value)
    return value


def _merged(old: Any, new: Any) -> Any:
    """A table changes only the keys that it names, unless its kind differs; any other value replaces the old one."""
    if not isinstance(old, dict) or not isinstance(new, dict) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    instead = {_INSTEAD.get(key) for key in new}
    kept = {key: value for key, value in old.items() if key not in instead}
    return kept | {key: _merged(old.get(key), value) for key, value in new.items()}


def parsed_value(text: str) -> Any:
    """A TOML value, or the bare text: ``rollout.beyond_bound=wait`` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
