"""Numeric values of expressions, with limits on magnitude.

Rational arithmetic is exact up to `LARGEST_INTEGER` bits, so that the tiny ``1/2004!`` differs from ``1/2006!``; other
values are approximated to mpmath's working precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from itertools import chain
from math import comb, factorial
from operator import add, mul
from typing import Any, Final

import mpmath
import sympy

from stretto_verify.math.limits import LARGEST_EXPONENT, LARGEST_INTEGER
from stretto_verify.verdicts import Undecided

Approximate = Any  # mpmath.mpf or mpmath.mpc, which have no types
Value = Fraction | Approximate

_EXACT_FACTORIAL = 8_000
_MOST_TERMS = 200


@dataclass(frozen=True)
class Point:
    """Values for the symbols of an expression, by name. With `real`, intermediate values must be real too."""

    values: Mapping[str, Fraction] = field(default_factory=dict)
    real: bool = False


class Unsupported(Exception):
    """The expression has no finite value, or its evaluation is not supported: an integral, an infinite sum."""


class Infinite(Unsupported):
    """The value is a pole or infinity."""


def value(expression: sympy.Basic, point: Point) -> Value:
    """Value of an expression at a point: a Fraction if it can be computed exactly, else an mpmath number to the working
    precision.

    Raises:
        Unsupported: it has no finite value there, has a complex intermediate value in spite of `point.real`, or its
            evaluation is not supported.
        Undecided: its magnitude exceeds the limits.
    """
    match expression:
        case sympy.Float():
            return Fraction(str(expression))
        case sympy.Rational():
            return Fraction(int(expression.p), int(expression.q))
        case sympy.Symbol():
            return mpmath.mpc(0, 1) if expression.name == "i" else _known(point, expression.name)
        case sympy.Add():
            return _fold([value(part, point) for part in expression.args], add)
        case sympy.Mul():
            return _fold([value(part, point) for part in expression.args], mul)
        case sympy.Pow():
            return _bounded(_allowed(_power(value(expression.base, point), value(expression.exp, point)), point))
        case sympy.exp():
            return _power(+mpmath.e, value(expression.args[0], point))
        case sympy.Sum() | sympy.Product():
            return _series(expression, point)
    if expression in (sympy.oo, -sympy.oo, sympy.zoo):
        raise Infinite(str(expression))
    if expression in _CONSTANTS:
        return +_CONSTANTS[expression]
    return _applied(expression, point)


def _known(point: Point, name: str) -> Fraction:
    if name not in point.values:
        raise Unsupported(name)
    return point.values[name]


def _fold(values: Iterable[Value], operation: Callable[[Any, Any], Any]) -> Value:
    """Sum or product of values, of which there must be one: each step is a Fraction if both sides are."""
    return reduce(lambda one, other: _bounded(operation(*_alike(one, other))), values)


def _series(expression: sympy.Sum | sympy.Product, point: Point) -> Value:
    """Value of a sum or product of at most 200 terms. Raises `Unsupported` for others, and for a symbol that is indexed
    by the bound variable, such as ``x_k``."""
    if len(expression.limits) != 1 or len(expression.limits[0]) != 3:
        raise Unsupported("several bounds")
    bound, *ends = expression.limits[0]
    first, last = (value(end, point) for end in ends)
    if (
        not all(isinstance(end, Fraction) and end.denominator == 1 for end in (first, last))
        or last - first >= _MOST_TERMS
    ):
        raise Unsupported("a sum of many terms")
    if any(str(bound) in symbol.name.partition("_")[2] for symbol in expression.function.free_symbols):
        raise Unsupported("an index")
    points = (
        replace(point, values={**point.values, str(bound): Fraction(at)}) for at in range(int(first), int(last) + 1)
    )
    empty, operation = (Fraction(0), add) if isinstance(expression, sympy.Sum) else (Fraction(1), mul)
    return _fold(chain([empty], (value(expression.function, at) for at in points)), operation)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if base == 0 and exponent < 0:
            raise Infinite("division by zero")
        if size <= LARGEST_INTEGER:
            return base ** int(exponent)
    if isinstance(exponent, Fraction) and exponent.denominator % 2 == 1 and _is_negative(base):
        root = _power(-base, exponent)  # the real root of a negative number, as taught in school
        return -root if exponent.numerator % 2 else root
    base, exponent = approximate(base), approximate(exponent)
    if base == 0:
        if mpmath.re(exponent) > 0:
            return Fraction(0)
        raise Infinite("zero to the power of zero, or less")
    growth = abs(exponent) * (abs(mpmath.log(base)) + 1)
    if growth > LARGEST_EXPONENT:
        raise Undecided("a power that is too large to compute")
    return mpmath.power(base, exponent)


def _allowed(number: Value, point: Point) -> Value:
    if point.real and not isinstance(number, Fraction) and mpmath.im(number) != 0:
        raise Unsupported("a complex intermediate value")
    return number


def _is_negative(number: Value) -> bool:
    return bool(number < 0) if isinstance(number, Fraction | mpmath.mpf) else False


def _applied(expression: sympy.Basic, point: Point) -> Value:
    name = type(expression).__name__
    if name in ("UnevaluatedExpr", "Abs", "factorial", "binomial", "floor", "ceiling"):
        return _integral(name, [value(argument, point) for argument in expression.args])
    if name not in _FUNCTIONS:
        raise Unsupported(name)
    arguments = [approximate(value(argument, point)) for argument in expression.args]
    if any(abs(argument) > LARGEST_EXPONENT for argument in arguments) and name != "log":
        raise Undecided(f"{name} of a number that is too large")
    try:
        return _bounded(_allowed(_FUNCTIONS[name](*arguments), point))
    except (ValueError, ZeroDivisionError) as error:  # a pole, such as log(0)
        raise Infinite(name) from error


def _integral(name: str, arguments: list[Value]) -> Value:
    """Value of |x|, floor, ceiling, factorial or binomial (`name`: the sympy class). Of a complex number, floor and
    ceiling take the real part.

    Raises:
        Unsupported: factorial or binomial of a number that is no integer.
        Undecided: factorial or binomial of a number that is negative or above 10^12.
    """
    first = arguments[0]
    if name == "UnevaluatedExpr":
        return first
    if name == "Abs":
        return abs(first)
    if name in ("floor", "ceiling"):
        if not isinstance(first, Fraction):
            return Fraction(int(getattr(mpmath, name.replace("ing", ""))(mpmath.re(first))))
        return Fraction(first.__floor__() if name == "floor" else first.__ceil__())
    if not all(isinstance(argument, Fraction) and argument.denominator == 1 for argument in arguments):
        raise Unsupported(name)
    integers = [int(argument) for argument in arguments]
    if any(integer < 0 for integer in integers) or any(integer > 10**12 for integer in integers):
        raise Undecided(f"{name} of a number that is too large, or negative")
    if max(integers) <= _EXACT_FACTORIAL:
        return Fraction(factorial(integers[0]) if name == "factorial" else comb(integers[0], integers[1]))
    return mpmath.factorial(integers[0]) if name == "factorial" else mpmath.binomial(*integers)


def _alike(first: Value, second: Value) -> tuple[Value, Value]:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first, second
    return approximate(first), approximate(second)


def approximate(number: Value) -> Approximate:
    """The number as an mpmath number."""
    return mpmath.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _bounded(number: Value) -> Value:
    """The number, approximated if its exact form has become too long.

    Raises:
        Infinite: the number is infinite, or not a number.
    """
    if isinstance(number, Fraction):
        bits = number.numerator.bit_length() + number.denominator.bit_length()
        return number if bits <= 2 * LARGEST_INTEGER else approximate(number)
    if not mpmath.isfinite(number):
        raise Infinite("infinity")
    return number


_CONSTANTS: Final[Mapping[Any, Any]] = {
    sympy.pi: mpmath.pi,
    sympy.E: mpmath.e,
    sympy.I: mpmath.mpc(0, 1),
    sympy.GoldenRatio: mpmath.phi,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Approximate]]] = {
    "log": lambda x, base=None: mpmath.log(x) if base is None else mpmath.log(x) / _bounded(mpmath.log(base)),
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh")},
    **{name: getattr(mpmath, name) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "re", "im", "arg")},
    "conjugate": mpmath.conj,
}
