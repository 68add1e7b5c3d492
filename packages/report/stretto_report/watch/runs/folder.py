"""Read small files of an untrusted run folder (damaged, half copied or malicious): recipe, logs, condition."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import UNREADABLE, StoreError
from stretto.store.ending import Condition, Ending, condition_of, cut
from stretto.store.run_folder import RunFolder
from stretto_report.watch.index.files import read_text, refuse_strange_files

_LARGEST_RECIPE, _LARGEST_LOG, _LARGEST_JSON = 1 << 20, 1 << 16, 1 << 20
_MOST_LOGS, _LOG_SHOWN = 64, 1 << 15  # most logs of roles, and bytes shown of each
_WRONG = re.compile(r"error|exception|killed|abort|fatal", re.IGNORECASE)
_LONGEST_LINE, _MOST_DOTS = 10_000, 300  # of a recipe: a name of N parts takes N² steps to be read


def condition(folder: Path, ending: Callable[[], Ending | None]) -> Condition:
    """Return the condition of a run: its state and the reason. For a dead run, the reason ends with the last error in
    the logs of its roles, if one of them ends with an error. `ending` returns the ending on record in the ledger; None:
    none is. Raises StoreError if the lock, the ledger or the log is no regular file."""
    refuse_strange_files(folder)
    how = condition_of(folder, ending, lambda: read_text(RunFolder(folder).log, _LARGEST_LOG, end=True) or "")
    return how if how.state != "dead" else Condition("dead", how.reason + _last_error(folder))


def logs_of(folder: Path) -> dict[str, str]:
    """Return the ends of the logs by name: the run's own as "run", then those of the roles, newest first. At most 64
    logs of roles are read; a log that cannot be read is left out."""
    run = RunFolder(folder)
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):  # no folder of logs
        for path in run.logs.glob("*.txt"):
            with contextlib.suppress(OSError):  # removed meanwhile
                found.append((path.lstat().st_mtime, path))
    newest = [path for _, path in sorted(found, reverse=True)[:_MOST_LOGS]]
    logs: dict[str, str] = {}
    for name, path in (("run", run.log), *((path.stem, path) for path in newest)):
        with contextlib.suppress(StoreError):  # a link, or a pipe
            logs[name] = (read_text(path, _LOG_SHOWN, end=True) or "").strip()
    return logs


def _last_error(folder: Path) -> str:
    for name, text in logs_of(folder).items():
        last = text.rpartition("\n")[2]
        if name != "run" and _WRONG.search(last):
            return f"; {name} said last: {cut(last)}"
    return ""


def recipe_text(folder: Path) -> str | None:
    """Return the text of the recipe, at most its first MiB; None if there is none. Raises StoreError if the recipe is
    no regular file, or cannot be opened."""
    return read_text(RunFolder(folder).recipe, _LARGEST_RECIPE)


def recipe_of(folder: Path) -> dict[str, Any]:
    """Return the recipe as tables; empty if there is none. Raises StoreError if the recipe cannot be read, is no TOML,
    or has an absurdly long line."""
    text = recipe_text(folder) or ""
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > _LONGEST_LINE or line.count(".") > _MOST_DOTS:
            allowed = f"at most {_LONGEST_LINE:,} characters and {_MOST_DOTS} dots are allowed in a line"
            raise StoreError(f"recipe.toml: cannot be read: line {number} is too long: {allowed}")
    try:
        found = tomllib.loads(text)
        msgspec.json.encode(found)  # a reply holds it: a hexadecimal integer may have too many decimal digits
    except (ValueError, OverflowError, RecursionError) as error:  # TOML's own error is a ValueError
        raise StoreError(f"recipe.toml: cannot be read: {error}") from error
    return found


def recipe_stamp(folder: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the recipe is rewritten; None if there is no recipe."""
    try:
        found = RunFolder(folder).recipe.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_ctime_ns


def json_of(path: Path) -> Any:
    """Read a JSON file, and return what it holds; None if it is missing, unreadable or larger than one MiB."""
    try:
        text = read_text(path, _LARGEST_JSON)
        return None if text is None else msgspec.json.decode(text)
    except (StoreError, *UNREADABLE):
        return None
