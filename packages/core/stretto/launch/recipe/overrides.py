"""Overrides of a recipe's values: texts of a command line, or Python values."""

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


#: Keys that exclude each other: an override of one removes the other.
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
    """Return the problem with the override in its place that caused it; unchanged if no override did.

    An override causes a problem of its own key. It also causes a problem of a whole section that mentions its key.
    `place`: name of the recipe with which `problem.place` begins.
    """
    key = problem.place.removeprefix(place).removeprefix(": ")
    for own in _keys(overrides):
        if f"{key}.".startswith(f"{own}."):
            return replace(problem, place=f"override {key}")
        within = not key or own.startswith(f"{key}.")
        if within and re.search(rf"(?<!\w){re.escape(own.rpartition('.')[2])}(?!\w)", problem.found):
            return replace(problem, place=f"{problem.place} with override {own}")
    return problem


def _keys(overrides: Overrides) -> Iterator[str]:
    """Yield the full names of the keys that the overrides set; for a table, those of the keys in it."""
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
    """Convert a Python value to what parsing a file would give. A section becomes a dict of the keys that were
    given."""
    match value:
        case BaseModel():
            return value.model_dump(mode="python", exclude_unset=True)
        case Mapping():
            return {key: as_parsed(inner) for key, inner in value.items()}
        case Path():
            return str(value)
    return value


def _merged(old: Any, new: Any) -> Any:
    """Merge an overriding value with the old one. A table changes only the keys that it has, unless its `kind` differs;
    any other value replaces the old one."""
    if not isinstance(old, dict) or not isinstance(new, dict) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    instead = {_INSTEAD.get(key) for key in new}
    kept = {key: value for key, value in old.items() if key not in instead}
    return kept | {key: _merged(old.get(key), value) for key, value in new.items()}


def parsed_value(text: str) -> Any:
    """Parse a TOML value; a text that is no TOML is returned as it is, so ``rollout.beyond_bound=wait`` needs no
    quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
