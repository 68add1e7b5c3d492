"""JSONL files that are to be scored: every bad line is found before the first completion is judged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from stretto.core.jsonl import mistake, once, read_rows

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class Line(Generic[Fields]):
    """One line: where it is, all that it says, and the fields that are asked for."""

    place: str
    row: dict[str, Any]
    fields: Fields


def read_lines(path: Path, fields: type[Fields]) -> list[Line[Fields]]:
    """All lines of a JSONL file, blank ones left out.

    Raises:
        DataError: the file is missing, empty or not text, or lines are no object with the `fields`; each of the first
            twenty is named with its number.
    """
    return read_rows(path, lambda text, _, place: _line(text, place, fields))


def _line(text: str, place: str, fields: type[Fields]) -> Line[Fields]:
    try:
        row = msgspec.json.decode(text, type=dict[str, Any])
        json.loads(text, object_pairs_hook=once)
        return Line(place, row, msgspec.convert(row, fields))
    except msgspec.ValidationError as error:
        raise mistake(place, str(error), "needed: " + ", ".join(fields.__struct_fields__)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise mistake(place, f"broken JSON ({error})", "one object a line is needed") from None
