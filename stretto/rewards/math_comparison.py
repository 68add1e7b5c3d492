r"""Is an answer the gold answer? True, False, or None where this file cannot tell and math-verify is asked.

The gold answer says what is asked for: where it gives a value, ``x = 5`` is read as 5; where it gives the equation of a
line, 5 is no answer; where it gives an inequality, the interval says the same, and not the other way round (a model
that writes the question back as ``x > 5`` would be right too often).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import sympy
from sympy.core.function import AppliedUndef

from stretto.rewards.math_equality import proportional, same_value, within
from stretto.rewards.math_reading import (
    Choice,
    Dots,
    Listing,
    Matrix,
    Node,
    Number,
    Ratio,
    Relation,
    Scalar,
    Union,
    Unreadable,
    Words,
    expression,
    letters,
    number,
)

Opinion = bool | None

_NAMING = ("=", r"\in")
_FLIPPED = {">": "<", r"\ge": r"\le"}
_PLACES = 6  # digits behind the point that an approximation of an exact value needs, as for math-verify
_SIGNIFICANT = 5


def same(gold: Node, answer: Node) -> Opinion:
    """Does `answer` say what `gold` says?

    Raises:
        Undecided: its numbers are too large.
    """
    if isinstance(answer, Relation) and answer.signs[-1] in _NAMING and not isinstance(gold, Relation):
        return same(gold, answer.sides[-1])
    match gold, answer:
        case Choice(), Choice():
            return gold.letter == answer.letter
        case Choice(), _:
            return _any([_same_words(Words(gold.letter), answer), same(gold.content, answer)])
        case _, Choice():
            return _any([_same_words(gold, Words(answer.letter)), same(gold, answer.content)])
        case Relation(), Relation():
            return _same_relation(gold, answer)
        case Relation(), _:
            return _named_or_interval(gold, answer)
        case (Words(), _) | (_, Words()):
            return _same_words(gold, answer)
        case Listing(), Listing():
            return _same_listing(gold, answer)
        case Listing(), Union():
            return _same_ranges(gold.items, answer)
        case Union(), Union():
            return _matched(gold.parts, answer.parts)
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case Scalar(), Scalar():
            return same_scalar(gold, answer)
        case (Ratio(parts=(above, below)), Scalar() as other) | (Scalar() as other, Ratio(parts=(above, below))):
            return _same_quotient(above, below, other)
        case (Listing(items=(only,)), Scalar()):
            return same(only, answer)
        case (Scalar(), Listing(items=(only,))):
            return same(gold, only)
        case (Dots(), Dots()):
            return True
        case (Matrix(), _) | (_, Matrix()) | (Union(), _) | (_, Union()):
            return None
    return False


# Texts.


def _same_words(gold: Node, answer: Node) -> Opinion:
    first, second = letters(gold), letters(answer)
    if not first or not second:
        return None
    if first == second or _NUMERALS.get(first, first) == _NUMERALS.get(second, second):
        return True
    told = [node.text for node in (gold, answer) if isinstance(node, Words)]
    return None if any(letter.isdigit() for text in told for letter in text) else False


_NUMERALS = {
    name: str(value)
    for value, name in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
}


# Numbers and expressions.


def same_scalar(gold: Scalar, answer: Scalar) -> Opinion:
    """Two expressions. A unit that only one of them has says nothing; a percent sign may be a unit, or a hundredth."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return _same_latex(gold.latex, answer.latex, 1)
    hundred = (1, 100) if gold.percent else (1, sympy.Rational(1, 100))
    return _any(_same_latex(gold.latex, answer.latex, factor) for factor in hundred)


def _same_latex(gold: str, answer: str, factor: sympy.Rational | int) -> Opinion:
    """Is gold = factor · answer?"""
    if gold == answer and factor == 1:
        return True
    first, second = number(gold), number(answer)
    if first is not None and second is not None:
        return _same_numbers(first, second, factor)
    try:
        one, other = expression(gold), _times(factor, expression(answer))
    except Unreadable:
        return None
    if one in (sympy.oo, -sympy.oo) or other in (sympy.oo, -sympy.oo):
        return bool(one == other)
    found = same_value(one, other)
    if found is False:
        return _rounded(first, other) or _rounded(second, one) or _same_letter(gold, answer)
    return found if found is not None else (True if one == other else None)


def _same_numbers(gold: Number, answer: Number, factor: sympy.Rational | int) -> bool:
    from_answer = answer.value * factor.numerator / factor.denominator
    if gold.value == from_answer:
        return True
    if factor != 1 or gold.places == answer.places:
        return False
    return _approximates(gold, answer) or _approximates(answer, gold)


def _approximates(short: Number, exact: Number) -> bool:
    """Is a decimal the other number, rounded to the decimal's own last place?"""
    if not _fine_enough(short) or (exact.places is not None and exact.places <= (short.places or 0)):
        return False
    return abs(short.value - exact.value) * 2 * 10 ** (short.places or 0) <= 1


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


def _any(opinions: object) -> Opinion:
    found = list(opinions)  # type: ignore[call-overload]
    return True if True in found else None if None in found else False


# Lists, tuples, sets, intervals.


def _same_listing(gold: Listing, answer: Listing) -> Opinion:
    pairs = gold.items, answer.items
    if len(gold.items) != len(answer.items):
        return False if not gold.items or not answer.items else _same_distinct(gold, answer)
    has_dots = any(isinstance(item, Dots) for item in (*gold.items, *answer.items))
    if gold.ordered or has_dots:
        if answer.ordered and len(gold.items) == 2 and (gold.opening, gold.closing) != (answer.opening, answer.closing):
            return False
        return _in_order(*pairs)
    return _in_order(*pairs) if answer.ordered else _matched(*pairs)


def _same_distinct(gold: Listing, answer: Listing) -> Opinion:
    """Sets whose lists repeat an item: ``{1, 2, 2}`` is ``{1, 2}``."""
    if gold.ordered or answer.ordered:
        return False
    first, second = _distinct(gold.items), _distinct(answer.items)
    return _matched(first, second) if len(first) == len(second) else False


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    unknown = False
    for one, other in zip(gold, answer, strict=True):
        found = same(one, other)
        if found is False:
            return False
        unknown |= found is None
    return None if unknown else True


def _matched(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    """Is there a partner for each? Sameness is transitive but for rounding, so the first that fits will do."""
    left = list(answer)
    if len(gold) != len(left):
        return None
    unknown = False
    for item in gold:
        opinions = [same(item, other) for other in left]
        if True in opinions:
            del left[opinions.index(True)]
        elif None in opinions:
            unknown = True
        else:
            return False
    return None if unknown else True


def _same_matrix(gold: Matrix, answer: Matrix) -> Opinion:
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    cells = [[cell for row in matrix.rows for cell in row] for matrix in (gold, answer)]
    return _in_order(*cells)


def _same_ratio(gold: Ratio, answer: Ratio) -> Opinion:
    if len(gold.parts) != len(answer.parts):
        return False
    found = _in_order(gold.parts, answer.parts)
    if found is not False or any(_is_clock(part) for ratio in (gold, answer) for part in ratio.parts[1:]):
        return found
    if len(gold.parts) != 2:
        return False
    (one, two), (three, four) = gold.parts, answer.parts
    quotient = _quotient(three, four)
    return False if quotient is None else _same_quotient(one, two, quotient)


def _is_clock(part: Node) -> bool:
    """Two digits behind a colon are minutes."""
    return isinstance(part, Scalar) and len(part.latex) == 2 and part.latex.isdigit()


def _quotient(above: Node, below: Node) -> Scalar | None:
    if isinstance(above, Scalar) and isinstance(below, Scalar) and below.latex != "0":
        return Scalar(rf"\frac{{{above.latex}}}{{{below.latex}}}")
    return None


def _same_quotient(above: Node, below: Node, other: Scalar) -> Opinion:
    quotient = _quotient(above, below)
    return False if quotient is None or _is_clock(below) else same_scalar(quotient, other)


# Relations.


def _same_relation(gold: Relation, answer: Relation) -> Opinion:
    if all(sign in _NAMING for sign in (*gold.signs, *answer.signs)):
        return _same_equation(gold, answer)
    one, other = _steps(gold), _steps(answer)
    if one is None or other is None:
        return None
    if len(one) != len(other):
        return False
    left = list(other)
    for step in one:
        opinions = [_same_step(step, candidate) for candidate in left]
        if True not in opinions:
            return None if None in opinions else False
        del left[opinions.index(True)]
    return True


def _same_equation(gold: Relation, answer: Relation) -> Opinion:
    """``x = 5`` names 5: the same name needs the same value. Other equations are the same when one is a multiple."""
    one, other = _name(gold.sides[0]), _name(answer.sides[0])
    if one is not None and one == other:
        return same(gold.sides[-1], answer.sides[-1])
    if (renamed := _same_definition(gold, answer)) is not None:
        return renamed
    first, second = _difference(gold.sides[0], gold.sides[-1]), _difference(answer.sides[0], answer.sides[-1])
    if first is not None and second is not None:
        sign = proportional(first, second)
        if sign:
            return True
        symbols = first.free_symbols | second.free_symbols
        linear = all(side.is_polynomial(*symbols) for side in (first, second)) and len(symbols) > 0
        return False if sign == 0 and linear else None
    if one is not None and other is not None:
        return False
    return None


def _same_definition(gold: Relation, answer: Relation) -> Opinion:
    """``f(n) = n + 1`` defines what ``f(x) = x + 1`` does; None if these are no definitions of one function."""
    sides = [side for relation in (gold, answer) for side in (relation.sides[0], relation.sides[-1])]
    try:
        call, value, other_call, other_value = [
            expression(side.latex) if isinstance(side, Scalar) else sympy.nan for side in sides
        ]
    except Unreadable:
        return None
    if not isinstance(call, AppliedUndef) or not isinstance(other_call, AppliedUndef) or sympy.nan in (value, other_value):
        return None
    if call.func != other_call.func or not all(arg.is_Symbol for arg in (*call.args, *other_call.args)):
        return None
    if len(call.args) != len(other_call.args):
        return None
    return same_value(value, other_value, dict(zip(map(str, other_call.args), map(str, call.args), strict=True)))


def _name(side: Node) -> str | None:
    """What only gives a name to the other side: x, f(x), AB/CD, (p, q), a text."""
    match side:
        case Words(text=text):
            return text.replace(" ", "")
        case Listing(items=items):
            names = [_name(item) for item in items]
            return None if None in names else "(" + ",".join(map(str, names)) + ")"
        case Ratio(parts=parts):
            names = [_name(part) for part in parts]
            return None if None in names else ":".join(map(str, names))
        case Scalar(latex=latex):
            try:
                found = expression(latex)
            except Unreadable:
                return latex.replace(" ", "")
            return str(found) if _is_name(found) else None
    return None


def _is_name(found: sympy.Basic) -> bool:
    if isinstance(found, sympy.Symbol | AppliedUndef):
        return True
    if isinstance(found, sympy.Mul):
        return all(_is_name(part) for part in found.args)
    return isinstance(found, sympy.Pow) and found.exp == -1 and _is_name(found.base)


Step = tuple[str, sympy.Basic]


def _steps(relation: Relation) -> list[Step] | None:
    """``a < b >= c`` as differences that are positive or not negative (or unequal to, or equal to, zero)."""
    steps: list[Step] = []
    for (left, right), sign in zip(pairwise(relation.sides), relation.signs, strict=True):
        low, high = (right, left) if sign in _FLIPPED else (left, right)
        difference = _difference(high, low)
        if difference is None:
            return None
        steps.append((_FLIPPED.get(sign, sign), difference))
    return steps


def _same_step(one: Step, other: Step) -> Opinion:
    if one[0] != other[0]:
        return False
    sign = proportional(one[1], other[1])
    if sign is None:
        return None
    return sign > 0 if one[0] in ("<", r"\le") else sign != 0


def _difference(left: Node, right: Node) -> sympy.Basic | None:
    if not isinstance(left, Scalar) or not isinstance(right, Scalar):
        return None
    try:
        return sympy.Add(expression(left.latex), _times(-1, expression(right.latex)), evaluate=False)
    except Unreadable:
        return None


def _times(factor: sympy.Rational | int, found: sympy.Basic) -> sympy.Basic:
    """A product that sympy does not compute: a power in it may be too large to be."""
    return found if factor == 1 else sympy.Mul(factor, found, evaluate=False)


def _named_or_interval(gold: Relation, answer: Node) -> Opinion:
    if all(sign in _NAMING for sign in gold.signs):
        return same(gold.sides[-1], answer) if _name(gold.sides[0]) is not None else False
    if gold.signs == (r"\neq",) and isinstance(answer, Union):
        low, high = Scalar(r"-\infty"), Scalar(r"\infty")
        return _matched([Listing("(", ")", (low, gold.sides[1])), Listing("(", ")", (gold.sides[1], high))], answer.parts)
    interval = as_interval(gold)
    if interval is None:
        return None if isinstance(answer, Listing | Union) else False
    return same(interval, answer)


def _same_ranges(gold: Sequence[Node], answer: Union) -> Opinion:
    """``x < 1 or x > 2`` against intervals."""
    intervals = [as_interval(item) if isinstance(item, Relation) else None for item in gold]
    found = [interval for interval in intervals if interval is not None]
    return _matched(found, answer.parts) if len(found) == len(gold) else False


def as_interval(relation: Relation) -> Listing | None:
    """``a < x <= b`` and ``x > a`` as the interval they say, where x is no number and the ends are."""
    sides, signs = relation.sides, relation.signs
    if all(sign in _FLIPPED for sign in signs):
        sides, signs = sides[::-1], tuple(_FLIPPED[sign] for sign in reversed(signs))
    if not all(sign in ("<", r"\le") for sign in signs) or len(sides) > 3:
        return None
    if len(sides) == 2:
        below, above = (_is_number(side) for side in sides)
        if below == above:
            return None
        low, high = (sides[0], Scalar(r"\infty")) if below else (Scalar(r"-\infty"), sides[1])
        opening = "[" if below and signs[0] == r"\le" else "("
        closing = "]" if above and signs[0] == r"\le" else ")"
        return Listing(opening, closing, (low, high))
    if not _is_number(sides[0]) or _is_number(sides[1]) or not _is_number(sides[2]):
        return None
    return Listing("[" if signs[0] == r"\le" else "(", "]" if signs[1] == r"\le" else ")", (sides[0], sides[2]))


def _is_number(side: Node) -> bool:
    if not isinstance(side, Scalar):
        return False
    try:
        return not expression(side.latex).free_symbols
    except Unreadable:
        return False
