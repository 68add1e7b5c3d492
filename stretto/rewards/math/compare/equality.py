"""Equality of expressions, by their values at sampled points.

Two numbers are equal when they agree to fifty digits *relative to their size*, so that tiny numbers are not all zero.
Two expressions in variables are equal when they agree at every sampled point where both are real. The points have both
signs and lie on and between integers, so that ``|x|`` is not ``x`` and ``sqrt(x^2)`` is not ``x``, while ``sqrt(1/n)``
is ``1/sqrt(n)``. They are the same in every call, so a verdict repeats; no answer could be fitted to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from random import Random
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

from stretto.rewards.math.compare.values import Infinite, Point, Unsupported, Value, approximate, value

_DIGITS = 60
_AGREE = mpmath.mpf(10) ** -50
_NEEDED = 3  # points at which both expressions must have had a real value
_STEPS = 1 << 13  # a power of two: a negative base has no real value at such an exponent
_SPANS = ((1, 3), (-3, -1), (0, 1), (-1, 0), (5, 9))
_INTEGERS = ((2, 3), (5, 2), (4, 7), (3, 11))


def same_value(one: sympy.Basic, other: sympy.Basic, renamed: Mapping[str, str] | None = None) -> bool | None:
    """True: equal at every point; False: different at one; None: the values do not decide.

    `renamed` maps symbols of `other` to symbols of `one`.

    Raises:
        Undecided: the numbers are too large.
    """
    one, other = named(one), named(other)
    if renamed:
        other = other.xreplace({sympy.Symbol(old): sympy.Symbol(new) for old, new in renamed.items()})
    symbols = sorted({str(symbol) for side in (one, other) for symbol in side.free_symbols} - {"i"})
    try:
        if not symbols:
            return _same_number(one, other)
        return _same_function(one, other, symbols)
    except Unsupported:
        return None


def named(expression: sympy.Basic) -> sympy.Basic:
    """The expression with a symbol in place of each ``f(x)``, since f is unknown."""
    calls = expression.atoms(AppliedUndef) if hasattr(expression, "atoms") else ()
    return expression.xreplace({call: sympy.Symbol(str(call)) for call in calls}) if calls else expression


def _same_number(one: sympy.Basic, other: sympy.Basic) -> bool:
    with mpmath.workdps(_DIGITS):
        if _is_infinite(one) != _is_infinite(other):
            return False
        first, second = value(one, Point()), value(other, Point())
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        difference, size = _difference(first, second)
        if difference <= _AGREE * size:
            return True
        if difference > mpmath.mpf(10) ** -40:
            return False
    with mpmath.workdps(2 * _DIGITS):  # rounding errors shrink with the precision, true differences do not
        sharper, _ = _difference(value(one, Point()), value(other, Point()))
    return bool(sharper <= difference * mpmath.mpf(10) ** -20)


def _is_infinite(expression: sympy.Basic) -> bool:
    try:
        value(expression, Point())
    except Infinite:
        return True
    return False


def _difference(first: Value, second: Value) -> tuple[Any, Any]:
    first, second = approximate(first), approximate(second)
    return abs(first - second), max(abs(first), abs(second))


def within(expression: sympy.Basic, centre: Fraction, distance: Fraction) -> bool:
    """Whether the value of an expression without symbols is at most `distance` from `centre`."""
    with mpmath.workdps(_DIGITS):
        try:
            found = value(expression, Point())
        except Unsupported:
            return False
        return bool(abs(approximate(found) - approximate(centre)) <= approximate(distance))


def _same_function(one: sympy.Basic, other: sympy.Basic, symbols: list[str]) -> bool | None:
    agreed = 0
    with mpmath.workdps(_DIGITS):
        for point in points(symbols):
            first, second = _at(one, point), _at(other, point)
            if first is None or second is None:
                continue
            difference, size = _difference(first, second)
            if difference > _AGREE * max(size, mpmath.mpf(10) ** -10):
                return False
            agreed += 1
    return True if agreed >= _NEEDED else None


def _at(expression: sympy.Basic, point: dict[str, Fraction]) -> Value | None:
    """The value at a point, over the reals unless the expression contains the imaginary unit."""
    speaks_of_i = any(str(symbol) == "i" for symbol in expression.free_symbols) or expression.has(sympy.I)
    try:
        return value(expression, Point(point, real=not speaks_of_i))
    except (Unsupported, ZeroDivisionError):
        return None


def points(symbols: list[str]) -> Iterator[dict[str, Fraction]]:
    """The sampled points, between and on integers; the same for the same symbols."""
    chance = Random(",".join(symbols))
    for low, high in _SPANS:
        for _ in range(2):
            steps = {symbol: chance.randrange(1, _STEPS, 2) for symbol in symbols}
            yield {symbol: low + Fraction(step * (high - low), _STEPS) for symbol, step in steps.items()}
    for start, step in _INTEGERS:
        yield {symbol: Fraction(start + step * place) for place, symbol in enumerate(symbols)}


def proportional(one: sympy.Basic, other: sympy.Basic) -> int | None:
    """The sign of c if one = c · other with a constant c ≠ 0, else 0; None where the values do not decide.

    The equations ``one = 0`` and ``other = 0`` are the same when there is such a c.
    """
    one, other = named(one), named(other)
    symbols = sorted({str(symbol) for side in (one, other) for symbol in side.free_symbols} - {"i"})
    ratios: list[Any] = []
    with mpmath.workdps(_DIGITS):
        for point in points(symbols):
            first, second = _at(one, point), _at(other, point)
            if first is None or second is None:
                continue
            first, second = approximate(first), approximate(second)
            if second == 0 or first == 0:
                if first != second:
                    return 0
                continue
            ratios.append(first / second)
            if abs(ratios[-1] - ratios[0]) > _AGREE * abs(ratios[0]):
                return 0
    if len(ratios) < _NEEDED:
        return None
    return 1 if mpmath.re(ratios[0]) > 0 else -1
