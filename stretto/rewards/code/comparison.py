"""Is it what was expected? Compared by the grader, in whose memory alone the expected outputs are.

Text is compared line by line without the spaces at the ends of lines and the empty lines at the end. Where a line
differs, it still counts when its words do not, numbers taken by value. Values of calls must be of the same kind: a
number is no text and True is not 1.

A number that is expected as an integer must be that integer. One that is expected with a fraction may differ by one
part in a million, or by 1e-9.
"""

from __future__ import annotations

import math
import re
from typing import Any

from stretto.sandbox.values import TUPLE

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)
_LONGEST_NUMBER = 400


def same_text(expected: str, printed: str) -> bool:
    """Is the standard output the expected one?

    >>> same_text("1 2.50\\n", "1  2.5 \\n\\n"), same_text("12", "1 2"), same_text("100000000", "100000001")
    (True, False, False)
    """
    wanted, found = _lines(expected), _lines(printed)
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    wanted, found = expected.split(), printed.split()
    return len(wanted) == len(found) and all(map(_same_word, wanted, found))


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if max(len(expected), len(printed)) > _LONGEST_NUMBER:
        return False
    if (wanted := _INTEGER.fullmatch(expected)) is not None:
        found = _INTEGER.fullmatch(printed)
        return found is not None and (wanted[1] == "-", wanted[2]) == (found[1] == "-", found[2])
    if _NUMBER.fullmatch(expected) is None or _NUMBER.fullmatch(printed) is None:
        return False
    return _close(float(expected), float(printed))


def same_value(expected: Any, found: Any) -> bool:
    """Is the result of a call, in the form of `sandbox.values.plain`, the expected one?

    A list may be expected where a tuple is found, since JSON has no tuples; not the other way round.
    """
    match expected, found:
        case (bool(), _) | (_, bool()):
            return expected is found
        case int(), int():
            return bool(expected == found)
        case int(), float():
            return bool(expected == found)
        case float(), int() | float():
            return _close(expected, found)
        case list(), {**pairs} if pairs.keys() == {TUPLE}:
            return same_value(expected, pairs[TUPLE])
        case list(), list():
            return len(expected) == len(found) and all(map(same_value, expected, found))
        case dict(), dict():
            return expected.keys() == found.keys() and all(same_value(expected[key], found[key]) for key in expected)
    return type(expected) is type(found) and bool(expected == found)


def near(expected: float, found: Any, within: float) -> bool:
    """Is the result of a call a number that is no further than `within` from the expected one?

    >>> near(1.41, 1.4142, 0.01), near(1.41, 1.43, 0.01), near(1.0, True, 0.01)
    (True, False, False)
    """
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    try:
        return abs(found - expected) <= within
    except OverflowError:  # an integer beyond any float
        return False


def _close(expected: float, found: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    try:
        return math.isclose(expected, found, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer beyond any float
        return False
