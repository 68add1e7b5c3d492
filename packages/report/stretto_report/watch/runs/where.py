"""Filter language of the table of trajectories.

where   = clause { "and" clause }
clause  = field operator value { "|" value }          state=trained|buffered and reward>=0.5 and text~"7+"
value   = number | word | "quoted" | null             `|` with = and != only; `~` contains, for words only
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from stretto.core.errors import RefusedRequest, nearest
from stretto.core.records import Record

#: Fields with numbers, and fields with words; `text` is the prompt's.
NUMBERS = ("reward", "length", "staleness", "oldest", "newest", "admitted", "step", "interrupted", "member")
WORDS = ("state", "verdict", "stop", "reason", "group", "prompt", "text")
SORTED = ("id", *NUMBERS, "state", "verdict")

_LONGEST, _MOST_CLAUSES, _MOST_VALUES = 2_000, 32, 64
_PLACE = "where"
_FIELD = re.compile(r"\s*([a-z_]+)\s*(!=|<=|>=|=|<|>|~)\s*")
_VALUE = re.compile(r'"((?:[^"\\]|\\["\\])*)"|([^\s"|]+)')
_AND = re.compile(r"\s+and\s+", re.IGNORECASE)
_OR = re.compile(r"\s*\|\s*")


class Clause(Record, frozen=True):
    """One comparison of a filter, such as ``state=trained|buffered``. With several `values`, ``=`` means equal to one
    of them, ``!=`` equal to none. None stands for a missing value. Values of a field in `NUMBERS` are numbers."""

    field: str
    operator: str
    values: tuple[float | str | None, ...]


def parse_where(text: str) -> tuple[Clause, ...]:
    """Parse a filter. A row passes if it passes every clause.

    Raises:
        RefusedRequest: the text is no filter; the message shows where.
    """
    if len(text) > _LONGEST:
        raise RefusedRequest(_PLACE, f"{len(text):,} characters", f"at most {_LONGEST:,} are allowed")
    if not text.strip():
        return ()
    clauses = tuple(_clauses(text))
    if len(clauses) > _MOST_CLAUSES:
        raise RefusedRequest(_PLACE, f"{len(clauses)} comparisons", f"at most {_MOST_CLAUSES} are allowed")
    return clauses


def _clauses(text: str) -> Iterator[Clause]:
    at = 0
    while True:
        head = _FIELD.match(text, at)
        if head is None:
            raise RefusedRequest(
                _PLACE, f"{_shown(text, at)} is no comparison", "such as: state=trained and reward>=0.5"
            )
        field, operator = head.groups()
        values, at = _values(text, head.end())
        yield _clause(field, operator, values)
        if not text[at:].strip():
            return
        behind = _AND.match(text, at)
        if behind is None:
            raise RefusedRequest(_PLACE, f"{_shown(text, at)} follows {field}", "comparisons are joined by: and")
        at = behind.end()


def _values(text: str, at: int) -> tuple[list[str | None], int]:
    values: list[str | None] = []
    while True:
        found = _VALUE.match(text, at)
        if found is None:
            raise RefusedRequest(_PLACE, f"{_shown(text, at)} is no value", 'a number, a word, "a text" or null')
        quoted, bare = found.groups()
        values.append(re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else None if bare == "null" else bare)
        at = found.end()
        more = _OR.match(text, at)
        if more is None:
            return values, at
        if len(values) == _MOST_VALUES:
            raise RefusedRequest(_PLACE, f"more than {_MOST_VALUES} values", "fewer")
        at = more.end()


def _clause(field: str, operator: str, values: list[str | None]) -> Clause:
    if field not in (*NUMBERS, *WORDS):
        raise RefusedRequest(_PLACE, f"unknown field {field!r}", nearest(field, (*NUMBERS, *WORDS)))
    if len(values) > 1 and operator not in ("=", "!="):
        raise RefusedRequest(_PLACE, f"{field}{operator} with {len(values)} values", "only = and != take several")
    if field in NUMBERS:
        if operator == "~":
            raise RefusedRequest(_PLACE, f"{field}~ is not possible", f"{field} is a number: = != < <= > >=")
        return Clause(field, operator, tuple(None if value is None else _number(field, value) for value in values))
    allowed = ("~",) if field == "text" else ("=", "!=") if field == "group" else ("=", "!=", "~")
    if operator not in allowed:
        raise RefusedRequest(_PLACE, f"{field}{operator} is not possible", f"{field} takes {' '.join(allowed)}")
    if operator == "~" and values[0] is None:
        raise RefusedRequest(_PLACE, f"{field}~null is not possible", "a text")
    return Clause(field, operator, tuple(values))


def _number(field: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise RefusedRequest(_PLACE, f"{field} is compared with {value[:40]!r}", "a number or null")
    return number


def parse_sort(text: str) -> tuple[str, bool]:
    """Parse a sort order: the field, and whether it is descending.

    Raises:
        RefusedRequest: there is no such field.
    """
    name = text.removeprefix("-")
    if name not in SORTED:
        raise RefusedRequest("sort", f"unknown field {name[:40]!r}", nearest(name, SORTED))
    return name, text.startswith("-")


def _shown(text: str, at: int) -> str:
    return repr(text[at : at + 40])
