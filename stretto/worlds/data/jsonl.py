"""Rows of a JSONL file: one object a line, with texts and prompts in its fields.

Every mistake of a file is reported with its line, the first twenty of them in full.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import DataError, Problem, nearest

_SHOWN = 20
_LARGEST_ROW = 1 << 20
_ROLES = ("system", "user", "assistant")

Read = TypeVar("Read")


class Mistake(Exception):
    """A bad row; its problem is reported with those of the other rows."""

    def __init__(self, place: str, found: str, remedy: str = "") -> None:
        self.problem = Problem(place, found, remedy)
        super().__init__(self.problem)


def read_rows(path: Path, read: Callable[[dict[str, Any], int, str], Read]) -> list[Read]:
    """``read(object, line number, place)`` of each line that is not empty; `read` raises `Mistake` for a bad one.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are not what they should be.
    """
    found: list[Read] = []
    problems: list[Problem] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            found.append(read(_object(line, place), number, place))
        except Mistake as mistake:
            problems.append(mistake.problem)
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems = [*problems[:_SHOWN], Problem(str(path), f"{more} more rows like these")]
    if not found and not problems:
        problems = [Problem(str(path), "no rows", "one JSON object a line is needed")]
    if problems:
        raise DataError(problems)
    return found


def require(row: dict[str, Any], names: tuple[str, ...], place: str) -> None:
    """Raises `Mistake` unless the row has all of these fields."""
    for name in names:
        if name not in row:
            raise Mistake(place, f"no field {name!r}", nearest(name, row) if row else "the object is empty")


def text(value: object, place: str) -> str:
    """A text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise Mistake(place, shown(value), "a text is needed")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Mistake(place, shown(value), "holds a NUL or half of a surrogate pair, which no text has")
    return value


def prompt(value: object, place: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """The text of a prompt, and its messages where it is a chat."""
    if not isinstance(value, list):
        return text(value, place), ()
    if not value:
        raise Mistake(place, "an empty list of messages", "at least one message is needed")
    for position, message in enumerate(value):
        here = f"{place}[{position}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise Mistake(here, shown(message), 'a message is {"role": ..., "content": ...}')
        if message["role"] not in _ROLES:
            raise Mistake(f"{here}.role", shown(message["role"]), nearest(str(message["role"]), _ROLES))
        text(message["content"], f"{here}.content")
    return "\n".join(message["content"] for message in value), tuple(value)


def shown(value: object) -> str:
    """A value, quoted for a message."""
    quoted = json.dumps(value, ensure_ascii=True, default=repr)
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise DataError([Problem(str(path), "no such file", "its path is relative to the recipe's folder")])
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise DataError([Problem(str(path), f"cannot be read: {error}", "a UTF-8 text file is needed")]) from None


def _object(line: str, place: str) -> dict[str, Any]:
    if len(line) > _LARGEST_ROW:
        raise Mistake(place, f"a row of {len(line):,} characters", f"at most {_LARGEST_ROW:,} are allowed")
    try:
        row = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, or a number of thousands of digits
        raise Mistake(place, f"broken JSON ({error})", "one object a line is needed") from None
    if not isinstance(row, dict):
        raise Mistake(place, f"{shown(row)} in place of an object", "one object a line is needed")
    return row


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
