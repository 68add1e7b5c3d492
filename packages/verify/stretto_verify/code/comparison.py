"""Compare expected and actual outputs. This runs in the grader, so that the program never has the expected outputs in
its memory.

Text is compared line by line and word by word, numbers by value, without trailing spaces and trailing empty lines. The
formatting of the expected text counts: leading zeros, indentation, several spaces in a row. A line without letters or
digits is a drawing and compared exactly. The result of a call must have the expected type: a number is no text and True
is not 1.

An expected integer must be matched exactly. For an expected decimal, the tolerance is one part in a million, but at
most half a unit of its last decimal place (1e-6 for six places or more), and at least 1e-9.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

from stretto_verify.sandbox.values import TUPLE

_RELATIVE, _ABSOLUTE = Fraction(1, 10**6), Fraction(1, 10**9)
_PLACES = 6  # reliable decimal places of computed numbers
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)
_PADDED = re.compile(r"[+-]?0[0-9]", re.ASCII)
_SHOWN = re.compile(r"[^\W_]")
_LONGEST_NUMBER = 400


def same_text(expected: str, printed: str, *, alike: bool = False) -> bool:
    """Whether the standard output `printed` equals the `expected` one, word by word, numbers by value within the
    module's tolerance. Expected indentation counts, and in lines with words gaps of several spaces. `alike`: a decimal
    of the same value matches an expected integer (3.0 for 3).

    >>> same_text("1 2.50\\n", "1  2.5 \\n\\n"), same_text("12", "1 2"), same_text("100000000", "100000001")
    (True, False, False)
    """
    wanted, found = _lines(expected), _lines(printed)
    return wanted == found or (len(wanted) == len(found) and all(map(partial(_same_line, alike), wanted, found)))


def _lines(text: str) -> list[str]:
    """Lines without their common indentation, trailing spaces and trailing empty lines."""
    text = text.rstrip().replace("\r\n", "\n")
    lines = [line.rstrip() for line in text.split("\n")] if text else []
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return [line[margin:] for line in lines] if margin else lines


def _same_line(alike: bool, expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    wanted, found = expected.split(), printed.split()
    if len(wanted) != len(found) or not all(map(partial(_same_word, alike), wanted, found)):
        return False
    if _SHOWN.search(expected) is None:
        return False
    if len(expected) > len(expected.lstrip()) and _gaps(expected)[0] != _gaps(printed)[0]:
        return False
    if all(_NUMBER.fullmatch(word) for word in wanted):
        return True  # columns of numbers
    return all(
        len(gap) == 1 or gap == other for gap, other in zip(_gaps(expected)[1:], _gaps(printed)[1:], strict=True)
    )


def _gaps(line: str) -> list[str]:
    """White space in front of each word of a line."""
    return re.split(r"\S+", line)[:-1]


def _same_word(alike: bool, expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if max(len(expected), len(printed)) > _LONGEST_NUMBER or _PADDED.match(expected) is not None:
        return False
    if (wanted := _INTEGER.fullmatch(expected)) is not None:
        if alike and _NUMBER.fullmatch(printed) is not None:
            return Fraction(printed) == int(expected)
        found = _INTEGER.fullmatch(printed)
        return found is not None and (wanted[1] == "-", wanted[2]) == (found[1] == "-", found[2])
    if _NUMBER.fullmatch(expected) is None or _NUMBER.fullmatch(printed) is None:
        return False
    return _close(expected, Fraction(printed))


def same_value(expected: Any, found: Any, *, alike: bool = False) -> bool:
    """Whether the result of a call, in the form of `sandbox.values.plain`, equals the expected one.

    An expected list matches a tuple, since JSON has no tuples; not the other way round. For an expected float the
    module's tolerance applies. An expected int matches an equal float, a bool only a bool. `alike`: 1 equals True.
    """
    same = partial(same_value, alike=alike)
    match expected, found:
        case bool() | int(), bool() | int() if alike:
            return bool(expected == found)
        case (bool(), _) | (_, bool()):
            return expected is found
        case int(), int() | float():
            return bool(expected == found)
        case float(), int() | float():
            return _close_value(expected, found)
        case list(), {**pairs} if pairs.keys() == {TUPLE}:
            return same(expected, pairs[TUPLE])
        case list(), list():
            return len(expected) == len(found) and all(map(same, expected, found))
        case dict(), dict():
            return expected.keys() == found.keys() and all(same(expected[key], found[key]) for key in expected)
    return type(expected) is type(found) and bool(expected == found)


def near(expected: float, found: Any, within: float) -> bool:
    """Whether the result `found` of a call is a number that differs from the expected one by at most `within`.

    >>> near(1.41, 1.4142, 0.01), near(1.41, 1.43, 0.01), near(1.0, True, 0.01)
    (True, False, False)
    """
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    try:
        return abs(found - expected) <= within
    except OverflowError:  # an integer beyond any float
        return False


def _close_value(expected: float, found: float) -> bool:
    if not all(isinstance(number, int) or math.isfinite(number) for number in (expected, found)):
        return expected == found or (math.isnan(expected) and found != found)
    return _close(repr(expected), Fraction(found))


def _close(expected: str, found: Fraction) -> bool:
    """Whether a number equals the expected one, given as text, within 1e-6 of its size, but at most half a unit of its
    last decimal place (1e-6 for six places or more), and at least 1e-9."""
    wanted, shown = Fraction(expected), -int(Decimal(expected).as_tuple().exponent)
    last = Fraction(1, 2) / Fraction(10) ** shown if shown < _PLACES else Fraction(1, 10**_PLACES)
    return abs(found - wanted) <= max(min(_RELATIVE * abs(wanted), last), _ABSOLUTE)
