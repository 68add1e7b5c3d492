"""JSONL files that are to be scored: every bad line is found before the first completion is judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from stretto.core.errors import DataError, Problem

_SHOWN = 20
_LARGEST_LINE = 1 << 20

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class Line(Generic[Fields]):
    """One line: where it is, all that it says, and the fields that are asked for."""

    place: str
    row: dict[str, Any]
    fields: Fields


def read_lines(path: Path, fields: type[Fields], *, largest: int = _LARGEST_LINE) -> list[Line[Fields]]:
    """All lines of a JSONL file, blank ones left out; none may have more than `largest` characters.

    Raises:
        DataError: the file is missing, empty or not text, or lines are no object with the `fields`; each of the first
            twenty is named with its number.
    """
    lines: list[Line[Fields]] = []
    problems: list[Problem] = []
    for number, text in enumerate(_texts(path), start=1):
        if not text.strip():
            continue
        try:
            lines.append(_line(text, f"{path}:{number}", fields, largest))
        except DataError as error:
            problems.extend(error.problems)
    if len(problems) > _SHOWN:
        problems = [*problems[:_SHOWN], Problem(str(path), f"{len(problems) - _SHOWN} more lines like these")]
    if not lines and not problems:
        problems = [Problem(str(path), "no lines", "one JSON object a line is needed")]
    if problems:
        raise DataError(problems)
    return lines


def _texts(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines, such as U+2028
    except FileNotFoundError:
        raise DataError([Problem(str(path), "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError([Problem(str(path), f"cannot be read: {error}", "a UTF-8 text file is needed")]) from None


def _line(text: str, place: str, fields: type[Fields], largest: int) -> Line[Fields]:
    if len(text) > largest:
        raise _bad(place, f"a line of {len(text):,} characters", f"at most {largest:,} are allowed")
    try:
        row = msgspec.json.decode(text, type=dict[str, Any])
        return Line(place, row, msgspec.convert(row, fields))
    except msgspec.ValidationError as error:
        raise _bad(place, str(error), "needed: " + ", ".join(fields.__struct_fields__)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _bad(place, f"broken JSON ({error})", "one object a line is needed") from None


def _bad(place: str, found: str, remedy: str) -> DataError:
    return DataError([Problem(place, found, remedy)])
