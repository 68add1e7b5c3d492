"""JSONL files of the user's: one JSON object a line. Every bad line is reported with its number, the first twenty of
them in full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stretto.core.errors import DataError, Problem

#: Characters of a line at most: the tests of a program have inputs of many megabytes.
LARGEST_ROW = 256 << 20
_SHOWN = 20

Read = TypeVar("Read")


def read_rows(path: Path, read: Callable[[str, int, str], Read]) -> list[Read]:
    """``read(line, line number, place)`` of each line that is not blank; `read` raises a `mistake` for a bad one.

    Raises:
        DataError: the file is missing, empty or not text, or some of its lines are not what they should be.
    """
    found: list[Read] = []
    problems: list[Problem] = []
    for number, line in enumerate(_lines(path), start=1):
        place = f"{path}:{number}"
        try:
            if len(line) > LARGEST_ROW:
                raise mistake(place, f"a row of {len(line):,} characters", f"at most {LARGEST_ROW:,} are allowed")
            if line.strip():
                found.append(read(line, number, place))
        except DataError as error:
            problems += error.problems
    if len(problems) > _SHOWN:
        problems = [*problems[:_SHOWN], Problem(str(path), f"{len(problems) - _SHOWN} more rows like these")]
    if not found and not problems:
        problems = [Problem(str(path), "no rows", "one JSON object a line is needed")]
    if problems:
        raise DataError(problems)
    return found


def mistake(place: str, found: str, remedy: str = "") -> DataError:
    """The error of one bad row."""
    return DataError([Problem(place, found, remedy)])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines, such as U+2028
    except FileNotFoundError:
        raise mistake(str(path), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise mistake(str(path), f"cannot be read: {error}", "a UTF-8 text file is needed") from None
