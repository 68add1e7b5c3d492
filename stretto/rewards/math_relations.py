"""Equations, inequalities, and the intervals that say the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import sympy
from sympy.core.function import AppliedUndef

from stretto.rewards.math_equality import proportional, same_value
from stretto.rewards.math_scalars import Opinion, expression, times
from stretto.rewards.math_structure import Listing, Node, Ratio, Relation, Scalar, Union, Unreadable, Words

Same = Callable[[Node, Node], Opinion]
Step = tuple[str, sympy.Basic]

_NAMING = ("=", r"\in", r"\equiv")
_FLIPPED = {">": "<", r"\ge": r"\le"}


def same_relation(gold: Relation, answer: Relation, same: Same) -> Opinion:
    """Two relations; `same` compares what stands on their sides."""
    if is_naming(gold) and is_naming(answer):
        return _same_equation(gold, answer, same)
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


def _same_equation(gold: Relation, answer: Relation, same: Same) -> Opinion:
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
        return sympy.Add(expression(left.latex), times(-1, expression(right.latex)), evaluate=False)
    except Unreadable:
        return None


def as_asked(gold: Relation) -> Node | None:
    """What a gold relation may be answered with besides itself: the value that it names, or the range that it says."""
    if is_naming(gold):
        return gold.sides[-1] if _name(gold.sides[0]) is not None else None
    if gold.signs == (r"\neq",):
        low, high = Scalar(r"-\infty"), Scalar(r"\infty")
        return Union((Listing("(", ")", (low, gold.sides[1])), Listing("(", ")", (gold.sides[1], high))))
    return as_interval(gold)


def is_naming(relation: Relation) -> bool:
    """Does it say what something is equal to, or in which set it is?"""
    return all(sign in _NAMING for sign in relation.signs)


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
