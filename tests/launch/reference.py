"""Generates the page of all recipe keys: ``python -m tests.launch.reference > docs/reference/recipe.md``.

The page is made from the JSON schemas of the configuration classes, so it cannot differ from them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stretto.launch.recipe.recipe import Recipe
from stretto_app.extensions.commands.preferences import PreferenceRecipe

Schema = Mapping[str, Any]

_HEAD = """# Every key of a recipe

A recipe is one TOML file; `stretto train --dry-run RECIPE.toml` checks it, and every key can be set on the command line
as `section.key=value`. A key without a default must be given; `–`: left out by default; `″`: as above. Built models and
warm starts are kept for later runs in the folder `STRETTO_CACHE`, by default `~/.cache/stretto`. The code makes this
page (`python -m tests.launch.reference`).
"""
_PREFERENCES = """
# Recipes of `stretto dpo`

`seed` and `model` as above, and one section of their own.
"""
_COLUMNS = "\n| key | default | allowed | meaning |\n|---|---|---|---|\n"
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def recipe_table() -> str:
    """Return the whole page as Markdown."""
    return _HEAD + "".join(_pages(Recipe.model_json_schema())) + _PREFERENCES + "".join(_preferences())


def _preferences() -> Iterator[str]:
    schema = PreferenceRecipe.model_json_schema()
    own = {"preferences": schema["properties"]["preferences"]}
    yield from _section("", {"properties": own}, schema["$defs"])


def _pages(schema: Schema) -> Iterator[str]:
    yield from _said_once(_section("", schema, schema["$defs"]))


def _said_once(chapters: Iterable[str]) -> Iterator[str]:
    """Replace the text of a key by ``″`` if an earlier `kind` of the same section has this key with the same text."""
    said: set[tuple[str, str, str]] = set()
    for chapter in chapters:
        place, lines = chapter.partition("`, `kind = ")[0], []
        for line in chapter.splitlines(keepends=True):
            key, _, meaning = line.rpartition(" | ")
            known = (place, key.partition("` | ")[0], meaning)
            lines.append(f"{key} | ″ |\n" if known in said else line)
            if line.startswith("| `") and meaning != " |\n":
                said.add(known)
        yield "".join(lines)


def _section(place: str, schema: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the Markdown of one section, then of the sections in it. `place`: full name; "" for the recipe itself."""
    within: list[tuple[str, Schema]] = []
    listed: list[Schema] = []  # two lists may have the same tables
    rows: list[str] = []
    for key, value in schema["properties"].items():
        tables = [definitions[name] for name in _references(value)]
        inner = [table for table in tables if "properties" in table]
        tables = [definitions[name] for name in _references(value.get("items", {}))]
        items = [table for table in tables if "properties" in table and table not in listed]
        listed += items
        within += [(f"{place}.{key}".lstrip("."), table) for table in inner]
        within += [(f"[{place}.{key}]".lstrip("."), table) for table in items]
        if not inner or "description" in value:
            rows.append(_row(key, value, definitions, required=key in schema.get("required", ())))
    if rows:
        yield _heading(place, schema) + _about(schema) + _COLUMNS + "".join(rows)
    if place.startswith("["):  # item of a list: its sections are sources, shown at [[task.sources]]
        return
    for name, table in within:
        yield from _section(name, table, definitions)


def _heading(place: str, schema: Schema) -> str:
    if not place:
        return ""
    kind = schema["properties"].get("kind", {}).get("const")
    return f"\n## `[{place}]`" + (f', `kind = "{kind}"`' if kind else "") + "\n"


def _about(schema: Schema) -> str:
    first = schema.get("description", "").split("\n\n")[0].replace("\n", " ")
    return f"\n{first}\n" if first else ""


def _references(value: Schema) -> list[str]:
    return [choice["$ref"].rpartition("/")[2] for choice in _choices(value) if "$ref" in choice]


def _choices(value: Schema) -> list[Schema]:
    inner = value.get("anyOf") or value.get("oneOf") or ()
    return [found for choice in inner for found in _choices(choice)] if inner else [value]


def _row(key: str, value: Schema, definitions: Schema, *, required: bool) -> str:
    default = "" if required else f"`{_toml(value.get('default'))}`" if "default" in value else "section"
    cells = (f"`{key}`", default, _allowed(value, definitions), value.get("description", ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _toml(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return _toml(value["kind"]) if "kind" in value else "as below"
    return str(value)


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 else f"{value:,}"


def _allowed(value: Schema, definitions: Schema) -> str:
    return ", ".join(dict.fromkeys(text for choice in _choices(value) if (text := _one(choice, definitions))))


def _table(section: Schema) -> str:
    kind = section["properties"].get("kind", {}).get("const")
    return f"`{_toml(kind)}`" if kind else "`table`"


def _one(choice: Schema, definitions: Schema) -> str:
    if "$ref" in choice:
        target = definitions[choice["$ref"].rpartition("/")[2]]
        return _table(target) if "properties" in target else _one(target, definitions)
    if "enum" in choice or "const" in choice:
        return ", ".join(f"`{_toml(word)}`" for word in choice.get("enum", [choice.get("const")]))
    if own := choice.get("format"):
        return f"`{_toml(own)}`"
    kind = {"integer": "`integer`", "number": "`float`", "boolean": "`boolean`", "string": "`string`"}
    bounds = ", ".join(f"{sign} {_number(choice[name])}" for name, sign in _BOUNDS.items() if name in choice)
    match choice.get("type"):
        case "null":
            return ""
        case "array":
            return "list of " + _allowed(choice.get("items", {}), definitions)
        case str(name):
            return f"{kind.get(name, name)} {bounds}".strip()
    return bounds


if __name__ == "__main__":
    print(recipe_table(), end="")
