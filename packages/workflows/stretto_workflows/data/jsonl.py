"""Rows of a JSONL file: texts and prompts in the fields of objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import Mistakes, nearest
from stretto_workflows.data import lines
from stretto_workflows.data.lines import mistake, once

_LARGEST_TEXT = 1 << 20
_ROLES = ("system", "user", "assistant")

Read = TypeVar("Read")


def read_rows(path: Path, read: Callable[[dict[str, Any], int, str], Read]) -> list[Read]:
    """Call ``read(object, line number, place)`` for each line that is not blank; returns the results. `place` is
    "FILE:LINE", for errors. `read` raises a `mistake` (a DataError) for a bad row.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are invalid.
    """
    return lines.read_rows(path, lambda line, number, place: read(object_of(line, place), number, place))


def require(row: Mapping[str, Any], names: tuple[str, ...], place: str) -> None:
    """Check that the row has all fields `names`; raises one `mistake` that names those missing."""
    if names and not row:
        raise mistake(place, f"no field {names[0]!r}", "the object is empty")
    if lacking := [name for name in names if name not in row]:
        found = " and ".join(f"no field {name!r}" for name in lacking)
        raise mistake(place, found, " ".join(dict.fromkeys(nearest(name, row) for name in lacking)))


def unseen(row: Mapping[str, Any], name: str, place: str, seen: dict[str, str]) -> str:
    """Return the row's id, which is in its field `name`, and add it to `seen` (places of rows by id).

    Raises:
        DataError: the id is neither text nor a whole number, or another row has it.
    """
    require(row, (name,), place)
    value = row[name]
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise mistake(f"{place}: {name}", shown(value), "a text or a whole number is needed")
    if (first := seen.setdefault(str(value), place)) != place:
        raise mistake(f"{place}: {name}", f"{shown(value)} is also that of {first}", "each row needs a name of its own")
    return str(value)


def text(value: object, place: str, largest: int = _LARGEST_TEXT) -> str:
    """Return `value` if it is a valid text, not blank, of at most `largest` characters; otherwise raise a `mistake` at
    `place`, such as "rows.jsonl:7"."""
    if not isinstance(value, str) or not value.strip():
        raise mistake(place, shown(value), "a text is needed")
    if len(value) > largest:
        raise mistake(place, f"a text of {len(value):,} characters", f"at most {largest:,} are allowed")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise mistake(place, shown(value), "holds a NUL or half of a surrogate pair, which no text has")
    return value


def prompt(value: object, place: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """Check a prompt, a text or a list of chat messages; returns its text, and its messages if it is a chat. The text
    of a chat is the contents of its messages, joined by newlines. Raises a `mistake` for an invalid prompt."""
    if not isinstance(value, list):
        return text(value, place), ()
    if not value:
        raise mistake(place, "an empty list of messages", "at least one message is needed")
    mistakes = Mistakes()
    for position, message in enumerate(value):
        with mistakes:
            _check_message(message, f"{place}[{position}]")
    mistakes.done()
    return "\n".join(message["content"] for message in value), tuple(value)


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise mistake(place, shown(message), 'a message is {"role": ..., "content": ...}')
    if message["role"] not in _ROLES:
        raise mistake(f"{place}.role", shown(message["role"]), nearest(str(message["role"]), _ROLES))
    text(message["content"], f"{place}.content")


def shown(value: object) -> str:
    """Quote a value as JSON for an error message, cut to 60 characters."""
    quoted = json.dumps(value, ensure_ascii=True, default=repr)
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def object_of(line: str, place: str) -> dict[str, Any]:
    """Parse one line as a JSON object.

    Raises:
        DataError: the line is not valid JSON, not an object, has a key twice, or a number of thousands of digits.
    """
    try:
        row = json.loads(line, parse_constant=_no_number, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, a key twice, or a number of thousands of digits
        raise mistake(place, f"broken JSON ({error})", "one object a line is needed") from None
    if not isinstance(row, dict):
        raise mistake(place, f"{shown(row)} in place of an object", "one object a line is needed")
    return row


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
