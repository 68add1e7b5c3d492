"""Reader of JSONL files for `stretto score`: checks all lines before the first completion is judged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from stretto.core.errors import UNREADABLE
from stretto.core.jsonl import mistake, once, read_rows

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class Line(Generic[Fields]):
    """One line: its place for messages ("FILE:LINE"), its whole object, and the required fields."""

    place: str
    row: dict[str, Any]
    fields: Fields


def read_lines(path: Path, fields: type[Fields]) -> list[Line[Fields]]:
    """Read all lines of a JSONL file that are not blank.

    Raises:
        DataError: the file is missing, empty or not text, or lines are not objects with the `fields`; names the first
            twenty.
    """
    return read_rows(path, lambda text, _, place: _line(text, place, fields))


def _line(text: str, place: str, fields: type[Fields]) -> Line[Fields]:
    try:
        row = msgspec.json.decode(text, type=dict[str, Any])
        json.loads(text, object_pairs_hook=once)
        return Line(place, row, msgspec.convert(row, fields))
    except msgspec.ValidationError as error:
        needed = getattr(fields, "NEEDED", ", ".join(fields.__struct_fields__))
        raise mistake(place, str(error), f"needed: {needed}") from None
    except (ValueError, *UNREADABLE) as error:
        raise mistake(place, f"broken JSON ({error})", "one object a line is needed") from None
