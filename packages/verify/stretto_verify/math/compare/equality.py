"""Numeric equality of expressions at sampled points.

Two numbers are equal when they agree to fifty digits more than the largest and the smallest number in either expression
have, so that no written number is too small to count. Two expressions with variables are equal when they agree at every
sampled point at which both are real. The points have both signs and lie on and between integers, so that ``|x|`` and
``sqrt(x^2)`` differ from ``x``, while ``sqrt(1/n)`` equals ``1/sqrt(n)``. They are derived from both expressions:
verdicts are reproducible, and an answer cannot be fitted to known points.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from random import Random
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

from stretto_verify.math.compare.values import Infinite, Point, Unsupported, Value, approximate, value
from stretto_verify.verdicts import Undecided

_DIGITS = 60
_SPARE = 10  # digits that rounding may cost
_MOST_DIGITS = 20_000
_AGREE = mpmath.mpf(10) ** (_SPARE - _DIGITS)
_NEEDED = 3  # least number of points at which both expressions have a value
_STEPS = 1 << 13  # even: a negative base has no real value at such an exponent
_ODD = 1 << 32  # bound of the odd factors of denominators: no periodic answer can exploit it
_BENT, _WHOLE = re.compile("Abs|Max|Min|floor|ceiling|sign"), re.compile("[0-9]{1,9}")
_SPANS: tuple[tuple[int, int], ...] = ((1, 3), (-3, -1), (0, 1), (-1, 0), (5, 9))
_INTEGERS = ((2, 3), (5, 2), (4, 7), (3, 11))


def same_value(one: sympy.Basic, other: sympy.Basic, renamed: Mapping[str, str] | None = None) -> bool | None:
    """Compare two expressions; without symbols, as two numbers. True: equal at every sampled point, at least three;
    False: different at one; None: undetermined, since too few points have values, or the numbers cannot be computed.

    `renamed` maps symbols of `other` to symbols of `one`.

    Raises:
        Undecided: the numbers are too large.
    """
    one, other = named(one), named(other)
    if renamed:
        other = other.xreplace({sympy.Symbol(old): sympy.Symbol(new) for old, new in renamed.items()})
    symbols = sorted({str(symbol) for side in (one, other) for symbol in side.free_symbols} - {"i"})
    try:
        if symbols:
            return _same_function(one, other, symbols)
        return _is_infinite(one) == _is_infinite(other) and _agree(one, other, Point())
    except Unsupported:
        return None


def named(expression: sympy.Basic) -> sympy.Basic:
    """The expression with each application ``f(x)`` of an unknown function replaced by a symbol of that name."""
    calls = expression.atoms(AppliedUndef) if hasattr(expression, "atoms") else ()
    return expression.xreplace({call: sympy.Symbol(str(call)) for call in calls}) if calls else expression


def _agree(one: sympy.Basic, other: sympy.Basic, point: Point) -> bool:
    """Whether the values of two expressions at a point are equal, up to rounding. If they are close, they are
    recomputed with as many digits as their parts need.

    Raises:
        ZeroDivisionError: an expression divides by 0 there.
        Unsupported: an expression has no finite value there, or its evaluation is not supported.
        Undecided: the numbers are too large, or too small.
    """
    with mpmath.workdps(_DIGITS):
        first, second = value(one, point), value(other, point)
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        if abs(approximate(first) - approximate(second)) > max(abs(approximate(first)), _AGREE) / 1000:
            return False
        extent = max(_extent(one, point), _extent(other, point))
    if extent > _MOST_DIGITS:
        raise Undecided("numbers that are too large, or too small, to compare")
    with mpmath.workdps(_DIGITS + 2 * extent):
        first, second = approximate(value(one, point)), approximate(value(other, point))
        return bool(abs(first - second) <= mpmath.mpf(10) ** (_SPARE - _DIGITS - extent) * max(1, abs(first)))


def _extent(expression: sympy.Basic, point: Point) -> int:
    """Largest number of digits, before or after the decimal point, in the value of any part of the expression. Parts
    without a value do not count."""
    bits = 1
    for part in sympy.preorder_traversal(expression):
        try:
            found = value(part, point)
        except (Unsupported, ZeroDivisionError):
            continue
        if isinstance(found, Fraction):
            bits = max(bits, found.numerator.bit_length(), found.denominator.bit_length())
        elif found:
            bits = max(bits, abs(int(mpmath.mag(found))))
    return math.ceil(bits * math.log10(2))


def _is_infinite(expression: sympy.Basic) -> bool:
    try:
        value(expression, Point())
    except Infinite:
        return True
    return False


def within(expression: sympy.Basic, centre: Fraction, distance: Fraction) -> bool:
    """Whether the value of an expression without symbols is at most `distance` from `centre`; False without a value.
    Undecided is raised if its magnitude exceeds the limits."""
    with mpmath.workdps(_DIGITS):
        try:
            found = value(expression, Point())
        except Unsupported:
            return False
        return bool(abs(approximate(found) - approximate(centre)) <= approximate(distance))


def _same_function(one: sympy.Basic, other: sympy.Basic, symbols: list[str]) -> bool | None:
    agreed = 0
    is_complex = any(map(_speaks_of_i, (one, other)))
    has_sums = any(side.has(sympy.Sum, sympy.Product) for side in (one, other))
    for values in points(symbols, f"{one} {other}", whole=has_sums):
        try:
            if not _agree(one, other, Point(values, real=not is_complex)):
                return False
        except (Unsupported, ZeroDivisionError):
            continue
        agreed += 1
    return True if agreed >= _NEEDED else None


def _speaks_of_i(expression: sympy.Basic) -> bool:
    return any(str(symbol) == "i" for symbol in expression.free_symbols) or expression.has(sympy.I)


def _at(expression: sympy.Basic, point: dict[str, Fraction]) -> Value | None:
    """Value at a point, over the reals unless the expression contains the imaginary unit; None if it has none."""
    try:
        return value(expression, Point(point, real=not _speaks_of_i(expression)))
    except (Unsupported, ZeroDivisionError):
        return None


def points(symbols: list[str], seed: str, *, whole: bool = False) -> Iterator[dict[str, Fraction]]:
    """Yield sampled points, on and between integers, reproducible for the same symbols and seed. `whole`: further
    integers, for expressions that are defined only there."""
    chance = Random(",".join([*symbols, seed]))
    spans = _SPANS
    if _BENT.search(seed) is not None:  # bends may lie at the largest number
        bound = max([9, *map(int, _WHOLE.findall(seed))])
        spans = (*_SPANS, (-3 * bound, -bound), (bound, 3 * bound))
    for low, high in spans:
        for _ in range(2):
            steps = _STEPS * (chance.randrange(1, _ODD) | 1)
            yield {symbol: low + Fraction(chance.randrange(1, steps, 2) * (high - low), steps) for symbol in symbols}
    for start, step in _INTEGERS:
        yield {symbol: Fraction(start + step * place) for place, symbol in enumerate(symbols)}
    for _ in range(4 * whole):
        yield {symbol: Fraction(chance.randrange(12, 60)) for symbol in symbols}


def proportional(one: sympy.Basic, other: sympy.Basic) -> int | None:
    """Sign of the constant c ≠ 0 with one = c · other; 0 if there is no such constant, None if undetermined.

    The equations ``one = 0`` and ``other = 0`` are the same when there is such a c.

    Raises:
        Undecided: the numbers are too large.
    """
    one, other = named(one), named(other)
    symbols = sorted({str(symbol) for side in (one, other) for symbol in side.free_symbols} - {"i"})
    ratios: list[Any] = []
    with mpmath.workdps(_DIGITS):
        for point in points(symbols, f"{one} {other}"):
            first, second = _at(one, point), _at(other, point)
            if first is None or second is None:
                continue
            if second == 0 or first == 0:
                if first != second:
                    return 0
                continue
            if not (isinstance(first, Fraction) and isinstance(second, Fraction)):
                first, second = approximate(first), approximate(second)
            ratios.append(first / second)
            exact = isinstance(ratios[0], Fraction) and isinstance(ratios[-1], Fraction)
            off = abs(approximate(ratios[-1]) - approximate(ratios[0]))
            if ratios[-1] != ratios[0] if exact else off > _AGREE * abs(approximate(ratios[0])):
                return 0
    if len(ratios) < _NEEDED:
        return None
    return 1 if mpmath.re(approximate(ratios[0])) > 0 else -1
