r"""Scalars: what math-verify's LaTeX parser makes of them, and when two of them are the same.

A decimal is exact, unless it stands alone: then it may be the rounding of an exact value, if it has digits enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from stretto.rewards.math_equality import same_value, within
from stretto.rewards.math_structure import Scalar, Unreadable
from stretto.rewards.math_units import ratio

Opinion = bool | None

_PLACES = 6  # digits behind the point that an approximation of an exact value needs, as for math-verify
_SIGNIFICANT = 5
_NOISY_PLACES = 9  # digits behind the point from which floating-point noise is told from a digit that was meant
_DECIMAL = re.compile(r"([+-]?)\s*([0-9]+)(?:\.([0-9]*))?")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\{\s*(-?[0-9]+)\s*\}\{\s*(-?[0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))")
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_REPEATING = re.compile(
    r"([+-]?)([0-9]+)\.([0-9]*?)(?:\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?|([0-9]{1,3}?)\5{2,}\s*\\ldots|(?<=\.)([0-9]{2,6})\6\s*\\ldots)"
)
_KEEP_CASE = ConversionConfig(lowercase_symbols=False)


@dataclass(frozen=True)
class Number:
    """A number that is written out: its exact value, and the digits after the point (None for a fraction)."""

    value: Fraction
    places: int | None

    @property
    def significant(self) -> int:
        """Digits from the first that is not zero."""
        return len(str(abs(self.value.numerator * 10 ** (self.places or 0) // self.value.denominator)))


def number(latex: str) -> Number | None:
    """``-12``, ``3.50``, ``1/2``, ``\\frac{1}{2}``, ``2 1/2``; None for everything else."""
    latex = latex.strip()
    if (found := _DECIMAL.fullmatch(latex)) is not None:
        digits = found[3] or ""
        value = Fraction(int(found[2] + digits), 10 ** len(digits))
        return Number(-value if found[1] == "-" else value, len(digits))
    if (found := _REPEATING.fullmatch(latex)) is not None:
        start, block = found[3], found[4] or found[5] or found[6]
        value = Fraction(
            int(found[2] + start + block) - int(found[2] + start), 10 ** len(start) * (10 ** len(block) - 1)
        )
        return Number(-value if found[1] == "-" else value, None)
    if (found := _MIXED.fullmatch(latex)) is not None and int(found[4]):
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return Number(-value if found[1] == "-" else value, None)
    if (found := _FRACTION.fullmatch(latex)) is not None:
        above, below = int(found[2] or found[4]), int(found[3] or found[5])
        if below:
            value = Fraction(above, below)
            return Number(-value if found[1] == "-" else value, None)
    return None


@lru_cache(maxsize=1 << 14)
def expression(latex: str) -> sympy.Basic:
    """What math-verify's LaTeX parser makes of a scalar.

    Raises:
        Unreadable: it does not know it either.
    """
    if (plain := number(latex)) is not None:
        return sympy.Rational(plain.value.numerator, plain.value.denominator)
    try:
        found = latex2sympy(latex, is_real=None, conversion_config=_KEEP_CASE, normalization_config=None)
    # The parser raises bare exceptions, and whatever sympy raises on what it built.
    except Exception as error:
        raise Unreadable(f"cannot read {latex[:60]!r}: {type(error).__name__}") from error
    if not isinstance(found, sympy.Expr):
        raise Unreadable(f"{latex[:60]!r} is {type(found).__name__}")
    return found


def same_scalar(gold: Scalar, answer: Scalar) -> Opinion:
    """Two expressions. A unit that only one of them has says nothing; a word that scales only one of them ("percent",
    "million") may be a unit that the question has named, or a factor."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        measured = ratio(answer.unit, gold.unit)
        return measured is not None and _same_latex(gold.latex, answer.latex, _factor(measured))
    if "degree" in (gold.unit, answer.unit) and gold.unit != answer.unit:
        (_, turned), (_, other) = sorted([(gold.unit, gold.latex), (answer.unit, answer.latex)], reverse=True)
        if r"\pi" in other and r"\pi" not in turned:
            return _same_latex(turned, other, 180 / sympy.pi)
    scales = gold.scale, answer.scale
    factors = [answer.scale / gold.scale]
    if scales[0] != scales[1] and 1 in scales:
        factors.append(Fraction(1))
    return any_of(_same_latex(gold.latex, answer.latex, _factor(factor)) for factor in factors)


def _factor(exact: Fraction) -> sympy.Rational:
    return sympy.Rational(exact.numerator, exact.denominator)


def _same_latex(gold: str, answer: str, factor: sympy.Expr) -> Opinion:
    """Is gold = factor · answer?"""
    if gold == answer and factor == 1:
        return True
    first, second = number(gold), number(answer)
    if first is not None and second is not None and factor.is_Rational:
        return _same_numbers(first, second, factor)
    try:
        one, other = expression(gold), times(factor, expression(answer))
    except Unreadable:
        return None
    if one in (sympy.oo, -sympy.oo) or other in (sympy.oo, -sympy.oo):
        return bool(one == other)
    found = same_value(one, other)
    if found is False:
        return _rounded(first, other) or _rounded(second, one) or _same_letter(gold, answer)
    return found if found is not None else (True if one == other else None)


def _same_numbers(gold: Number, answer: Number, factor: sympy.Rational) -> bool:
    from_answer = answer.value * factor.numerator / factor.denominator
    if gold.value == from_answer:
        return True
    if factor != 1 or gold.places == answer.places:
        return False
    return _approximates(gold, answer) or _approximates(answer, gold) or _noise(gold, answer)


def _approximates(short: Number, exact: Number) -> bool:
    """Is a decimal the other number, rounded to the decimal's own last place?"""
    if not _fine_enough(short) or (exact.places is not None and exact.places <= (short.places or 0)):
        return False
    return bool(abs(short.value - exact.value) * 2 * 10 ** (short.places or 0) <= 1)


def _noise(one: Number, other: Number) -> bool:
    """Do two decimals differ as results of floating-point arithmetic do: 0.30000000000000004, 41.9999999999?"""
    if one.places is None or other.places is None or max(one.places, other.places) < _NOISY_PLACES:
        return False
    return bool(abs(one.value - other.value) * 10**_NOISY_PLACES <= 2 * abs(one.value))


def _fine_enough(decimal: Number) -> bool:
    return decimal.places is not None and decimal.places >= _PLACES and decimal.significant >= _SIGNIFICANT


def _rounded(decimal: Number | None, exact: sympy.Basic) -> bool:
    """Is a decimal the value of an expression without decimals, rounded to the decimal's own last place?"""
    if decimal is None or not _fine_enough(decimal) or exact.free_symbols or exact.has(sympy.Float):
        return False
    return within(exact, decimal.value, Fraction(1, 2 * 10 ** (decimal.places or 0)))


def _same_letter(gold: str, answer: str) -> bool:
    """Choices are chosen in either case."""
    return len(gold) == 1 and gold.isalpha() and gold.lower() == answer.lower()


def any_of(opinions: Iterable[Opinion]) -> Opinion:
    """True if one is; unknown if one might be."""
    found = list(opinions)
    return True if True in found else None if None in found else False


def times(factor: sympy.Expr | int, found: sympy.Basic) -> sympy.Basic:
    """A product that sympy does not compute: a power in it may be too large to be."""
    return found if factor == 1 else sympy.Mul(factor, found, evaluate=False)
