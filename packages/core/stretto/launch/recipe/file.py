"""Reading and parsing the TOML file of a recipe. It imports little, so that a command can report mistakes early."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RecipeError, folder_fault, nearest

_LARGEST_RECIPE = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises RecipeError if the file does not exist, is a folder, is empty or larger than 1 MiB, is
    not UTF-8, or cannot be read or parsed."""
    place = str(path)
    if not (fault := folder_fault(path)):
        is_run = (path / "ledger.sqlite").is_file()
        more = f"; `stretto train --resume {place}` continues this run" if is_run else ""
        raise RecipeError([Problem(place, "is a folder", f"a recipe is a TOML file{more}")])
    if fault == "no such folder":
        near = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        shipped = shipped_recipes() / f"{path.name.removesuffix('.toml')}.toml"
        remedy = (
            f"stretto was installed with {shipped}" if shipped.is_file() else nearest(path.name, near) if near else ""
        )
        found = "is a link to nothing" if path.is_symlink() else "no such file"
        raise RecipeError([Problem(place, found, "" if path.is_symlink() else remedy)])
    try:
        if not path.is_file():  # it is read more than once
            raise RecipeError([Problem(place, "is a device, a pipe or a socket", "a recipe is a TOML file")])
        if path.stat().st_size > _LARGEST_RECIPE:
            raise RecipeError([Problem(place, f"{path.stat().st_size:,} bytes", "a recipe has less than 1 MiB")])
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem(place, f"cannot be read: {error}", "a UTF-8 text file is needed")]) from None
    if not text.strip():
        raise RecipeError([Problem(place, "is empty", f"{_example()} is a whole one")])
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, or a number of thousands of digits
        raise RecipeError([Problem(place, f"broken TOML: {error}")]) from None


def shipped_recipes() -> Path:
    """Return the folder with the recipes that are installed with stretto; a source checkout has no such folder."""
    return Path(sys.prefix) / "share" / "stretto" / "recipes"


def _example() -> str:
    """Return the path of a whole recipe to point to: the installed one, or its name in the sources."""
    shipped = shipped_recipes() / "arithmetic.toml"
    return str(shipped) if shipped.is_file() else "recipes/arithmetic.toml of the sources"
