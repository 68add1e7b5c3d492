"""Comparison of equations and inequalities, and their conversion to intervals."""

from __future__ import annotations

from itertools import pairwise

import sympy
from sympy.core.function import AppliedUndef

from stretto_verify.math.compare.equality import proportional, same_value
from stretto_verify.math.compare.naming import Same, is_naming, is_number, name
from stretto_verify.math.compare.scalars import Opinion, times
from stretto_verify.math.parse.expressions import expression
from stretto_verify.math.parse.phrases import without
from stretto_verify.math.parse.structure import Listing, Node, Relation, Scalar, Union, Unreadable

Step = tuple[str, sympy.Basic]

_FLIPPED = {">": "<", r"\ge": r"\le"}


def same_relation(gold: Relation, answer: Relation, same: Same) -> Opinion:
    """Whether two relations are the same; None if unknown. False if `gold` is solved (``x = 3``) and `answer` is not
    (``2x + 1 = 7``). `same` compares their sides."""
    if _is_solved(gold) and not _is_solved(answer):
        return False  # 2x + 1 = 7, which may be the question, is not x = 3
    if is_naming(gold) and is_naming(answer):
        return _same_equation(gold, answer, same)
    if gold.signs == answer.signs == (r"\neq",) and any(isinstance(side.sides[1], Listing) for side in (gold, answer)):
        return gold.sides[0] == answer.sides[0] and same(_listed(gold.sides[1]), _listed(answer.sides[1]))
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


def _is_solved(relation: Relation) -> bool:
    """Whether exactly one side is a name (possibly with a minus sign) and all other sides are numbers, lists or
    unions."""
    named = [name(_positive(side)) is not None for side in relation.sides]
    values = [side for side, alone in zip(relation.sides, named, strict=True) if not alone]
    return sum(named) == 1 and all(isinstance(side, Listing | Union) or is_number(side) for side in values)


def _positive(side: Node) -> Node:
    if isinstance(side, Scalar) and side.latex.startswith("-"):
        return Scalar(side.latex[1:].strip())
    return side


def _same_equation(gold: Relation, answer: Relation, same: Same) -> Opinion:
    """Whether two equations are the same; None if unknown. If they name the same quantity (``x = 5``; ``y`` and
    ``f(x)`` count as one), their last sides are compared by `same`. Definitions of one function are compared with its
    variables renamed (``f(n) = n + 1``, ``f(x) = x + 1``). Others are the same if one is a multiple of the other."""
    one, other = name(gold.sides[0]), name(answer.sides[0])
    if (
        one is not None
        and other is not None
        and ({one, other} == {"y", "f(x)"} or one == other or _is_called(one, other) or _is_called(other, one))
    ):
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
    """Whether both define the same function, as ``f(n) = n + 1`` and ``f(x) = x + 1`` do; None if they are not both
    definitions of one function, or if unknown."""
    sides = [side for relation in (gold, answer) for side in (relation.sides[0], relation.sides[-1])]
    try:
        call, value, other_call, other_value = [
            expression(side.latex) if isinstance(side, Scalar) else sympy.nan for side in sides
        ]
    except Unreadable:
        return None
    if (
        not isinstance(call, AppliedUndef)
        or not isinstance(other_call, AppliedUndef)
        or sympy.nan in (value, other_value)
    ):
        return None
    if call.func != other_call.func or not all(arg.is_Symbol for arg in (*call.args, *other_call.args)):
        return None
    if len(call.args) != len(other_call.args):
        return None
    renamed = dict(zip(map(str, other_call.args), map(str, call.args), strict=True))
    if {str(symbol) for symbol in other_value.free_symbols} & (set(renamed.values()) - set(renamed)):
        return False  # f(y) = 2x is a constant, not f(x) = 2x with another name
    return same_value(value, other_value, renamed)


def _is_called(function: str, letter: str) -> bool:
    """Whether `letter` is the name of `function`: ``f`` for ``f(x)``."""
    return len(letter) == 1 and function.startswith(f"{letter}(")


def _steps(relation: Relation) -> list[Step] | None:
    """Each comparison of a chain ``a < b >= c`` as a sign, in which > becomes <, and the difference of its sides
    (larger minus smaller); None if a side is no scalar or cannot be read."""
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
        return sympy.Add(expression(left.latex), times(-1, expression(right.latex)), evaluate=False)
    except Unreadable:
        return None


def as_asked(gold: Relation) -> Node | None:
    """Another form that is accepted for a gold relation: the value that it names or computes, or the interval of an
    inequality; None if there is none."""
    if is_naming(gold):
        first, last = gold.sides[0], gold.sides[-1]
        if name(first) is not None:
            return last
        if not is_number(first) or not isinstance(last, Scalar) or is_number(last):
            return last if is_number(first) else None
        return first if name(last) is not None else None  # 5 = x has the value 5, 7 = 11a + c has none
    return as_range(gold)


def as_range(relation: Relation) -> Listing | Union | None:
    r"""``a < x <= b`` or ``x > a`` as an interval, ``x \neq a`` as a union of intervals; None for other relations."""
    if relation.signs == (r"\neq",):
        return None if is_number(relation.sides[0]) else without(_listed(relation.sides[1]).items)
    return as_interval(relation)


def _listed(side: Node) -> Listing:
    return side if isinstance(side, Listing) else Listing("", "", (side,))


def as_interval(relation: Relation) -> Listing | None:
    """``a < x <= b`` or ``x > a`` as an interval; None unless the ends are numbers and x is not."""
    sides, signs = relation.sides, relation.signs
    if all(sign in _FLIPPED for sign in signs):
        sides, signs = sides[::-1], tuple(_FLIPPED[sign] for sign in reversed(signs))
    if not all(sign in ("<", r"\le") for sign in signs) or len(sides) > 3:
        return None
    if len(sides) == 2:
        below, above = (is_number(side) for side in sides)
        if below == above:
            return None
        low, high = (sides[0], Scalar(r"\infty")) if below else (Scalar(r"-\infty"), sides[1])
        opening = "[" if below and signs[0] == r"\le" else "("
        closing = "]" if above and signs[0] == r"\le" else ")"
        return Listing(opening, closing, (low, high))
    if not is_number(sides[0]) or is_number(sides[1]) or not is_number(sides[2]):
        return None
    return Listing("[" if signs[0] == r"\le" else "(", "]" if signs[1] == r"\le" else ")", (sides[0], sides[2]))
