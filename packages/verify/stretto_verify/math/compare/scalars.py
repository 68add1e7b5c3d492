"""Compare scalars.

A decimal is taken as exact. Only if it is the whole answer may it be a rounded exact value, if it has enough digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import sympy

from stretto_verify.math.compare.equality import same_value, within
from stretto_verify.math.parse.expressions import Number, expression, number
from stretto_verify.math.parse.measures import TWO_UNITS, conversion
from stretto_verify.math.parse.structure import Scalar, Unreadable
from stretto_verify.math.parse.units import LEFT_OUT, without_unit

Opinion = bool | None

_PLACES = 6  # decimal places that an approximation of an exact value needs, as in math-verify
_SIGNIFICANT = 5
_PERCENT = Fraction(1, 100)
_CONSTANT = re.compile(r"(.*\+\s*)([Cc])\s*", re.DOTALL)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_VARIABLES = frozenset("tuvwxyz")


def same_scalar(gold: Scalar, answer: Scalar) -> Opinion:
    """Whether two scalars are equal; None if that is unknown.

    If both have a unit, the answer is converted. If only one has a unit, it is ignored, but degrees are converted if
    the other scalar is a multiple of pi. An amount in two units ("5 feet 3 inches") differs from a number without a
    unit, a percentage from an amount with one, and an answer in another base than ten from a gold answer without a
    base. A scaling word of the gold answer ("percent", "million") may be a unit that the question has given, so that
    the answer may lack it. One of the answer always counts, except "percent".
    """
    if {gold.unit, answer.unit} == {"degree", "rad"}:
        in_degrees, in_radians = (gold, answer) if gold.unit == "degree" else (answer, gold)
        return _same_latex(in_degrees.latex, in_radians.latex, 180 / sympy.pi)
    if gold.unit != answer.unit and (TWO_UNITS in gold.unit + answer.unit or (gold.unit and answer.unit)):
        ratio = conversion(answer.unit, gold.unit)
        return ratio is not None and _same_latex(gold.latex, answer.latex, _factor(ratio * answer.scale / gold.scale))
    if "degree" in (gold.unit, answer.unit) and gold.unit != answer.unit:
        turned, other = (gold.latex, answer.latex) if gold.unit == "degree" else (answer.latex, gold.latex)
        if r"\pi" in other and _is_multiple_of_pi(other):
            return _same_latex(turned, other, 180 / sympy.pi)
    if answer.unit.startswith("base ") and answer.unit != "base 10" and not gold.unit:
        return False  # a numeral without a base is decimal, unless the question says otherwise (`reward.judged`)
    gold, answer = _with_same_unit(gold, answer), _with_same_unit(answer, gold)
    scales = gold.scale, answer.scale
    if gold.scale != answer.scale and any(
        one.scale == _PERCENT and other.unit for one, other in ((gold, answer), (answer, gold))
    ):
        return False  # 25% is not 25 cm
    factors = [answer.scale / gold.scale]
    if scales[0] != scales[1] and 1 in scales and LEFT_OUT.issuperset(scales) and answer.scale == 1:
        factors.append(Fraction(1))
    return any_of(_same_latex(gold.latex, answer.latex, _factor(factor)) for factor in factors)


def _with_same_unit(one: Scalar, other: Scalar) -> Scalar:
    """The first scalar with the unit of the other, if it has that unit's letters right behind a digit: ``5N``; else
    unchanged."""
    bare = one.latex.removesuffix(other.unit) if other.unit and not one.unit else one.latex
    is_glued = bare != one.latex and bare[-1:].isdigit()
    return replace(one, latex=bare, unit=other.unit) if is_glued else one


def _is_multiple_of_pi(latex: str) -> bool:
    """Whether a value is an angle in radians by its form: π/3, but not 180/π. True if it cannot be read."""
    try:
        return not (expression(latex) / sympy.pi).has(sympy.pi)
    except Unreadable:
        return True


def _factor(exact: Fraction) -> sympy.Rational:
    return sympy.Rational(exact.numerator, exact.denominator)


def _same_latex(gold: str, answer: str, factor: sympy.Expr) -> Opinion:
    """Whether gold = factor · answer, one is the other rounded to enough decimals, or both are the same letter; None if
    unknown."""
    answer = _with_constant(gold, answer)
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
    return found if found is not None else (True if _arranged(one) == _arranged(other) else None)


def _with_constant(gold: str, answer: str) -> str:
    """The answer with its constant of integration named as in the gold answer: ``x + C`` for ``x + c``. Unchanged
    unless both end with a constant, and have a variable."""
    one, other = _CONSTANT.fullmatch(gold), _CONSTANT.fullmatch(answer)
    if one is None or other is None:
        return answer
    names = set(_COMMAND.sub("", one[1] + other[1]))
    return f"{other[1]}{one[2]}" if names & _VARIABLES and not names & {"C", "c"} else answer


def _arranged(found: sympy.Basic) -> str:
    """Text of an expression with terms and factors in a canonical order and bound variables renamed to numbers, so that
    expressions that differ only in these have the same text."""
    if isinstance(found, sympy.Sum | sympy.Product | sympy.Integral):
        found = found.xreplace({bound: sympy.Symbol(f"#{at}") for at, bound in enumerate(found.variables)})
    if not found.args:
        return str(found)
    parts = [part for side in found.args for part in (side.args if side.func is found.func else (side,))]
    shown = map(_arranged, parts if isinstance(found, sympy.Add | sympy.Mul) else found.args)
    return f"{found.func}({', '.join(sorted(shown) if found.is_Add or found.is_Mul else shown)})"


def _same_numbers(gold: Number, answer: Number, factor: sympy.Rational) -> bool:
    from_answer = answer.value * factor.numerator / factor.denominator
    if gold.value == from_answer:
        return True
    if factor != 1 or gold.places == answer.places:
        return False
    return _approximates(gold, answer) or _approximates(answer, gold)


def _approximates(short: Number, exact: Number) -> bool:
    """Whether `short`, a decimal with enough digits, is `exact` rounded to the last place of `short`. False if `exact`
    is a decimal of no more places."""
    if not _fine_enough(short) or (exact.places is not None and exact.places <= (short.places or 0)):
        return False
    return bool(abs(short.value - exact.value) * 2 * 10 ** (short.places or 0) <= 1)


def _fine_enough(decimal: Number) -> bool:
    return decimal.places is not None and decimal.places >= _PLACES and decimal.significant >= _SIGNIFICANT


def _rounded(decimal: Number | None, exact: sympy.Basic) -> bool:
    """Whether `decimal` has enough digits and is the value of `exact`, rounded to the decimal's last place. False for
    an expression with decimals or symbols."""
    if decimal is None or not _fine_enough(decimal) or exact.free_symbols or exact.has(sympy.Float):
        return False
    return within(exact, decimal.value, Fraction(1, 2 * 10 ** (decimal.places or 0)))


def approximated(gold: Scalar, answer: Scalar, found: Opinion) -> Opinion:
    """The opinion on an answer in view of the approximations beside it. One that is far off (``\\sqrt2 \\approx 7``)
    makes it wrong; the gold decimal among them, if it is the rounding of the value, makes it right; else `found`
    stays."""
    try:
        exact, wanted = expression(answer.latex), number(gold.latex)
    except Unreadable:
        return found
    for near, unit in () if exact.free_symbols else map(without_unit, answer.beside):
        if (decimal := number(near)) is None or gold.scale != answer.scale or unit not in ("", gold.unit):
            continue
        place = Fraction(1, 10 ** (decimal.places or 0))
        if found and not within(exact, decimal.value, max(place / 2, abs(decimal.value) / 10)):
            return False
        if wanted is not None and decimal.places and wanted.value == decimal.value:
            found = found or within(exact, decimal.value, place / 2)
    return found


def _same_letter(gold: str, answer: str) -> bool:
    """Whether both are the same single letter, in upper or lower case, as of a choice."""
    return len(gold) == 1 and gold.isalpha() and gold.lower() == answer.lower()


def any_of(opinions: Iterable[Opinion]) -> Opinion:
    """Combine opinions: True if one is True, else None (unknown) if one is None, else False."""
    found = list(opinions)
    return True if True in found else None if None in found else False


def all_of(opinions: Iterable[Opinion]) -> Opinion:
    """Combine opinions: False if one is False (later ones are not asked for), else None (unknown) if one is None, else
    True."""
    unknown = False
    for opinion in opinions:
        if opinion is False:
            return False
        unknown |= opinion is None
    return None if unknown else True


def times(factor: sympy.Expr | int, found: sympy.Basic) -> sympy.Basic:
    """The product, unevaluated, because a power in it may be too large to compute."""
    return found if factor == 1 else sympy.Mul(factor, found, evaluate=False)
