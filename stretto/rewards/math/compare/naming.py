r"""What an equation names, and whether it says a value: ``x = 5`` says 5, ``2x = 5`` does not.

A completion may give its value a name, or say of what it is the value: ``x``, ``f(2)``, ``AB``, ``6 \cdot 7``. Any
other left side is that of an equation to be solved, perhaps that of the question; its right side is no final answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import sympy
from sympy.core.function import AppliedUndef

from stretto.rewards.math.compare.scalars import Opinion
from stretto.rewards.math.parse.expressions import expression, number
from stretto.rewards.math.parse.structure import (
    Listing,
    Matrix,
    Node,
    Ratio,
    Relation,
    Scalar,
    Union,
    Unreadable,
    Words,
)

Same = Callable[[Node, Node], Opinion]

_NAMING = ("=", r"\in", r"\equiv")
_TEXTS = re.compile(r"\\text\{[^{}]*\}")
_LONG_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3}")
_COMPUTED = re.compile(r"[0-9]\s*(?:\\\s*)?[a-zA-Z](?![a-zA-Z])|[a-zA-Z)]\s*\^\s*\{?[0-9]|[-+]\s*[0-9]|[0-9]\s*[-+]")
_OPERATORS = (
    *(sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.Max, sympy.Min),
    *(AppliedUndef, sympy.Symbol),
)


def is_naming(relation: Relation) -> bool:
    """Does it say what something is equal to, or in which set it is?"""
    return all(sign in _NAMING for sign in relation.signs)


def is_number(side: Node) -> bool:
    """Is it an expression without any variable?"""
    if not isinstance(side, Scalar):
        return False
    try:
        return not expression(side.latex).free_symbols
    except Unreadable:
        return False


def name(side: Node) -> str | None:
    """What only gives a name to the other side: x, f(x), AB/CD, (p, q), a text."""
    match side:
        case Words(text=text):
            return text.replace(" ", "")
        case Listing(items=parts) | Ratio(parts=parts):
            names = [name(part) for part in parts]
            return None if None in names else "(" + ",".join(map(str, names)) + ")"
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


# Is the last side of a completion's equation its value?


def says_its_last_side(given: Relation, same: Same) -> bool:
    """Does it name its last side (``x = 5``), or compute it (``6 · 7 = 42``, ``a^2 + b^2 = 9 + 16 = 25``)?"""
    first, *between, last = given.sides
    if _is_asked(first) or computes(first, last, same, given.signs[0]):
        return True
    return any(isinstance(side, Scalar) and not number(side.latex) and computes(side, last, same) for side in between)


def computes(side: Node, value: Node, same: Same, sign: str = "=") -> bool:
    """May a side without variables have that value? ``2 + 2 = 5`` may not."""
    if not _is_constant(side):
        return False
    if sign == r"\equiv":
        return True
    if isinstance(value, Listing) and not value.ordered and isinstance(side, Scalar):
        return any(computes(side, item, same) for item in value.items)
    if isinstance(side, Scalar) and isinstance(value, Scalar):
        if not _is_constant(value):
            return False
        if side.unit != value.unit and (value.unit or "base" in side.unit):
            return True
    return same(side, value) is not False


def _is_constant(side: Node) -> bool:
    """Without variables, but for the imaginary unit."""
    match side:
        case Scalar(latex=latex):
            try:
                return all(str(symbol) == "i" for symbol in expression(latex).free_symbols)
            except Unreadable:
                return False
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(map(_is_constant, parts))
    return False


def _is_asked(side: Node) -> bool:
    """May a question ask for that?"""
    match side:
        case Words(text=text):
            return _is_title(text)
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(map(_is_asked, parts))
        case Matrix(rows=rows):
            return all(_is_asked(cell) for row in rows for cell in row)
        case Scalar(latex=latex):
            if latex.startswith(r"\text"):
                return _is_title(_TEXTS.sub("", latex))
            try:
                return _is_quantity(expression(latex))
            except Unreadable:
                return _is_title(latex)
    return False


def _is_title(text: str) -> bool:
    """Words, or notation that cannot be parsed, ``A \\cap B``; an expression that cannot be parsed is neither."""
    return _LONG_WORD.search(text) is not None or _COMPUTED.search(re.sub(r"\\[a-zA-Z]+", r"\\", text)) is None


def _is_quantity(found: sympy.Basic) -> bool:
    """A name, a product of names, or a quotient: ``AB``, ``xyz``, ``AB/BC``; no ``1/x``, which has nothing above."""
    if isinstance(found, _OPERATORS):
        return True
    above = isinstance(found, sympy.Mul) and any(not isinstance(part, sympy.Pow) for part in found.args)
    return above and _is_name(found)


# Several names.


def as_named(given: Node) -> dict[str, Node] | None:
    """The values of several different names, ``y = 2, x = 1`` or ``(y, x) = (2, 1)``; None for everything else."""
    relations = given.items if isinstance(given, Listing) else (given,)
    found: list[tuple[Node, Node]] = []
    for relation in relations:
        if not isinstance(relation, Relation) or not is_naming(relation):
            return None
        called, value = relation.sides[0], relation.sides[-1]
        if isinstance(given, Relation) and isinstance(called, Listing):
            if not isinstance(value, Listing) or value.opening == "{" or len(value.items) != len(called.items):
                return None
            if any(isinstance(item, Listing) for item in value.items):
                return None  # several points
            found += zip(called.items, value.items, strict=True)
        else:
            found.append((called, value))
    named = {title: value for side, value in found if (title := name(side)) is not None}
    return named if len(named) == len(found) > 1 else None


def has_one_name(listing: Listing) -> bool:
    """``x = 1, x = 2``: one name, and several values that it may have."""
    found = {name(item.sides[0]) if isinstance(item, Relation) and is_naming(item) else None for item in listing.items}
    return len(listing.items) > len(found) == 1 and None not in found
