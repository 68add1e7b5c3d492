"""Readers of users' JSONL files: one JSON object per line, with texts and prompts in its fields. Invalid lines are
reported by number, with at most twenty different mistakes. Up to three lines with the same mistake are listed; of more,
the first one and their number."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import DataError, Mistakes, Problem, nearest, several
from stretto.launch.preflight.paths import nearest_file

#: Most characters of a line; tests of programs may have inputs of many megabytes.
LARGEST_ROW = 256 << 20
LARGEST_UNPACKED = 4 << 30  #: bytes of a compressed file after unpacking
_LARGEST_TEXT = 1 << 20
_ROLES = ("system", "user", "assistant")
_SHOWN = 20  # different mistakes in one error
_SAME = 3  # rows listed with the same mistake
_GZIP = b"\x1f\x8b"
_OTHERS = {
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "zstd",
}

Given = TypeVar("Given")
Read = TypeVar("Read")


def read_lines(path: Path, read: Callable[[str, int, str], Read]) -> list[Read]:
    """Call ``read(line, line number, place)`` for each non-blank line of a file; returns the results, in order. `place`
    is "path:number". `read` raises a DataError (`mistake`) for an invalid line; the other lines are read nevertheless,
    and the mistakes of all lines are raised together. Files named ``.gz`` are unpacked.

    Raises:
        DataError: the file is missing, has no line, or is not text, or lines are invalid.
    """
    numbered = ((place, (number, line)) for number, place, line in lines_of(path))
    return read_each(str(path), numbered, lambda row, place: read(_short(row[1], place), row[0], place))


def lines_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """Iterate over the non-blank lines of a file, as ``(number, place, line)``; `place` is "path:number".

    Raises (at the call, not during the iteration):
        DataError: the file is missing or not text, or holds one JSON array.
    """
    text = read_text(path)
    if text.lstrip()[:1] == "[" and text.rstrip()[-1:] == "]":
        raise mistake(str(path), "a JSON array instead of one object per line", f"e.g. by: jq -c '.[]' {path.name}")
    lines = text.split("\n")  # a text may hold other ends of lines, such as U+2028
    return ((n, f"{path}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip())


def read_each(name: str, rows: Iterable[tuple[str, Given]], read: Callable[[Given, str], Read]) -> list[Read]:
    """Call ``read(row, place)`` for each ``(place, row)`` of `rows`; returns the results, in order. Mistakes of all
    rows are raised together, equal ones and many kinds shortened to a count. A DataError of the iterator `rows` itself
    ends the reading and is raised with them. `name`: of the file, for the error about all of it.

    Raises:
        DataError: rows are invalid, or there are none.
    """
    found: list[Read] = []
    mistakes, alike, hidden = Mistakes(), dict[tuple[str, str, str], list[Problem]](), 0
    with mistakes:
        for place, row in rows:
            one = Mistakes()
            with one:
                found.append(read(row, place))
            kinds = {(at.place.removeprefix(place), at.found, at.remedy): at for at in one.problems}
            new = kinds.keys() - alike.keys()
            hidden += bool(new) and len(alike) >= _SHOWN
            for kind, problem in kinds.items():
                if kind in alike or len(alike) < _SHOWN:
                    alike.setdefault(kind, []).append(problem)
    mistakes.problems[:0] = _told(list(alike.values()))
    if hidden:
        mistakes.problems.append(Problem(name, f"{several(hidden, 'more row')} like these"))
    if not found and not mistakes.problems:
        mistakes.problems.append(Problem(name, "no rows", "at least one is needed"))
    mistakes.done()
    return found


def _told(alike: Sequence[Sequence[Problem]]) -> Iterator[Problem]:
    """Yield the problems to show, from lists of equal problems: up to three equal problems are all shown; of more, the
    first with their number."""
    for same in alike:
        first, count = same[0], len(same)
        if count <= _SAME:
            yield from same
        else:
            remedy = "; ".join(filter(None, (first.remedy, f"and {several(count - 1, 'more row')}")))
            yield Problem(first.place, first.found, remedy)


def mistake(place: str, found: str, remedy: str = "") -> DataError:
    """Make the error to raise for one mistake: what was `found` at `place`, such as "rows.jsonl:7"; `remedy`: what is
    allowed, or what to do."""
    return DataError([Problem(place, found, remedy)])


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the pairs of a JSON object: ``json.loads(text, object_pairs_hook=once)``.

    Raises:
        ValueError: a key appears twice, so one of its values would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. One compressed by gzip is unpacked; its name must end with ``.gz``.

    Raises:
        DataError: the file is missing, cannot be unpacked, or is not text.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise mistake(str(path), "no such file", nearest_file(path)) from None
    except OSError as error:
        raise mistake(str(path), f"cannot be read: {error}", "a UTF-8 text file is needed") from None
    if content.startswith(_GZIP):
        content = _unpacked(path)
    kinds = [kind for start, kind in _OTHERS.items() if content.startswith(start)]
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]  # of what follows a mark at the beginning
        place = str(path) if kinds else f"{path}:{error.object.count(10, 0, error.start) + 1}"
        which = f"it is {kinds[0]}" if kinds else f"the byte 0x{wrong:02x} is no UTF-8"
        raise mistake(place, f"cannot be read: {which}", "a UTF-8 text file is needed") from None


def _unpacked(path: Path) -> bytes:
    if path.suffix != ".gz":
        found = "cannot be read: it is compressed by gzip, and its name does not end with .gz"
        raise mistake(str(path), found, "rename it, or unpack it: a UTF-8 text file is needed")
    try:
        with gzip.open(path) as packed:
            unpacked = packed.read(LARGEST_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise mistake(str(path), f"cannot be unpacked: {error}", "a whole gzip file is needed") from None
    if len(unpacked) > LARGEST_UNPACKED:
        raise mistake(str(path), f"more than {LARGEST_UNPACKED:,} bytes after unpacking", "unpack it, and give a part")
    return unpacked


def _short(line: str, place: str) -> str:
    if len(line) > LARGEST_ROW:
        raise mistake(place, f"a row of {len(line):,} characters", f"at most {LARGEST_ROW:,} are allowed")
    return line


def read_rows(path: Path, read: Callable[[dict[str, Any], int, str], Read]) -> list[Read]:
    """Parse each non-blank line of a file as a JSON object, and call ``read(object, line number, place)`` with it;
    returns the results, in order. `place` is "path:number". The mistakes of all lines are raised together.

    Raises:
        DataError: the file is missing, has no line, or is not text, or some of its rows are invalid.
    """
    return read_lines(path, lambda line, number, place: read(object_of(line, place), number, place))


def require(row: Mapping[str, Any], names: tuple[str, ...], place: str, write: str = "") -> None:
    """Check that the row has all fields `names`; raises one DataError at `place` that names those missing (of an empty
    row the first alone), each with the row's most similar field, or all of its fields.
    `write`: what the recipe may say instead."""
    if names and not row:
        raise mistake(place, f"no field {names[0]!r}", "the object is empty")
    if lacking := [name for name in names if name not in row]:
        found = " and ".join(f"no field {name!r}" for name in lacking)
        like = " ".join(dict.fromkeys(nearest(name, row, "the row has") for name in lacking))
        raise mistake(place, found, f"write {write}; {like}" if write else like)


def note_id(row: Mapping[str, Any], name: str, place: str, seen: dict[str, str]) -> None:
    """Add the row's id, which is in its field `name`, to `seen` (places of rows by id).

    Raises:
        DataError: the id is neither text nor a whole number, or another row has it.
    """
    require(row, (name,), place)
    value = row[name]
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise mistake(f"{place}: {name}", shown(value), "a text or a whole number is needed")
    if (first := seen.setdefault(str(value), place)) != place:
        raise mistake(f"{place}: {name}", f"{shown(value)} is also that of {first}", "each row needs a name of its own")


def text(value: object, place: str, largest: int = _LARGEST_TEXT) -> str:
    """Return `value` if it is a valid text, not blank, of at most `largest` characters; otherwise raise a DataError at
    `place`, such as "rows.jsonl:7"."""
    if not isinstance(value, str) or not value.strip():
        raise mistake(place, shown(value), "a text is needed")
    if len(value) > largest:
        raise mistake(place, f"a text of {len(value):,} characters", f"at most {largest:,} are allowed")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise mistake(place, shown(value), "holds a NUL or half of a surrogate pair, which no text has")
    return value


def prompt(value: object, place: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """Check a prompt, a text or a list of chat messages; returns its text, and its messages, () if it is no chat. The
    text of a chat is the contents of its messages, joined by newlines. Raises a DataError at `place` for an invalid
    prompt."""
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
    """Parse one line as a JSON object. `place`: for errors.

    Raises:
        DataError: the line is not valid JSON, not an object, has a key twice, NaN or Infinity, or a number of thousands
            of digits.
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
